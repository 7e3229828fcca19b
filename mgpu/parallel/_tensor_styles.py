"""The ways in which a layer can be split over tensor peers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mgpu.errors import PlanError, suggest
from mgpu.parallel._tensor_attention import split_attention
from mgpu.parallel._tensor_local import run_on_parts, split_latent, split_parameter

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

STYLES = (
    "colwise",
    "rowwise",
    "colwise_gather",
    "rowwise_split",
    "rowwise_scatter",
    "colwise_logits",
    "table",
    "sequence",
    "scatter",
    "gather",
    "replicated",
    "attention",
    "packed_colwise",
    "packed_rowwise",
    "experts",
    "local",
    "mla_kv_a_proj",
)
"""colwise: outputs split. rowwise: inputs split, outputs summed. colwise_gather: outputs split, then whole on each rank.
rowwise_split: as rowwise, for an input that is whole on each rank. rowwise_scatter: outputs summed and split along the
sequence. colwise_logits: outputs stay split, for a parallel loss. table: an embedding split by its rows. sequence: works on
its part of the sequence. scatter, gather: the input is brought into parts of the sequence, or made whole, for a module that
is itself not split. replicated: whole on each rank, which uses it on its part of the heads: gradients are summed.
attention: torch's nn.MultiheadAttention, split by heads. packed_colwise: colwise, of two matrices packed one after the other
into one. packed_rowwise: the same along the inputs, for a parameter that holds its matrices as (inputs, outputs). experts: a
module that holds the stacked matrices of experts as parameters, each named in the plan too; inputs are whole, outputs summed.
local: a module that uses parameters which the plan names on its part of the heads. mla_kv_a_proj: the whole projection to a
latent and to rotated keys that all heads share."""

OF_PARAMETERS = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
"""The styles that a pattern may give to parameters, where it names no module."""

UNSPLIT = ("sequence", "scatter", "gather", "replicated", "attention", "experts", "local", "mla_kv_a_proj")
"""The styles that do not cut a weight of their module by its rows or columns."""

TRANSPOSED = {("transformers.pytorch_utils", "Conv1D")}
"""Linear layers that hold their matrix as (inputs, outputs)."""


def is_transposed(module: nn.Module) -> bool:
    return any((kind.__module__, kind.__qualname__) in TRANSPOSED for kind in type(module).__mro__)


def style_of(name: str, module: nn.Module, shared_width: int = 0) -> Any:
    """How torch's `parallelize_module` splits `module` in the style `name`; PlanError where there is no such style."""
    if name == "mla_kv_a_proj":
        return _own(functools.partial(split_latent, width=shared_width))
    style = _style(name)
    return _transposed(style) if is_transposed(module) else style


def _style(name: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    whole, parts = Replicate(), Shard(1)
    styles: dict[str, Any] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather": lambda: ColwiseParallel(output_layouts=whole),
        "colwise_gather_sequence": lambda: ColwiseParallel(input_layouts=parts, output_layouts=whole),
        "rowwise_split": lambda: RowwiseParallel(input_layouts=whole),
        "rowwise_scatter": lambda: RowwiseParallel(output_layouts=parts),
        "colwise_logits": lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "colwise_logits_sequence": lambda: ColwiseParallel(
            input_layouts=parts, output_layouts=Shard(-1), use_local_output=False
        ),
        "table": lambda: RowwiseParallel(input_layouts=whole),
        "attention": lambda: _own(split_attention),
        "packed_colwise": lambda: _own(_packed),
        "experts": lambda: _own(functools.partial(run_on_parts, take_in=True, add_up=True)),
        "local": lambda: _own(run_on_parts),
        "sequence": lambda: SequenceParallel(use_local_output=True),
        "scatter": lambda: PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(parts,), use_local_output=True
        ),
        "gather": lambda: PrepareModuleInput(
            input_layouts=(parts,), desired_input_layouts=(whole,), use_local_output=True
        ),
    }
    if name not in styles:
        raise PlanError(f"unknown style {name!r}", key=("parallel", "plan"), hint=suggest(name, STYLES))
    return styles[name]()


def _packed(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        split_parameter(module, name, "packed_colwise", mesh)
    return run_on_parts(module, mesh, take_in=True)


def _own(split: Callable[[Any, DeviceMesh], nn.Module]) -> Any:
    """A style of our own, as `parallelize_module` asks for one."""
    from torch.distributed.tensor.parallel.style import ParallelStyle

    class Own(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return split(module, device_mesh)

    return Own()


def _transposed(style: Any) -> Any:
    """`style`, colwise or rowwise, for a layer that holds its matrix the other way round."""
    from torch import nn
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel.style import ParallelStyle

    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return style
    columns = isinstance(style, ColwiseParallel)
    places = {"weight": Shard(1), "bias": Shard(0)} if columns else {"weight": Shard(0), "bias": Replicate()}
    wanted = (Replicate() if columns else Shard(-1),)

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter, mesh, [places[key]])
            module.register_parameter(key, nn.Parameter(part, requires_grad=parameter.requires_grad))

    class Transposed(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return distribute_module(
                module,
                device_mesh,
                partition,
                functools.partial(style._prepare_input_fn, style.input_layouts, wanted),
                functools.partial(style._prepare_output_fn, style.output_layouts, style.use_local_output),
            )

    return Transposed()
