"""The learning rate as a function of the step alone: nothing to advance, nothing to save, the same in every layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mgpu.errors import DataError
from mgpu.spec import RunSpec


@dataclass(frozen=True)
class LearningRate:
    """The factor on the optimizer's own learning rate. `warmup` and `total` are in steps."""

    warmup: int
    total: int
    shape: Literal["constant", "linear", "cosine"]
    floor: float

    def factor(self, step: int) -> float:
        """The factor for the step that follows `step` finished ones: (step + 1) / warmup, then the shape.

        >>> LearningRate(0, 10, "linear", 0.0).factor(5)
        0.5
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.shape == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        fall = 1 - progress if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.floor + (1 - self.floor) * fall


def total_steps(spec: RunSpec, steps_per_epoch: int | None) -> int | None:
    """Steps of the whole training; None where the length of an epoch is not known beforehand."""
    assert spec.duration
    if spec.duration.unit == "steps":
        return spec.duration.count
    return None if steps_per_epoch is None else spec.duration.count * steps_per_epoch


def learning_rate(spec: RunSpec, steps_per_epoch: int | None, total: int | None) -> LearningRate:
    """The schedule of `spec` over `total` steps; DataError where it needs a length that the data set does not tell."""
    warmup = spec.schedule.warmup
    needs_length = total is None and spec.schedule.shape != "constant"
    if needs_length or (warmup is not None and warmup.unit == "epochs" and steps_per_epoch is None):
        raise DataError(
            "the schedule needs the number of steps, and the data set does not tell its length",
            hint="write duration and warmup in steps, or give the data set __len__",
        )
    steps = 0 if warmup is None else warmup.count * ((steps_per_epoch or 1) if warmup.unit == "epochs" else 1)
    return LearningRate(warmup=steps, total=total or 0, shape=spec.schedule.shape, floor=spec.schedule.floor)
