"""Modules that compute on this rank's parts of their parameters, as plain tensors.

DTensors know no matrices packed into one and few of the operators that models use: such a module runs as its author wrote it,
on less. What comes in is whole on each rank and has a part of its gradient on each; what goes out is a part, or is added up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mgpu.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


def taken_in(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """`tensor`, which is whole on each rank; the parts that the ranks have of its gradient are added up."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def brought_together(part: Tensor, mesh: DeviceMesh, placement: Any) -> Tensor:
    """The whole on each rank, of parts that are placed so."""
    from torch.distributed.tensor import DTensor, Replicate

    placed = DTensor.from_local(part, mesh, [placement], run_check=False)
    whole: Tensor = placed.redistribute(placements=[Replicate()]).to_local()
    return whole


def run_on_parts(module: nn.Module, mesh: DeviceMesh, *, take_in: bool = False, add_up: bool = False) -> nn.Module:
    """Have `module` compute on its parts; `take_in` its inputs, which are whole, and `add_up` its output over the ranks."""
    from torch import Tensor
    from torch.distributed.tensor import Partial

    forward = module.forward

    def taken(value: Any) -> Any:
        return taken_in(value, mesh) if isinstance(value, Tensor) and value.requires_grad else value

    def on_parts(*inputs: Any, **named: Any) -> Any:
        if take_in:
            inputs, named = tuple(map(taken, inputs)), {name: taken(value) for name, value in named.items()}
        with _local_parameters(module):
            out = forward(*inputs, **named)
        return brought_together(out, mesh, Partial()) if add_up else out

    module.forward = on_parts
    return module


@contextlib.contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    from torch.distributed.tensor import DTensor

    split: dict[str, Any] = {name: value for name, value in module._parameters.items() if isinstance(value, DTensor)}
    module._parameters.update({name: value.to_local() for name, value in split.items()})
    try:
        yield
    finally:
        module._parameters.update(split)


def split_parameter(module: nn.Module, name: str, style: str, mesh: DeviceMesh) -> None:
    """Leave `module` this rank's part of a parameter, by its usual name."""
    from torch import nn
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    parameter = getattr(module, name)
    dimension, packed = cut_of(style, parameter.dim())
    place = _StridedShard(dimension, split_factor=packed) if packed > 1 else Shard(dimension)
    part = distribute_tensor(parameter, mesh, [place])
    setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def cut_of(style: str, dimensions: int) -> tuple[int, int]:
    """The dimension along which a style cuts a parameter, and how many matrices lie there one after the other.

    The last two dimensions are those of a matrix (outputs, inputs); one before them counts experts.
    """
    packed = 2 if style.startswith("packed_") else 1
    return (dimensions - 1 if style.endswith("rowwise") else max(0, dimensions - 2)), packed


def check_experts(name: str, module: nn.Module, split: frozenset[str]) -> None:
    """PlanError where a parameter of `module` is not among those that are `split`: its share would be added up too often."""
    whole = [inner for inner, _ in module.named_parameters() if f"{name}.{inner}" not in split or "." in inner]
    if whole or not any(True for _ in module.parameters()):
        raise PlanError(
            f"{name} has the style experts, whose outputs are added up, but {whole[0] if whole else 'it'} is not split",
            key=("parallel", "plan"),
            hint="name each parameter that the module itself holds: colwise, rowwise, packed_colwise or packed_rowwise",
        )


def split_latent(module: nn.Module, mesh: DeviceMesh, width: int) -> nn.Module:
    """A projection that all ranks hold whole, whose last `width` outputs each rank uses on its heads without another module."""
    import torch

    forward = module.forward

    def in_two(*inputs: Any, **named: Any) -> Tensor:
        out = forward(*inputs, **named)
        return torch.cat([out[..., :-width], taken_in(out[..., -width:], mesh)], dim=-1)

    module.forward = in_two
    return module
