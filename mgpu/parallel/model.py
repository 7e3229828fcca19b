"""Layers of one model over several devices of one process, for a model that does not fit one of them.

Every device but one waits at any time: pipeline does the same with several processes and keeps them busy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mgpu.errors import PlanError
from mgpu.parallel._blocks import prepare_blocks
from mgpu.parallel._cuts import Part, parts_of, places_to_cut
from mgpu.parallel._division import Division, Measure, announced, divide
from mgpu.parallel._options import Names
from mgpu.parallel.base import (
    Context,
    Layout,
    StepLoss,
    Strategy,
    StrategyOptions,
    Task,
    Trainable,
    Window,
    agree,
    backward_one,
    scale_gradients,
)

if TYPE_CHECKING:
    import torch
    from torch import nn


class ModelOptions(StrategyOptions):
    """Options of `strategy: model`."""

    split: Literal["auto", "memory", "weights"] | Names = "auto"
    """Names of the modules that devices 1, 2, ... begin with. Or what the fullest device shall hold least of: `memory`
    (weights, gradients, optimizer state and the activations of a micro batch) or the number of `weights`. `auto` is memory,
    and weights where that cannot be worked out. A run keeps its cuts when it resumes."""


class Model(Strategy):
    """Each module lives on one device; what it is called with moves there."""

    Options: ClassVar[type[StrategyOptions]] = ModelOptions
    options: ModelOptions

    def processes(self, devices: int) -> int:
        return 1

    def replicas(self, world: int) -> int:
        return 1

    def check(self, layout: Layout) -> tuple[str, ...]:
        split = self.options.split
        if not isinstance(split, str) and len(split) != layout.devices - 1:
            raise PlanError(
                f"{len(split)} split points make {len(split) + 1} parts, the devices are {layout.devices}",
                key=("parallel", "split"),
            )
        notes: tuple[str, ...] = (announced(_measures(split)),) if isinstance(split, str) and layout.devices > 1 else ()
        if layout.device == "cpu":
            notes += ("model on CPU: all parts are on the same device",)
        return notes

    def fits(self, model: nn.Module, layout: Layout) -> None:
        if layout.devices > 1:
            split = self.options.split
            parts_of(model, places_to_cut(model, layout.devices)[1:] if isinstance(split, str) else split)

    def materialize(self, make: Callable[[], nn.Module], context: Context) -> nn.Module:
        """On the host: the whole may fit no device."""
        return make()

    def build(self, model: nn.Module, task: Task, context: Context) -> Trainable:
        devices = context.devices or (context.device,)
        division = self._divide(model, len(devices), task, context)
        prepare_blocks(model, context)
        place(model, parts_of(model, division.cuts) if len(devices) > 1 else (), devices)
        notes = (division.note,) if division.note else ()
        return Trainable(model=model, module=model, task=task, context=context, notes=notes)

    def forward_backward(self, trainable: Trainable, window: Window) -> StepLoss:
        import torch

        sums = torch.zeros(2, dtype=torch.float64, device=trainable.context.device)
        for micro_batch in window.micro_batches:
            sums += backward_one(trainable, micro_batch)
        totals = agree(trainable.context, sums)
        for device in set(trainable.context.devices):
            here = [parameter for parameter in trainable.parameters if parameter.device == device]
            scale_gradients(here, 1.0 / (totals.units.to(device) * trainable.context.loss_scale))
        return totals

    def _divide(self, model: nn.Module, devices: int, task: Task, context: Context) -> Division:
        split = self.options.split
        if devices == 1 or not isinstance(split, str):
            return Division(() if isinstance(split, str) else split, "")
        return divide(model, devices, _measures(split), task, context, what="device")


def _measures(split: Literal["auto", "memory", "weights"]) -> tuple[Measure, ...]:
    return ("memory", "weights") if split == "auto" else (split,)


def place(model: nn.Module, parts: Sequence[Part], devices: Sequence[torch.device]) -> None:
    """Move each part to its device, and all that is in no part to the first; what a part is called with moves along.

    The output of the model comes back to the first device, where the targets are. A tied parameter lives where its first
    module does; the other module is then called there.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    home: dict[int, torch.device] = {}
    for part in parts:
        for parameter in part.module.parameters():
            home.setdefault(id(parameter), devices[part.stage])
    moved: dict[int, Any] = {}

    def move(module: nn.Module, device: torch.device) -> None:
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None:
                    values[name] = moved.setdefault(id(value), _on(value, device))

    def bring(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda value: value.to(device), (args, kwargs))

    inside = {id(module) for part in parts for module in part.module.modules()}
    for part in parts:
        tied = {home[id(parameter)] for parameter in part.module.parameters()}
        device = tied.pop() if len(tied) == 1 else devices[part.stage]
        for module in part.module.modules():
            move(module, device)
        part.module.register_forward_pre_hook(functools.partial(bring, device), with_kwargs=True)
    for module in model.modules():
        if id(module) not in inside:
            move(module, devices[0])
    model.register_forward_hook(
        lambda module, args, output: tree_map_only(torch.Tensor, lambda value: value.to(devices[0]), output)
    )


def _on(value: Any, device: torch.device) -> Any:
    """A parameter or buffer on `device`; itself where it is there already."""
    from torch import nn

    if value.device == device:
        return value
    copy = value.detach().to(device)
    return nn.Parameter(copy, value.requires_grad) if isinstance(value, nn.Parameter) else copy
