"""The seam of a strategy: how a model is laid over ranks, and how a global batch becomes one gradient.

A strategy is one file in this folder, named as in the spec, with one public subclass of `Strategy`. Its methods import
torch themselves, so that a login node without torch can plan with it.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from mgpu.parallel._batch_norm import RunningStatistics

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass
class StopVote:
    """Set by a signal handler in one rank; the ranks agree on it at the end of a step."""

    asked: bool = False


@dataclass(frozen=True)
class Context:
    """One rank's surroundings, given to strategies and tasks.

    `loss_scale` is a power of two that keeps summed losses near 1 before `backward`; it is taken out again exactly.
    `exact` asks for the same bits in any layout. `leader`: this rank speaks for its replica, where several share one.
    """

    rank: int
    world: int
    replica: int
    replicas: int
    device: torch.device
    precision: str = "fp32"
    loss_scale: float = 1.0
    scaler: Any = None
    stop: StopVote = field(default_factory=StopVote)
    reseed: Callable[[int], None] = lambda seed: None
    exact: bool = False
    leader: bool = True

    @property
    def dtype(self) -> torch.dtype | None:
        """What floating-point tensors of a batch are turned into; None leaves them as they are."""
        import torch

        return torch.float64 if self.precision == "fp64" else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The arithmetic of the forward pass: autocast for bf16 and fp16, nothing else."""
        import torch

        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        if self.precision not in kinds:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=kinds[self.precision])


class Task(Protocol):
    """How a batch becomes a loss. The whole of what a strategy needs: sums, never means, so weights stay right."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        """The sum of the losses of `batch` (a scalar with gradient) and the number of units it is a sum over."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: its data on the device, and the seed that its dropout is drawn from."""

    seed: int
    batch: Any


@dataclass(frozen=True)
class Window:
    """One replica's part of one global batch. `counts` are the micro batches of every replica, alike on all ranks."""

    micro_batches: Iterable[MicroBatch]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class StepLoss:
    """Sums over the whole global batch, alike on every rank: float64 scalars on the device."""

    loss_sum: Tensor
    units: Tensor
    stop_votes: Tensor


@dataclass(frozen=True)
class Trainable:
    """A model ready to train. `model` is the user's own module, which checkpoints name; `module` is what is called."""

    model: nn.Module
    module: nn.Module
    task: Task
    context: Context
    statistics: RunningStatistics = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "statistics", RunningStatistics(self.model))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that train."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


class StrategyOptions(BaseModel):
    """Options that every strategy has; a strategy's own class adds to them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication library: `auto` is NCCL on GPUs and gloo on CPUs."""


class Strategy(abc.ABC):
    """How work is split over devices."""

    Options: ClassVar[type[StrategyOptions]] = StrategyOptions
    uneven_replicas: ClassVar[bool] = True
    """Whether replicas may run different numbers of micro batches in one step."""
    replicated: ClassVar[bool] = True
    """Whether every rank holds the whole model, so that all of it can be compared between ranks."""
    exact_numerics: ClassVar[bool] = False
    """Whether the strategy has `numerics: exact`."""

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options

    @abc.abstractmethod
    def replicas(self, world: int) -> int:
        """How many whole copies of the model `world` ranks hold; PlanError where the strategy cannot use them."""

    @abc.abstractmethod
    def build(self, model: nn.Module, task: Task, context: Context) -> Trainable:
        """Lay `model` (already on the device, weights alike on all ranks) over the ranks."""

    @abc.abstractmethod
    def forward_backward(self, trainable: Trainable, window: Window) -> StepLoss:
        """Leave the gradient of the global batch in `.grad`: sum of losses over all its units / number of units."""

    def clip(self, trainable: Trainable, max_norm: float | None) -> Tensor:
        """Scale the whole gradient to at most `max_norm`, once; returns its norm before that."""
        import torch

        limit = float("inf") if max_norm is None else max_norm
        return torch.nn.utils.clip_grad_norm_(trainable.parameters, limit)


def backward_one(trainable: Trainable, micro_batch: MicroBatch) -> Tensor:
    """Forward and backward of one micro batch; returns float64 [sum of losses, units] on the device."""
    import torch

    context = trainable.context
    context.reseed(micro_batch.seed)
    with context.autocast(), trainable.statistics.of_one_micro_batch():
        loss_sum, units = trainable.task.loss(trainable.module, micro_batch.batch)
    scaled = loss_sum * context.loss_scale
    (context.scaler.scale(scaled) if context.scaler else scaled).backward()
    count = units.detach() if isinstance(units, torch.Tensor) else torch.tensor(units, device=context.device)
    return torch.stack([loss_sum.detach().double(), count.double()])


def agree(context: Context, sums: Tensor) -> StepLoss:
    """Add up [sum of losses, units] and the votes to stop over the replicas, in one small all-reduce."""
    import torch

    vote = torch.tensor([float(context.stop.asked)], dtype=torch.float64, device=context.device)
    totals = torch.cat([sums, vote])
    if context.replicas > 1:
        torch.distributed.all_reduce(totals)
    return StepLoss(loss_sum=totals[0], units=totals[1], stop_votes=totals[2])


def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient by `factor` (a scalar on the device), in one fused pass."""
    import torch

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
