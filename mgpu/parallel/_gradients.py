"""Gradients that are spread over ranks: their local parts, their sum over a group, the norm of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor (a view); another tensor as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of the gradients that are there; writing to one changes the gradient."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def shards(parameter: Tensor) -> int:
    """Into how many parts a parameter is cut over its mesh."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return 1
    sizes = (
        size
        for size, place in zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        if not place.is_replicate()
    )
    count = 1
    for size in sizes:
        count *= size
    return count


def align(parameters: Iterable[nn.Parameter]) -> None:
    """Lay each gradient out as its parameter is: a backward pass may leave it whole, or in sums still to be added."""
    from torch.distributed.tensor import DTensor

    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def sum_over(group: Any, parameters: Iterable[nn.Parameter], bucket_bytes: float = float("inf")) -> None:
    """Add up the gradients over `group`, in all-reduces of about `bucket_bytes`; a rank without a gradient adds zeros.

    A parameter that no rank has a gradient for is left without one, so that the optimizer passes it over as it would in one
    process: with each bucket travels who has what.
    """
    import torch

    sums = []
    for bucket in _buckets(parameters, bucket_bytes):
        has = [parameter.grad is not None for parameter in bucket]
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = local_gradients(bucket)
        marks = torch.tensor(has, dtype=gradients[0].dtype).to(gradients[0].device, non_blocking=True)
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), marks])
        sums.append((bucket, has, gradients, flat, torch.distributed.all_reduce(flat, group=group, async_op=True)))
    for bucket, has, gradients, flat, work in sums:
        work.wait()
        *parts, marks = flat.split([*(gradient.numel() for gradient in gradients), len(bucket)])
        torch._foreach_copy_(gradients, [part.view_as(to) for part, to in zip(parts, gradients, strict=True)])
        if not all(has):  # else there is no need to wait for the device
            forget_unused(bucket, marks)


def forget_unused(parameters: Sequence[nn.Parameter], marks: Tensor) -> None:
    """No gradient for those whose mark is zero: nobody's data had to do with them."""
    for parameter, mark in zip(parameters, marks.tolist(), strict=True):
        if not mark:
            parameter.grad = None


def _buckets(parameters: Iterable[nn.Parameter], most: float) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one dtype, of about `most` bytes each."""
    open_: dict[torch.dtype, list[nn.Parameter]] = {}
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters:
        kind = parameter.dtype
        open_.setdefault(kind, []).append(parameter)
        part = local(parameter)
        sizes[kind] = sizes.get(kind, 0) + part.numel() * part.element_size()
        if sizes[kind] >= most:
            yield open_.pop(kind)
            sizes[kind] = 0
    yield from open_.values()


def multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply by a scalar on the device, in one fused pass a dtype."""
    import torch

    by_kind: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault(gradient.dtype, []).append(gradient)
    for kind, alike in by_kind.items():
        torch._foreach_mul_(alike, factor.to(kind))


def clip_whole(
    parameters: Mapping[str, nn.Parameter], holders: Mapping[str, int], device: torch.device, max_norm: float | None
) -> Tensor:
    """Scale the whole gradient, over all ranks, to at most `max_norm`; returns its 2-norm before that.

    `holders` says how many ranks hold (a part of) each parameter: what each part is counted by, so that it counts once.
    Follows `torch.nn.utils.clip_grad_norm_`.
    """
    import torch

    square = torch.zeros((), dtype=torch.float64, device=device)
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(local(parameter.grad), dtype=_wide(parameter.grad))
            square += norm.double() ** 2 * (shards(parameter) / holders[name])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(square)
    total = square.sqrt()
    if max_norm is not None:
        multiply(local_gradients(parameters.values()), torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def _wide(gradient: Tensor) -> torch.dtype:
    import torch

    return torch.float64 if gradient.dtype is torch.float64 else torch.float32
