"""Guards against ranks that drift apart in silence: what must be alike is compared, and what differs is named."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu.errors import DriftError
from mgpu.parallel.base import Trainable

CHUNK = 1 << 22
"""Elements hashed at a time, which bounds the memory it takes."""
_ODD = 0x1E3779B97F4A7C15


class FrozenSet:
    """Which parameters trained when the model was laid out. A later change would train them without any sum over ranks."""

    def __init__(self, trainable: Trainable) -> None:
        self._parameters = list(trainable.named_parameters.items())
        self._trains = [parameter.requires_grad for _, parameter in self._parameters]

    def check(self, step: int) -> None:
        """DriftError names the first parameter that was frozen or unfrozen since. About 50 ns a parameter."""
        for (name, parameter), trains in zip(self._parameters, self._trains, strict=True):
            if parameter.requires_grad != trains:
                now = "unfrozen" if parameter.requires_grad else "frozen"
                raise DriftError(
                    f"parameter {name} was {now} after the start of the training (seen before step {step + 1})",
                    hint="the optimizer and the strategy do not know it: set requires_grad when the model is built; to train "
                    "in phases, start the next phase as a new run",
                )


def checksum(value: Tensor) -> Tensor:
    """An int64 scalar of the bits of `value`: another bit anywhere gives another sum, but for one in 2^64."""
    flat = value.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=value.device)
        # Odd multipliers make each term a bijection of its word, so that a single changed element always shows.
        total += ((part + places) * (places * 2 + 1) * _ODD).sum()
    return total


def check_alike(trainable: Trainable, step: int) -> None:
    """DriftError where a parameter or a buffer of a model that all ranks hold is not the same on all. Collective.

    Reads every parameter once; sends 8 bytes for each.
    """
    model, context = trainable.model, trainable.context
    if not trainable.copies or context.world == 1:
        return
    named: list[tuple[str, str, Tensor]] = [(name, "parameter", value) for name, value in model.named_parameters()]
    named += [(name, "buffer", value) for name, value in model.named_buffers()]
    mine = torch.stack([checksum(value) for _, _, value in named]) if named else torch.zeros(0, dtype=torch.int64)
    mine = mine.to(context.device)
    told = [torch.empty_like(mine) for _ in range(context.world)]
    dist.all_gather(told, mine)
    table = torch.stack(told).cpu()
    for index, (name, kind, _) in enumerate(named):
        odd = _minority(table[:, index].tolist())
        if odd:
            ranks = ", ".join(map(str, odd))
            raise DriftError(
                f"{kind} {name} on rank {ranks} is not what the other ranks hold, at step {step}",
                hint=_CAUSES[kind],
            )


_CAUSES = {
    "parameter": "its gradient is not summed over the ranks: is it used around the wrapped model (model.module), ignored by "
    "DDP, or changed outside the optimizer?",
    "buffer": "each rank updates it from its own micro batches: update it from all of them (all_reduce in forward), or not "
    "in training",
}


def _minority(values: Iterable[int]) -> list[int]:
    """The ranks that do not hold the most common value; with a tie, rank 0's counts as the right one."""
    values = list(values)
    common = max(values, key=lambda value: (values.count(value), value == values[0]))
    return [rank for rank, value in enumerate(values) if value != common]
