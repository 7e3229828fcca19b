"""The learning rate as a function of the step alone: nothing to advance, nothing to save, the same in every layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


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
