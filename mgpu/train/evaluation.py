"""Evaluation without padding: every sample counts once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mgpu.data.loading import to_device
from mgpu.data.seeding import seed_everything
from mgpu.parallel._lockstep import passes
from mgpu.parallel.base import MicroBatch, Trainable, Window


@dataclass(frozen=True)
class EvaluationData:
    """This replica's batches of the evaluation data, and how many every replica has."""

    batches: Iterable[Any]
    counts: tuple[int, ...]


def evaluate(trainable: Trainable, data: EvaluationData, metrics: dict[str, Any], seed: int) -> dict[str, float]:
    """Loss over all units of the evaluation data, and each metric over all samples. Called by all ranks together.

    Ranks that share a replica all go through its batches; one of them counts.
    """
    context = trainable.context
    was_training = trainable.model.training
    trainable.model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=context.device)
    window = Window(_micro_batches(data.batches, seed, context.device), data.counts)
    try:
        with torch.no_grad():
            for micro_batch, real in passes(trainable, window):
                seed_everything(micro_batch.seed)
                with context.autocast():
                    loss_sum, units, predictions, targets = trainable.task.evaluate(  # type: ignore[attr-defined]
                        trainable.model, micro_batch.batch
                    )
                if not (real and trainable.counts):
                    continue
                count = units if isinstance(units, torch.Tensor) else torch.tensor(units, device=context.device)
                sums += torch.stack([loss_sum.double(), count.double()])
                for metric in metrics.values():
                    metric.update(predictions, targets)
        trainable.settle()
        if context.world > 1:
            torch.distributed.all_reduce(sums)
        values = {"loss": float(sums[0] / sums[1])} if sums[1] else {}
        for name, metric in metrics.items():
            values[name] = float(metric.compute())
            metric.reset()
        return values
    finally:
        trainable.model.train(was_training)


def _micro_batches(batches: Iterable[Any], seed: int, device: torch.device) -> Iterator[MicroBatch]:
    for batch in batches:
        yield MicroBatch(seed, to_device(batch, device))
