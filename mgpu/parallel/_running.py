"""Batch norm's running statistics, as if one process had gone through all micro batches of the step in order.

Each forward pass maps r to (1 - m) r + m s. So k passes are an affine map of what was there before, and the maps of the
replicas, which hold consecutive runs of micro batches, compose: one small all-reduce gives every rank the statistics that
`single` would have.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


class RunningStatistics:
    """Used round the passes of one step: `counts` are the micro batches of all replicas, `replica` is this one."""

    def __init__(self, model: nn.Module, counts: tuple[int, ...], replica: int, group: Any = None) -> None:
        self.norms = tracking_norms(model) if len(counts) > 1 else []
        self.counts = counts
        self.replica = replica
        self.group = group
        self.before: list[list[Tensor]] = []

    def __enter__(self) -> None:
        self.before = [[buffer.clone() for buffer in _buffers(norm)] for norm in self.norms]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.norms:
            self._compose()

    def _compose(self) -> None:
        import torch

        mine, later = self.counts[self.replica], sum(self.counts[self.replica + 1 :])
        parts = []
        for norm, (mean, variance, tracked) in zip(self.norms, self.before, strict=True):
            passes = (norm.num_batches_tracked - tracked).double()
            after = passes * (later / mine if mine else 0.0)
            for now, start in ((norm.running_mean, mean), (norm.running_var, variance)):
                if norm.momentum is None:
                    part = now.double() * (tracked + passes) - start.double() * tracked
                else:
                    keep = 1.0 - norm.momentum
                    part = (now.double() - keep**passes * start.double()) * keep**after
                parts.append(part.reshape(-1))
            parts.append(passes.reshape(1))
        total = torch.cat(parts)
        torch.distributed.all_reduce(total, group=self.group)
        self._apply(list(total.split([part.numel() for part in parts])))

    def _apply(self, parts: list[Tensor]) -> None:
        for index, (norm, (mean, variance, tracked)) in enumerate(zip(self.norms, self.before, strict=True)):
            *sums, passes = parts[3 * index : 3 * index + 3]
            for now, start, part in zip((norm.running_mean, norm.running_var), (mean, variance), sums, strict=True):
                if norm.momentum is None:
                    value = (start.double() * tracked + part.view_as(start)) / (tracked + passes)
                else:
                    value = (1.0 - norm.momentum) ** passes * start.double() + part.view_as(start)
                now.copy_(value)
            norm.num_batches_tracked.copy_(tracked + passes.round().long()[0])


class Unchanged:
    """Running statistics and other buffers as they were before, after a pass that does not count."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []

    def __enter__(self) -> None:
        self.before = [
            (module._buffers, name, buffer, buffer.clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def __exit__(self, *error: object) -> None:
        for buffers, name, buffer, value in self.before:
            buffers[name] = buffer.copy_(value)
        self.before = []


def tracking_norms(model: nn.Module) -> list[Any]:
    """The batch norms of `model` that keep running statistics here (those of another pipeline stage do not)."""
    from torch.nn.modules.batchnorm import _NormBase

    return [module for module in model.modules() if isinstance(module, _NormBase) and module.running_mean is not None]


def _buffers(norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    return norm.running_mean, norm.running_var, norm.num_batches_tracked
