"""One process, one device: the training that every other strategy must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mgpu.errors import PlanError
from mgpu.parallel import _exact
from mgpu.parallel.base import (
    Context,
    StepLoss,
    Strategy,
    Task,
    Trainable,
    Window,
    agree,
    backward_one,
    scale_gradients,
)

if TYPE_CHECKING:
    from torch import nn


class Single(Strategy):
    """One process on one device."""

    exact_numerics: ClassVar[bool] = True

    def replicas(self, world: int) -> int:
        if world != 1:
            raise PlanError(
                f"strategy single runs one process, the devices are {world}",
                key=("parallel", "strategy"),
                hint="write ddp, or one device",
            )
        return 1

    def build(self, model: nn.Module, task: Task, context: Context) -> Trainable:
        if context.exact:
            return _exact.lay_out(model, task, context)
        return Trainable(model=model, module=model, task=task, context=context)

    def forward_backward(self, trainable: Trainable, window: Window) -> StepLoss:
        import torch

        if trainable.context.exact:
            return _exact.forward_backward(trainable, window)
        sums = torch.zeros(2, dtype=torch.float64, device=trainable.context.device)
        for micro_batch in window.micro_batches:
            sums += backward_one(trainable, micro_batch)
        totals = agree(trainable.context, sums)
        scale_gradients(trainable.parameters, 1.0 / (totals.units * trainable.context.loss_scale))
        return totals
