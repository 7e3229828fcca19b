"""Parameters that tensor peers hold whole: each peer must end with the same gradient for them, that of the whole model.

Between the split layers all peers compute the same, and so do the gradients there. A module that works on one peer's heads
only (the norms of queries and keys of some models) has but a part of its gradient on each: the parts are added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mgpu.errors import DriftError
from mgpu.parallel._gradients import local, sum_over

if TYPE_CHECKING:
    from torch import Tensor, nn

TOLERANCE = 0.05
"""Gradients of two peers whose difference is a smaller part of their norm differ by rounding alone."""
_SAMPLE = 1 << 20


def settle_peers(parameters: Mapping[str, nn.Parameter], apart: frozenset[str], group: Any, *, compare: bool) -> None:
    """Add up the gradients of the parameters named by `apart`; with `compare`, see that all others are alike.

    DriftError names the first parameter whose gradient is not what a peer has: the plan forgets it, and the peers would
    train it apart. Collective over `group`.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if summed := [parameter for name, parameter in trained.items() if name in apart]:
        sum_over(group, summed)
    if compare:
        _compare({name: value for name, value in trained.items() if name not in apart and not _is_split(value)}, group)


def _is_split(parameter: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == "tensor" and not place.is_replicate() for name, place in zip(names, parameter.placements, strict=True)
    )


def _compare(parameters: Mapping[str, nn.Parameter], group: Any) -> None:
    """By each gradient's product with the same random signs, and its norm: 16 bytes a parameter travel."""
    import torch
    import torch.distributed as dist

    if not parameters:
        return
    marks = torch.stack([_mark(parameter) for parameter in parameters.values()])
    told = [torch.empty_like(marks) for _ in range(dist.get_world_size(group))]
    dist.all_gather(told, marks, group=group)
    table = torch.stack(told)
    spread = table[..., 0].amax(0) - table[..., 0].amin(0)
    for name, differs in zip(parameters, (spread > TOLERANCE * table[..., 1].amax(0)).tolist(), strict=True):
        if differs:
            raise DriftError(
                f"the gradient of {name} is not the same on all ranks that share the layer: each uses it on a part of the "
                "heads or columns only",
                hint=f"add {name.rpartition('.')[0]!r}: replicated to parallel.plan, or split the module",
            )


def _mark(parameter: nn.Parameter) -> Tensor:
    import torch

    if parameter.grad is None:
        return torch.zeros(2, dtype=torch.float64, device=parameter.device)
    gradient = local(parameter.grad).detach().reshape(-1)[:_SAMPLE].double()
    signs = torch.randint(0, 2, gradient.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return torch.stack([gradient @ signs.to(gradient), torch.linalg.vector_norm(gradient)])
