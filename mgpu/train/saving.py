"""When a training saves, what it saves, and where it starts from: rank 0 decides, all ranks follow."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mgpu
from mgpu.checkpoint import CheckpointFolder, Found, Retention
from mgpu.checkpoint.checkpointer import Checkpointer, failure
from mgpu.checkpoint.publish import Publisher
from mgpu.checkpoint.state import TrainingState
from mgpu.checkpoint.weights import find_weights
from mgpu.checkpoint.writer import Exchange
from mgpu.data.position import Position
from mgpu.errors import CheckpointError, MgpuError
from mgpu.parallel.base import Context
from mgpu.plan import Plan
from mgpu.runs import Run
from mgpu.spec import RunSpec, Span
from mgpu.spec.models import Checkpoint


def has_ended(every: Span | None, before: Position, after: Position) -> bool:
    """Whether a span of steps or epochs ended with the step from `before` to `after`."""
    if every is None or every.unit not in ("steps", "epochs"):
        return False
    if every.unit == "steps":
        return after.step != before.step and after.step % every.count == 0
    return after.epoch != before.epoch and after.epoch % every.count == 0


class Saving:
    """The saves of one training. All methods but `measured` are called by all ranks together."""

    def __init__(
        self,
        spec: Checkpoint,
        checkpointer: Checkpointer,
        state: TrainingState,
        context: Context,
        extra: Callable[[], Mapping[str, Tensor]] = dict,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """`extra` gives further tensors to save, by name; ranks that hold different ones name them differently. `facts` are
        plain values that every checkpoint of the attempt has."""
        self.checkpointer = checkpointer
        self._spec = spec
        self._state = state
        self._context = context
        self._extra = extra
        self._facts = dict(facts or {})
        self._is_prepared = False
        self._saved = time.monotonic()
        self._metrics: tuple[int, Mapping[str, float]] = (-1, {})

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """The evaluation at `step`: a checkpoint of that step, saved before or after, is compared by it."""
        self._metrics = step, dict(values)
        self.checkpointer.measured(step, values)

    def is_due(self, before: Position, after: Position) -> bool:
        """Whether to save after the step from `before` to `after`."""
        self.checkpointer.poll()
        every = self._spec.every
        if every is None:
            return False
        if not self._is_prepared:
            self._is_prepared = True
            self.checkpointer.prepare(self._state.gather(self._extra()), self._context.device)
        return self._is_time(every) if every.unit == "minutes" else has_ended(every, before, after)

    def _is_time(self, every: Span) -> bool:
        """By rank 0's clock, so that all ranks agree."""
        late = torch.tensor([float(time.monotonic() - self._saved >= every.seconds)], device=self._context.device)
        if self._context.world > 1:
            dist.broadcast(late, 0)
        return bool(late.item())

    def save(self, position: Position, *, unevaluated: bool = False) -> None:
        """Save this step; returns once it is copied, or with `async: false` once it is on disk.

        `unevaluated` says that an evaluation of this step is due and still to come.
        """
        scaler = self._context.scaler
        step, metrics = self._metrics
        self.checkpointer.save(
            position.step,
            self._state.gather(self._extra()),
            device=self._context.device,
            data={"scaler": scaler.state_dict() if scaler else None, "unevaluated": unevaluated, **self._facts},
            position=position.to_json(),
            metrics=metrics if step == position.step else {},
        )
        self._saved = time.monotonic()
        if not self._spec.asynchronous:
            self.checkpointer.wait()

    def save_last(self, position: Position, *, unevaluated: bool = False) -> None:
        """The save at the end, if there is to be one and this step is not saved yet."""
        last = self.checkpointer.wait()
        is_saved = last is not None and last.step == position.step and not last.error
        if self._spec.at_exit and not is_saved:
            self.save(position, unevaluated=unevaluated)

    def finish(self, position: Position, *, unevaluated: bool = False) -> None:
        """The last save, and the end of all in flight. Ends the rank where training would be lost."""
        self.save_last(position, unevaluated=unevaluated)
        self.checkpointer.close()
        if error := failure(self.checkpointer):
            raise error


def changes_of_order(start: Start, order: Mapping[str, int]) -> list[str]:
    """What is to be told where the samples do not come in the order in which they came before. `order`: samples and seed."""
    before = start.checkpoint.data.get("order") if start.checkpoint else None
    if start.checkpoint is None or not isinstance(before, dict):
        return []
    in_epoch = start.checkpoint.data["position"].get("offset", 0) > 0
    then = ": in the epoch under way some samples may come twice or not at all" if in_epoch else ""
    words = {"samples": "the training data has {} samples, and had {}", "seed": "the seed is {}, and was {}"}
    return [
        text.format(order[name], before[name]) + then
        for name, text in words.items()
        if before.get(name, order[name]) != order[name]
    ]


def make_checkpointer(
    run: Run, spec: RunSpec, plan: Plan, rank: int, attempt: int, connect: Callable[[], dist.Store]
) -> Checkpointer:
    """The checkpointer of one rank of an attempt. Forks: to be called before the rank has threads or a device."""
    publisher = Publisher(
        folder=CheckpointFolder(run.checkpoints),
        retention=Retention.of(spec.checkpoint),
        record=run.tell,
        plan={"strategy": plan.strategy, "world": plan.world, "replicas": plan.replicas, "device": plan.device},
        versions={"mgpu": mgpu.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
    )
    return Checkpointer(
        publisher, rank=rank, world=plan.world, token=str(attempt), connect=connect if plan.world > 1 else None
    )


@dataclass(frozen=True)
class Start:
    """What a training starts from: a checkpoint of its own, or the weights of another; both None for a fresh one."""

    checkpoint: Found | None = None
    weights: Found | Path | None = None

    @property
    def is_unevaluated(self) -> bool:
        """Whether the training was ended before an evaluation that was due at its step."""
        found = self.checkpoint
        return found is not None and bool(found.data.get("unevaluated")) and not found.manifest.metrics


def choose_start(run: Run, init_from: str | None, rank: int, connect: Callable[[], dist.Store] | None) -> Start:
    """Rank 0 looks, checks the files, tells of what it passed over, and all ranks start from the same.

    Raises CheckpointError, on all ranks, where there are checkpoints and none is whole.
    """
    exchange = Exchange(connect)
    if rank == 0:
        exchange.tell("start", _look(run, init_from))
    verdict = _Verdict(**exchange.hear("start"))
    if verdict.error:
        raise CheckpointError(verdict.error, hint=verdict.hint)
    checkpoint = Found.at(Path(verdict.checkpoint), contents=False) if verdict.checkpoint else None
    weights = Path(verdict.weights) if verdict.weights else None
    if weights is not None and weights.is_dir():
        return Start(checkpoint, Found.at(weights, contents=False))
    return Start(checkpoint, weights)


@dataclass(frozen=True)
class _Verdict:
    checkpoint: str = ""
    weights: str = ""
    error: str = ""
    hint: str = ""


def _look(run: Run, init_from: str | None) -> _Verdict:
    folder = CheckpointFolder(run.checkpoints)
    found, warnings = folder.newest()
    for warning in warnings:
        run.tell("note", text=f"checkpoint {warning}")
    folder.clear_leftovers()
    if found is not None:
        return _Verdict(checkpoint=str(found.path))
    if folder.steps():
        return _Verdict(error="no checkpoint of this run is whole", hint="the notes above say what is damaged")
    if init_from is None:
        return _Verdict()
    try:
        source = find_weights(init_from, run.path.parent)
    except MgpuError as error:
        return _Verdict(error=f"init_from: {error.message}", hint=error.hint)
    where = source.path if isinstance(source, Found) else source
    run.tell("note", text=f"starting from the weights of {where}")
    return _Verdict(weights=str(where.absolute()))
