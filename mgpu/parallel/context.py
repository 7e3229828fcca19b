"""What one rank knows about itself: its seat, its device, its arithmetic and its seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class StopVote:
    """Set by a signal handler in one rank; the ranks agree on it at the end of a step."""

    asked: bool = False


@dataclass(frozen=True)
class Context:
    """One rank's surroundings, given to strategies and tasks.

    `loss_scale` is a power of two that keeps summed losses near 1 before `backward`; it is taken out again exactly.
    """

    rank: int
    world: int
    replica: int
    replicas: int
    device: torch.device
    precision: str = "fp32"
    loss_scale: float = 1.0
    scaler: Any = None
    stop: StopVote = field(default_factory=StopVote)
    reseed: Callable[[int], None] = lambda seed: None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The arithmetic of the forward pass: autocast for bf16 and fp16, nothing else."""
        import torch

        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        if self.precision not in kinds:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=kinds[self.precision])
