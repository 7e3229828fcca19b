"""torch's `nn.MultiheadAttention`, split by heads.

Its matrices of queries, keys and values lie packed in one parameter, and its forward multiplies by them without calling any
module, so that no style for linear layers fits it. Here each rank holds the rows of its own heads of all three, under the
usual name and with the usual whole shape, and the forward is worked out on those heads. What has one dimension stays whole:
each rank uses its heads' part of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mgpu.errors import PlanError
from mgpu.parallel._tensor_local import brought_together, taken_in

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

MATRICES = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
"""The parameters in place of the packed one, where queries, keys and values have different widths."""


def keeps_methods(kind: type, base: type) -> bool:
    """Whether `kind` runs as `base`, of which it is one: no method of it is another's."""
    methods = {name: value for name, value in vars(base).items() if inspect.isfunction(value)}
    return all(getattr(kind, name) is value for name, value in methods.items() if not name.startswith("__"))


def check_attention(name: str, module: nn.Module, degree: int) -> None:
    """PlanError where `module` cannot be split by heads over `degree` ranks."""
    from torch import nn

    if not isinstance(module, nn.MultiheadAttention) or not keeps_methods(type(module), nn.MultiheadAttention):
        changed = ", with methods of its own" if isinstance(module, nn.MultiheadAttention) else ""
        raise PlanError(
            f"{name} is a {type(module).__qualname__}{changed}, and the style attention splits torch's "
            "nn.MultiheadAttention",
            key=("parallel", "plan"),
            hint="split its projections: colwise those of queries, keys and values, rowwise that of the output",
        )
    if module.num_heads % degree:
        raise PlanError(
            f"{module.num_heads} heads of {name} do not divide by the tensor degree {degree}",
            key=("parallel",),
            hint=f"a degree that divides {module.num_heads} fits",
        )


def whole_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters that each rank holds whole and uses on its heads."""
    return [name for name, value in module.named_parameters(recurse=False) if name.rpartition("_")[2] != "weight"]


def split_attention(module: nn.MultiheadAttention, mesh: DeviceMesh) -> nn.MultiheadAttention:
    """Leave `module` the matrices of this rank's heads, and a forward that is worked out on them."""
    from torch import nn
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
    from torch.distributed.tensor.placement_types import _StridedShard

    for name, place in (("in_proj_weight", _StridedShard(0, split_factor=3)), *((name, Shard(0)) for name in MATRICES)):
        parameter = getattr(module, name)
        if parameter is not None:
            part = distribute_tensor(parameter, mesh, [place])
            setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    parallelize_module(module.out_proj, mesh, RowwiseParallel())
    module.forward = functools.partial(_attend, module, mesh)  # type: ignore[method-assign]
    return module


def _attend(
    module: nn.MultiheadAttention,
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `nn.MultiheadAttention.forward`. Inside, tensors are (batch, heads of this rank, length, width of a head)."""
    from torch.nn import functional

    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    is_batched = query.dim() == 3
    heads = module.num_heads // mesh.size()
    taken = {id(tensor): _batch_first(taken_in(tensor, mesh), is_batched, module) for tensor in (query, key, value)}
    parts = _projected(module, mesh, [taken[id(tensor)] for tensor in (query, key, value)])
    q, k, v = (part.unflatten(-1, (heads, module.head_dim)).transpose(1, 2) for part in parts)
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _mask(attn_mask, key_padding_mask, q, module.num_heads, mesh)
    if mask is not None and (added := k.shape[2] - key.shape[-2 if module.batch_first or not is_batched else 0]):
        mask = functional.pad(mask, (0, added))
    dropout = module.dropout if module.training else 0.0
    if need_weights:
        scores = q * module.head_dim**-0.5 @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask.to(scores.dtype)).softmax(-1)
        weights = functional.dropout(weights, dropout) if dropout else weights
        mixed = weights @ v
        told = _of_all_heads(weights, mesh, module.num_heads, average_attn_weights)
    else:
        mixed, told = functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
    out: Tensor = module.out_proj(mixed.permute(2, 0, 1, 3).flatten(-2))  # in memory by length, as torch has it
    if not is_batched:
        return out[:, 0], None if told is None else told[0]
    return out.transpose(0, 1) if module.batch_first else out, told


def _batch_first(tensor: Tensor, is_batched: bool, module: nn.MultiheadAttention) -> Tensor:
    if not is_batched:
        return tensor.unsqueeze(0)
    return tensor if module.batch_first else tensor.transpose(0, 1)


def _projected(module: nn.MultiheadAttention, mesh: DeviceMesh, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Queries, keys and values of this rank's heads: (batch, length, width of these heads)."""
    import torch
    from torch.nn import functional

    peers, here = mesh.size(), mesh.get_local_rank()
    packed: Any = module.in_proj_weight
    bias: Tensor | None = module.in_proj_bias
    own = None if bias is None else bias.unflatten(0, (3, peers, -1))[:, here]
    if packed is not None and inputs[0] is inputs[1] is inputs[2]:
        parts = list(
            functional.linear(inputs[0], packed.to_local(), own if own is None else own.flatten()).chunk(3, -1)
        )
    else:
        matrices = [getattr(module, name) for name in MATRICES]
        weights = packed.to_local().chunk(3) if packed is not None else [matrix.to_local() for matrix in matrices]
        biases = (None, None, None) if own is None else own
        parts = [functional.linear(*part) for part in zip(inputs, weights, biases, strict=True)]
    for index, added in ((1, module.bias_k), (2, module.bias_v)):
        if added is not None:
            last = added.chunk(peers, dim=-1)[here].expand(len(parts[index]), -1, -1)
            parts[index] = torch.cat([parts[index], last], dim=1)
        if module.add_zero_attn:
            parts[index] = functional.pad(parts[index], (0, 0, 0, 1))
    return parts


def _mask(given: Tensor | None, padding: Tensor | None, q: Tensor, all_heads: int, mesh: DeviceMesh) -> Tensor | None:
    """Both masks as one to add to the scores of this rank's heads: (batch or 1, heads or 1, queries, keys)."""
    here = slice(mesh.get_local_rank() * q.shape[1], (mesh.get_local_rank() + 1) * q.shape[1])
    masks = []
    if given is not None:
        given = _to_add(given, q, mesh)
        masks.append(given[None, None] if given.dim() == 2 else given.unflatten(0, (-1, all_heads))[:, here])
    if padding is not None:
        padding = _to_add(padding, q, mesh)
        masks.append(padding.view(-1, 1, 1, padding.shape[-1]))
    return sum(masks[1:], masks[0]) if masks else None


def _to_add(mask: Tensor, q: Tensor, mesh: DeviceMesh) -> Tensor:
    """True as minus infinity; a mask that is learned has its gradient from the heads of all ranks."""
    import torch

    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)
    return taken_in(mask, mesh) if mask.requires_grad else mask


def _of_all_heads(weights: Tensor, mesh: DeviceMesh, heads: int, average: bool) -> Tensor:
    """(batch, queries, keys), or (batch, heads, queries, keys) where they are not averaged."""
    from torch.distributed.tensor import Partial, Shard

    if average:
        return brought_together(weights.sum(1) / heads, mesh, Partial())
    return brought_together(weights, mesh, Shard(1))
