"""One whole model a rank; gradients are summed by bucketed all-reduces that overlap with backward."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from mgpu.errors import PlanError, TaskError
from mgpu.parallel import _exact
from mgpu.parallel._compression import compress, load_powersgd, powersgd_tensors
from mgpu.parallel._gradients import sum_over
from mgpu.parallel._running import RunningStatistics
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
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel


class DdpOptions(StrategyOptions):
    """Options of `strategy: ddp`."""

    bucket_mb: float = Field(default=25.0, gt=0)
    """Size of one all-reduce in MiB."""
    gradient_as_bucket_view: bool = True
    """Gradients are views of the buckets that travel: one copy less, in memory and in time."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order; then unused ones cost nothing more."""
    unused_parameters: bool = False
    """Allow parameters that get no gradient in some steps or on some ranks; gradients then travel after the backward pass,
    not during it."""
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Make gradients smaller for the way between ranks. Not exact: results then depend on the number of ranks."""
    powersgd_rank: int = Field(default=2, ge=1)
    """Rank of PowerSGD's approximation of each matrix: traffic and precision grow with it."""
    powersgd_start: int = Field(default=100, ge=2)
    """Steps before PowerSGD begins, while gradients change fast."""


@dataclass(frozen=True)
class DdpTrainable(Trainable):
    """A model in DDP, with the state of its compression, which checkpoints hold."""

    powersgd: Any = None


class Ddp(Strategy):
    """`torch.nn.parallel.DistributedDataParallel`, weighted by units."""

    Options: ClassVar[type[StrategyOptions]] = DdpOptions
    options: DdpOptions
    exact_numerics: ClassVar[bool] = True

    def replicas(self, world: int) -> int:
        return world

    def check(self, layout: Layout) -> tuple[str, ...]:
        options, compress = self.options, self.options.compress
        if options.static_graph and any(count > 1 for count in layout.counts):
            raise PlanError(
                f"static_graph does not compose with {max(layout.counts)} micro batches a replica and step: DDP "
                "learns the graph in its first backward, which must be a synchronised one",
                key=("parallel", "static_graph"),
                hint="write static_graph: false, or a batch.micro that needs no accumulation",
            )
        if compress == "none":
            return ()
        if options.unused_parameters and not options.static_graph:
            raise PlanError(
                f"compress: {compress} does not compose with unused_parameters: DDP's communication hooks need a gradient "
                "of every parameter on every rank",
                key=("parallel", "unused_parameters"),
                hint="write compress: none",
            )
        if layout.spec.numerics == "exact":
            raise PlanError(f"compress: {compress} does not compose with numerics: exact", key=("parallel", "compress"))
        return (f"compress {compress}: results depend on the number of ranks, to the precision of what travels",)

    def build(self, model: nn.Module, task: Task, context: Context) -> Trainable:
        if context.world > 1:
            _share_weights(model)
        if context.exact:
            return _exact.lay_out(model, task, context)
        if context.world == 1 or (self.options.unused_parameters and not self.options.static_graph):
            copies = context.world > 1
            return Trainable(model=model, module=model, task=task, context=context, copies=copies)
        from torch.nn.parallel import DistributedDataParallel

        ddp = DistributedDataParallel(
            model,
            device_ids=[context.device.index] if context.device.type == "cuda" else None,
            bucket_cap_mb=self.options.bucket_mb,
            gradient_as_bucket_view=self.options.gradient_as_bucket_view,
            static_graph=self.options.static_graph,
            **_without_buffer_broadcasts(),
        )
        if not self.options.static_graph:  # which learns from its first backward pass, and keeps its buckets
            settle_buckets(ddp)
        powersgd = None
        if self.options.compress != "none":
            powersgd = compress(ddp, self.options.compress, self.options.powersgd_rank, self.options.powersgd_start)
        return DdpTrainable(model=model, module=ddp, task=task, context=context, copies=True, powersgd=powersgd)

    def state(self, trainable: Trainable) -> dict[str, Tensor]:
        powersgd = getattr(trainable, "powersgd", None)
        return powersgd_tensors(powersgd, trainable.context.world) if powersgd is not None else {}

    def load_state(self, trainable: Trainable, state: Mapping[str, Tensor]) -> None:
        if (powersgd := getattr(trainable, "powersgd", None)) is not None:
            load_powersgd(powersgd, state, trainable.context.world, trainable.context.device)

    def forward_backward(self, trainable: Trainable, window: Window) -> StepLoss:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        context = trainable.context
        if context.exact:
            return _exact.forward_backward(trainable, window)
        overlapped = isinstance(trainable.module, DistributedDataParallel) and min(window.counts) > 0
        mine = window.counts[context.replica]
        sums = torch.zeros(2, dtype=torch.float64, device=context.device)
        with RunningStatistics(trainable.model, window.counts, context.replica):
            for index, micro_batch in enumerate(window.micro_batches):
                reduces_now = overlapped and index == mine - 1
                with contextlib.nullcontext() if reduces_now else _without_sync(trainable.module):
                    sums += backward_one(trainable, micro_batch)
        if overlapped:
            _see_that_all_are_summed(trainable)
        totals = agree(context, sums)
        if context.replicas > 1 and not overlapped:
            sum_over(None, trainable.parameters, self.options.bucket_mb * 2**20)
        averaged_over = context.replicas if overlapped else 1
        scale_gradients(trainable.parameters, averaged_over / (totals.units * context.loss_scale))
        return totals


def _without_buffer_broadcasts() -> dict[str, Any]:
    """Running statistics are shared by micro batch, and a drift of other buffers is caught: none are sent at each forward."""
    from torch.nn.parallel import DistributedDataParallel

    names = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def _share_weights(model: nn.Module) -> None:
    """Every rank begins with rank 0's parameters and buffers, as under DistributedDataParallel."""
    import torch

    for value in (*model.parameters(), *model.buffers()):
        torch.distributed.broadcast(value.detach(), 0)


def _without_sync(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    from torch.nn.parallel import DistributedDataParallel

    return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()


def _see_that_all_are_summed(trainable: Trainable) -> None:
    """TaskError where DDP still waits for a gradient: what it holds then is this rank's alone."""
    ddp: Any = trainable.module
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        told = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        trained = trainable.trained
        names = [trained[int(number)] for number in told[1].split()] if told else ["a parameter"]
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise TaskError(
            f"no gradient came for {listed}: the loss of this rank's micro batch does not depend on it",
            hint="write parallel.unused_parameters: true, which allows that, or take it out of the model",
        ) from error


def settle_buckets(ddp: DistributedDataParallel) -> None:
    """Let DDP rebuild its buckets before the first step.

    DDP orders its buckets anew after its first backward. Left to itself, the first step after a resume would add up in
    another order than the same step of a run that was never stopped, and the last bits would differ.
    """
    import torch

    parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    reducer = ddp.reducer
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    total = torch.stack([parameter.flatten()[0].float() * 0 for parameter in parameters]).sum()
    total.backward()
    reducer._rebuild_buckets()
    ddp.zero_grad(set_to_none=True)
