"""Evaluation without padding: every sample counts once, whatever the number of ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu.data.loading import to_device
from mgpu.data.seeding import seed_everything
from mgpu.errors import TaskError
from mgpu.parallel._lockstep import passes
from mgpu.parallel.base import Context, MicroBatch, Trainable, Window

_FOUR = ("loss_sum", "units", "predictions", "targets")
_Pass = tuple[int | None, MicroBatch]


def evaluate(
    trainable: Trainable,
    batches: Iterable[tuple[int, Any]],
    counts: tuple[int, ...] | None,
    metrics: dict[str, Any],
    seed: int,
) -> dict[str, float] | None:
    """Loss over all units of the evaluation data, and each metric over all samples. Called by all ranks together.

    None, on all ranks, where a rank was asked to stop before the end.

    `batches` gives (index, micro batch); every index comes once over all replicas, of which each has as many as `counts`
    says (None: not known). Ranks that share a replica all go through its batches; one of them counts. Metrics of
    torchmetrics are synced over their real counts; any other object gets all predictions and targets on rank 0, in the
    order of the data.
    """
    context = trainable.context
    was_training = trainable.model.training
    trainable.model.eval()
    sums: dict[int, Tensor] = {}
    synced = {name: metric for name, metric in metrics.items() if _syncs(metric)}
    plain = {name: metric for name, metric in metrics.items() if name not in synced}
    seen: dict[int, tuple[Any, Any]] = {}
    until = _UntilStopped(trainable)
    try:
        with torch.no_grad():
            for index, micro_batch in until.each(_passes(trainable, batches, counts, seed)):
                seed_everything(seed)
                with context.autocast():
                    told = trainable.task.evaluate(trainable.model, micro_batch.batch)  # type: ignore[attr-defined]
                loss_sum, units, predictions, targets = _four(told, trainable.task)
                if index is None or not trainable.counts:
                    continue
                count = units if isinstance(units, Tensor) else torch.tensor(units, device=context.device)
                sums[index] = torch.stack([loss_sum.double(), count.double()])
                for metric in synced.values():
                    metric.update(predictions, targets)
                if plain:
                    seen[index] = predictions.cpu(), targets.cpu()
        trainable.settle()
        if until.is_broken_off():
            for metric in synced.values():
                metric.reset()
            return None
        loss_sum, units = _in_order(sums, context)
        values = {"loss": float(loss_sum / units)} if units else {}
        values.update(_computed(synced))
        values.update(_computed_on_rank_0(plain, seen, context))
        return {name: values[name] for name in ("loss", *metrics) if name in values}
    finally:
        trainable.model.train(was_training)


def _four(told: Any, task: Any) -> tuple[Tensor, Any, Any, Any]:
    """What a task's `evaluate` has returned, if it is what it must be."""
    if isinstance(told, tuple | list) and len(told) == len(_FOUR):
        return tuple(told)
    code = getattr(inspect.unwrap(type(task).evaluate), "__code__", None)
    count = f"{len(told)} values" if isinstance(told, tuple | list) else f"a {type(told).__name__}"
    raise TaskError(
        f"{type(task).__name__}.evaluate gives {count}, and must give four: {', '.join(_FOUR)}",
        hint=f"it is defined at {code.co_filename}:{code.co_firstlineno}" if code else "",
    )


class _UntilStopped:
    """Breaks an evaluation off once a rank was asked to stop, without ever leaving a peer alone in a collective."""

    def __init__(self, trainable: Trainable) -> None:
        self._context = trainable.context
        self._in_step = trainable.lockstep or trainable.context.world > trainable.context.replicas
        """Whether a pass is collective. Then ranks vote before each; a rank without a pass left votes on."""
        self._broken = False

    def each(self, passes: Iterator[_Pass]) -> Iterator[_Pass]:
        while True:
            following = next(passes, None)
            asked, more = self._context.stop.is_heard, following is not None
            if self._in_step and self._context.world > 1:
                asked, more = self._any(asked, more)
            self._broken = more and asked
            if self._broken or not more:
                return
            if following is not None:
                yield following

    def is_broken_off(self) -> bool:
        """The word of all ranks."""
        (broken,) = self._any(self._broken) if self._context.world > 1 else (self._broken,)
        return broken

    def _any(self, *facts: bool) -> tuple[bool, ...]:
        votes = torch.tensor([float(fact) for fact in facts], device=self._context.device)
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return tuple(vote > 0 for vote in votes.tolist())


def _passes(
    trainable: Trainable, batches: Iterable[tuple[int, Any]], counts: tuple[int, ...] | None, seed: int
) -> Iterator[_Pass]:
    """The forward passes of this rank. Index None: one that is only there because its peers make one."""
    context = trainable.context
    indices: list[int] = []

    def placed() -> Iterator[MicroBatch]:
        for index, batch in batches:
            indices.append(index)
            yield MicroBatch(seed, to_device(batch, context.device, context.dtype))

    if counts is None and trainable.lockstep:
        batches = list(batches)
        told: list[Any] = [None] * context.world
        dist.all_gather_object(told, (context.replica, len(batches)))
        counts = tuple(dict(told)[replica] for replica in range(context.replicas))
    for micro_batch, real in passes(trainable, Window(placed(), counts or (0,) * context.replicas)):
        yield (indices[-1] if real else None), micro_batch


def _in_order(sums: dict[int, Tensor], context: Context) -> tuple[Tensor, Tensor]:
    """The sum over all micro batches in the order of their indices, so that its bits do not depend on who had which."""
    last = torch.tensor([max(sums, default=-1)], device=context.device)
    if context.world > 1:
        dist.all_reduce(last, dist.ReduceOp.MAX)
    table = torch.zeros(int(last) + 1, 2, dtype=torch.float64, device=context.device)
    if sums:
        table[list(sums)] = torch.stack(list(sums.values()))
    if context.world > 1:
        dist.all_reduce(table)  # one rank's number and zeros: exact in any order
    loss_sum, units = table.sum(0)
    return loss_sum, units


def _syncs(metric: Any) -> bool:
    """Whether the metric adds up over ranks by itself, as those of torchmetrics do."""
    return hasattr(metric, "dist_sync_fn") and hasattr(metric, "sync")


def _computed(metrics: dict[str, Any]) -> dict[str, float]:
    values = {}
    for name, metric in metrics.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a rank may have had no sample to update it with
            values[name] = float(metric.compute())
        metric.reset()
    return values


def _computed_on_rank_0(
    metrics: dict[str, Any], seen: dict[int, tuple[Any, Any]], context: Context
) -> dict[str, float]:
    if not metrics:
        return {}
    told: list[Any] = [None] * context.world
    if context.world > 1:
        dist.gather_object(seen, told if context.rank == 0 else None)
    else:
        told = [seen]
    values: dict[str, float] = {}
    if context.rank == 0:
        merged = {index: pair for one in told for index, pair in one.items()}
        for name, metric in metrics.items():
            for index in sorted(merged):
                metric.update(*merged[index])
            values[name] = float(metric.compute())
            metric.reset()
    box = [values]
    if context.world > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]
