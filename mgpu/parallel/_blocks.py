"""The repeated blocks of a model, which strategies shard, cut, recompute and compile: found by shape, not by name."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mgpu.parallel._running import Unchanged

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mgpu.parallel.base import Context

LEAST_BLOCKS = 2


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks a model is a stack of: members of its lists that share a class and have parts of their own.

    Only the outermost such lists count. Empty where the model is no stack.
    """
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        members = dict(child.named_children()) if _is_list(child) else {}
        alike = Counter(type(member) for member in members.values() if any(True for _ in member.children()))
        kinds = {kind for kind, count in alike.items() if count >= LEAST_BLOCKS and not _is_list_class(kind)}
        blocks = {key: member for key, member in members.items() if type(member) in kinds}
        if blocks:
            found.update({f"{name}.{key}": member for key, member in blocks.items()})
        else:
            found.update({f"{name}.{key}": member for key, member in repeated_blocks(child).items()})
    return found


def _is_list(module: nn.Module) -> bool:
    return _is_list_class(type(module))


def _is_list_class(kind: type) -> bool:
    from torch import nn

    return issubclass(kind, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def prepare_blocks(model: nn.Module, context: Context) -> nn.Module:
    """Recompute activations and compile, block by block (the whole model where it is no stack); names stay as they are."""
    if context.activation_checkpointing == "none" and not context.compile:
        return model
    import torch

    for block in (repeated_blocks(model) or {"": model}).values():
        if not any(True for _ in block.parameters()):
            continue  # another rank's
        if context.activation_checkpointing != "none":
            # A compiled block is a function: its repetition changes no buffer.
            changes = not context.compile and any(True for _ in block.buffers())
            _recompute(block, selective=context.activation_checkpointing == "selective", changes=changes)
        if context.compile:
            backend = context.compile if isinstance(context.compile, str) else "inductor"
            block.forward = torch.compile(block.forward, backend=backend)
    return model


def _recompute(block: nn.Module, *, selective: bool, changes: bool) -> None:
    """Put the checkpoint inside the block's own forward: a wrapper module would change the names of parameters.

    Where a pass `changes` buffers (running statistics), its repetition does not change them once more.
    """
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

    forward = block.forward
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products) if selective else noop_context_fn
    if changes:
        contexts = functools.partial(_unchanging, block, contexts)
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": contexts}

    @functools.wraps(forward)
    def recomputed(*args: Tensor, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    block.forward = recomputed


def _unchanging(block: nn.Module, contexts: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """The contexts of a pass and of its repetition, which leaves the buffers of `block` as they are."""
    passing, again = contexts()
    return passing, _Both(Unchanged(block), again)


class _Both:
    def __init__(self, outer: Any, inner: Any) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep what is dear to compute again, the matrix products and attention; recompute the rest."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    aten = torch.ops.aten
    dear = {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    return CheckpointPolicy.MUST_SAVE if operation in dear else CheckpointPolicy.PREFER_RECOMPUTE
