"""Which parameters and blocks of a sharded model take part in a step, where that may differ from rank to rank.

FSDP packs the gradients that are there: ranks that had used different parameters of a block would add up gradients of
unlike ones. So what a rank has not used travels as zeros, and the ranks tell each other who has used what.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_ORDERS = 1 << 16


class Participation:
    """Listens to the FSDP groups of the modules `roots`, for one step at a time."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._used: set[int] = set()
        self._entered: set[int] = set()
        self._order = 0
        groups = (group for root in roots for module in root.modules() for group in _groups_of(module))
        for index, group in enumerate(groups):
            self._listen(index, group)

    def begin(self) -> None:
        """A new step."""
        self._used.clear()
        self._entered.clear()
        self._order = 0

    def has_used(self, parameter: nn.Parameter) -> bool:
        """Whether a pass of this rank gave `parameter` (a shard) a gradient."""
        return id(parameter) in self._used

    @property
    def order(self) -> int:
        """A number below 2^16 for the order in which blocks were gathered and reduced: alike on ranks that did the same."""
        return self._order % _ORDERS

    def _listen(self, index: int, group: Any) -> None:
        """By taking the place of two methods of FSDP's `group`."""
        import torch

        pre_forward, post_backward = group.pre_forward, group.post_backward

        def before(*arguments: Any) -> Any:
            self._entered.add(index)
            self._note("forward", index)
            return pre_forward(*arguments)

        def after(*arguments: Any) -> None:
            self._note("backward", index)
            for shard in group.fsdp_params:
                whole = getattr(shard, "_unsharded_param", None)
                if whole is None or not whole.requires_grad:
                    continue
                if whole.grad is not None or shard.unsharded_accumulated_grad is not None:
                    self._used.add(id(shard.sharded_param))
                elif group.reduce_grads and index in self._entered:
                    whole.grad = torch.zeros_like(whole)
            post_backward(*arguments)

        group.pre_forward, group.post_backward = before, after

    def _note(self, what: str, index: int) -> None:
        self._order = zlib.crc32(f"{what} {index}".encode(), self._order)


def _groups_of(module: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several since torch 2.13
    return list(groups) if groups is not None else [state._fsdp_param_group] if state._fsdp_param_group else []
