"""What the state of each stretch of a model takes on a device: weights, gradients, optimizer state and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgpu.parallel._cuts import Part
from mgpu.parallel._survey import Unknown
from mgpu.parallel._twin import undrawn
from mgpu.parallel.base import Context

if TYPE_CHECKING:
    from torch import nn

PROBE = 64
"""Side of the square matrix that an optimizer is tried on."""


def bytes_of(model: nn.Module, parts: Sequence[Part], context: Context) -> list[int]:
    """Bytes of each stretch. A tied parameter lies where its first part does; what is in no part lies in the first."""
    share = state_share(context)
    sums = [0] * (1 + max(part.stage for part in parts))
    home = {
        id(value): part.stage
        for part in reversed(parts)
        for value in (*part.module.parameters(), *part.module.buffers())
    }
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size()
        sums[home.get(id(parameter), 0)] += int(size * (2 + share)) if parameter.requires_grad else size
    for buffer in model.buffers():
        sums[home.get(id(buffer), 0)] += buffer.numel() * buffer.element_size()
    return sums


def state_share(context: Context) -> float:
    """Bytes that the optimizer keeps for each byte of a matrix: 2 for Adam, 1 for SGD with momentum.

    Found by a step on a small one; Unknown where that fails.
    """
    import torch
    from torch import nn

    if context.optimizer is None:
        return 0.0
    probe = nn.Parameter(torch.zeros(PROBE, PROBE))
    probe.grad = torch.zeros_like(probe)
    with undrawn():
        try:
            optimizer = context.optimizer([probe])
            optimizer.step()
        except Exception as error:
            raise Unknown(f"the optimizer does not step: {type(error).__name__}: {error}") from error
    kept = [value for value in optimizer.state[probe].values() if isinstance(value, torch.Tensor) and value.numel() > 1]
    return sum(value.numel() * value.element_size() for value in kept) / (probe.numel() * probe.element_size())
