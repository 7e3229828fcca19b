"""Running statistics of batch norm under `numerics: exact`.

The statistics of each micro batch are caught, shared, and applied one after the other in the order of the micro batches,
with the same operations in every layout. (`_running` composes them in one all-reduce, which is right to rounding.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mgpu.parallel._running import tracking_norms

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class MicroBatchStatistics:
    """The running statistics of all modules of `model` that have some; empty for most models."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = tracking_norms(model)
        self._caught: list[list[list[Tensor]]] = []
        self._passing: list[list[Tensor]] | None = None
        for number, module in enumerate(self._modules):
            module.register_forward_hook(lambda m, _in, _out, n=number: self._catch(n, m))

    def _catch(self, number: int, module: Any) -> None:
        import torch

        if self._passing is not None and module.training:
            self._passing[number].append(torch.cat([module.running_mean, module.running_var]))

    @contextlib.contextmanager
    def of_one_micro_batch(self) -> Iterator[None]:
        """Around a forward pass: the running statistics stay as they were, those of this micro batch are caught."""
        import torch

        if not self._modules:
            yield
            return
        before = [
            (module.momentum, module.running_mean, module.running_var, module.num_batches_tracked.clone())
            for module in self._modules
        ]
        self._passing = [[] for _ in self._modules]
        for module in self._modules:
            # Tensors of their own: backward looks at those that the forward pass was given, so they must stay unchanged.
            module.running_mean, module.running_var = (
                torch.zeros_like(module.running_mean),
                torch.ones_like(module.running_var),
            )
            module.momentum = 1.0  # running = 0 * running + 1 * batch: what is left is the batch's own
        try:
            yield
        finally:
            for module, (momentum, mean, variance, tracked) in zip(self._modules, before, strict=True):
                module.momentum, module.running_mean, module.running_var = momentum, mean, variance
                module.num_batches_tracked.copy_(tracked)
            self._caught.append(self._passing)
            self._passing = None

    def settle(self, counts: Sequence[int], replica: int, device: torch.device) -> None:
        """After a window: apply what every replica caught, in the order of the micro batches. Collective."""
        import torch

        caught, self._caught = self._caught, []
        if not self._modules:
            return
        total, first = sum(counts), sum(counts[:replica])
        for number, module in enumerate(self._modules):
            passes = torch.tensor([max((len(one[number]) for one in caught), default=0)], device=device)
            if len(counts) > 1:
                torch.distributed.all_reduce(passes, torch.distributed.ReduceOp.MAX)
            width = 2 * module.running_mean.numel()
            table = torch.zeros(total, int(passes), width, dtype=module.running_mean.dtype, device=device)
            for index, one in enumerate(caught):
                if one[number]:
                    table[first + index] = torch.stack(one[number])
            if len(counts) > 1:
                torch.distributed.all_reduce(table)  # one rank's number and zeros: exact in any order
            _apply(module, table.view(-1, width))


def _apply(module: Any, table: Tensor) -> None:
    """The module's own update, once a row [mean, variance] of `table`."""
    import torch

    running = torch.cat([module.running_mean, module.running_var])
    for row in table:
        module.num_batches_tracked.add_(1)
        factor = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        running = running * (1.0 - factor) + row * factor
    mean, variance = running.chunk(2)
    module.running_mean.copy_(mean)
    module.running_var.copy_(variance)
