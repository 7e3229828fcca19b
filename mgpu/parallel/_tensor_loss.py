"""A loss worked out on logits that stay split over tensor peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mgpu.parallel._calls import Around

if TYPE_CHECKING:
    from torch import Tensor, nn


class WholeLoss(Around):
    """A task whose model leaves its logits split over tensor peers: the loss is worked out on the parts."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        loss_sum, units = self.task.loss(model, batch)
        return _whole(loss_sum), units

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            return tuple(map(_whole, self.task.evaluate(model, batch)))  # type: ignore[attr-defined]


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def loss_context(parallel: bool) -> Any:
    """Entered round a loss whose logits may be split."""
    import contextlib

    if not parallel:
        return contextlib.nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()
