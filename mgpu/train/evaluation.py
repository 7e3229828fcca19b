"""Evaluation without padding: every sample counts once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mgpu.data.loading import to_device
from mgpu.data.seeding import seed_everything
from mgpu.parallel.base import Trainable


def evaluate(trainable: Trainable, batches: Iterable[Any], metrics: dict[str, Any], seed: int) -> dict[str, float]:
    """Loss over all units of the evaluation data, and each metric over all samples. Called by all ranks together."""
    context = trainable.context
    was_training = trainable.model.training
    trainable.model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=context.device)
    try:
        with torch.no_grad():
            for batch in batches:
                seed_everything(seed)
                with context.autocast():
                    loss_sum, units, predictions, targets = trainable.task.evaluate(  # type: ignore[attr-defined]
                        trainable.model, to_device(batch, context.device)
                    )
                count = units if isinstance(units, torch.Tensor) else torch.tensor(units, device=context.device)
                sums += torch.stack([loss_sum.double(), count.double()])
                for metric in metrics.values():
                    metric.update(predictions, targets)
        if context.replicas > 1:
            torch.distributed.all_reduce(sums)
        values = {"loss": float(sums[0] / sums[1])} if sums[1] else {}
        for name, metric in metrics.items():
            values[name] = float(metric.compute())
            metric.reset()
        return values
    finally:
        trainable.model.train(was_training)
