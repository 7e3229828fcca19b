"""One process drives all its GPUs: each runs micro batches of its own on a copy of the model (`nn.DataParallel`'s way).

Replicas are made anew for each round of micro batches; a micro batch is never split, so that batch norm and dropout see
what they see on one device, and uneven rounds weigh right. For teaching and for scripts that must stay one process:
ddp is faster.
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import TYPE_CHECKING, Any

from mgpu.errors import PlanError
from mgpu.parallel.base import (
    Context,
    Layout,
    MicroBatch,
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
    import torch
    from torch import Tensor, nn


class Dp(Strategy):
    """`torch.nn.parallel.replicate` and `parallel_apply`, the two halves of `nn.DataParallel`."""

    def processes(self, devices: int) -> int:
        return 1

    def replicas(self, world: int) -> int:
        return 1

    def check(self, layout: Layout) -> tuple[str, ...]:
        if layout.spec.compile:
            raise PlanError(
                "compile does not compose with dp: copies of a compiled module are compiled anew in every round",
                key=("compile",),
                hint="use ddp",
            )
        if layout.device == "cpu":
            return ("dp on CPU is one replica: all CPU devices are the same one",)
        return (f"dp drives {layout.devices} GPUs from one process; ddp is faster",)

    def build(self, model: nn.Module, task: Task, context: Context) -> Trainable:
        return Trainable(model=model, module=model, task=task, context=context)

    def forward_backward(self, trainable: Trainable, window: Window) -> StepLoss:
        import torch

        context = trainable.context
        several = context.device.type == "cuda" and len(context.devices) > 1
        sums = torch.zeros(2, dtype=torch.float64, device=context.device)
        micro_batches = iter(window.micro_batches)
        while together := list(islice(micro_batches, len(context.devices) if several else 1)):
            sums += _round(trainable, together) if several else backward_one(trainable, together[0])
        totals = agree(context, sums)
        scale_gradients(trainable.parameters, 1.0 / (totals.units * context.loss_scale))
        return totals


def _round(trainable: Trainable, together: list[MicroBatch]) -> Tensor:
    """One micro batch a device, side by side; backward sums the gradients on the first."""
    import torch
    from torch.nn.parallel import parallel_apply, replicate
    from torch.utils._pytree import tree_map_only

    context = trainable.context
    devices = list(context.devices[: len(together)])
    losses = _losses(trainable)
    copies = replicate(losses, devices)
    inputs = []
    for micro_batch, device in zip(together, devices, strict=True):
        with torch.cuda.device(device):
            context.reseed(micro_batch.seed)
        inputs.append((tree_map_only(torch.Tensor, functools.partial(_move, device), micro_batch.batch),))
    with context.autocast():
        parts = parallel_apply(copies, inputs, devices=devices)
    loss_sum = torch.stack([part[0].to(context.device) for part in parts]).sum()
    units = torch.stack([part[1].to(context.device).double() for part in parts]).sum()
    scaled = loss_sum * context.loss_scale
    (context.scaler.scale(scaled) if context.scaler else scaled).backward()
    return torch.stack([loss_sum.detach().double(), units])


def _move(device: torch.device, value: Tensor) -> Tensor:
    return value.to(device)


def _losses(trainable: Trainable) -> nn.Module:
    """The task and its model as one module, which can be copied and called."""
    import torch
    from torch import nn

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = trainable.model

        def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
            loss_sum, units = trainable.task.loss(self.model, batch)
            return loss_sum, units if isinstance(units, torch.Tensor) else loss_sum.new_tensor(units)

    return Losses()
