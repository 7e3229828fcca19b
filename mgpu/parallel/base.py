"""The seam of a strategy: how a model is laid over ranks, and how a global batch becomes one gradient.

A strategy is one file in this folder, named as in the spec, with one public subclass of `Strategy`. Its methods import
torch themselves, so that a login node without torch can plan with it.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from mgpu.spec.models import RunSpec


@dataclass
class StopVote:
    """Set by a signal handler in one rank; the ranks agree on it at the end of a step."""

    asked: bool = False
    of_peers: Callable[[], bool] = lambda: False
    """Whether a rank beside this one was asked, as far as that can be seen without speaking to it."""

    @property
    def is_heard(self) -> bool:
        """Whether a stop is on its way, where ranks need not agree yet."""
        return self.asked or self.of_peers()


@dataclass(frozen=True)
class Context:
    """One rank's surroundings, given to strategies and tasks.

    `loss_scale` is a power of two that keeps summed losses near 1 before `backward`; it is taken out again exactly.
    `exact` asks for the same bits in any layout.
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
    devices: tuple[torch.device, ...] = ()
    """The devices of this process: more than one where one process drives them all."""
    compile: bool | str = False
    """Compile the model's blocks; a text is the name of a torch.compile backend."""
    activation_checkpointing: str = "none"
    exact: bool = False
    example: Callable[[], Any] | None = None
    """Gives a batch of the size of a micro batch, on the device; None where there is none."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    """Makes an optimizer as the training's."""
    folder: Path | None = None
    """The run's, for what its later attempts must find again."""

    @property
    def dtype(self) -> torch.dtype | None:
        """What floating-point tensors of the model and of a batch are turned into; None leaves them as they are."""
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
    marks: Tensor | None = None
    """What else a strategy had its ranks add up."""


@dataclass(frozen=True)
class Trainable:
    """A model ready to train. `model` is the user's own module, which checkpoints name; `module` is what is called.

    `lockstep` says that a forward pass is collective over replicas, so that all must make the same number of them.
    `counts` says whether this rank is the one that speaks for its replica (its peers see the same losses). `owned` are
    this rank's parameters by the whole model's names, where it has not all of them.
    """

    model: nn.Module
    module: nn.Module
    task: Task
    context: Context
    lockstep: bool = False
    counts: bool = True
    owned: Mapping[str, nn.Parameter] | None = None
    copies: bool = False
    """Whether every rank holds the same values: then a difference is an error."""
    notes: tuple[str, ...] = ()
    """What people should know of how the model was laid out."""

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, by the name that the whole model has for each; a tied one by its first name."""
        return dict(self.model.named_parameters() if self.owned is None else self.owned)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Second names of tied parameters, name to first name, where a rank may hold one without the other."""
        return {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank that train."""
        return [parameter for parameter in self.named_parameters.values() if parameter.requires_grad]

    @property
    def trained(self) -> list[str]:
        """The names of the parameters that train."""
        return [name for name, parameter in self.named_parameters.items() if parameter.requires_grad]

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank holds of the model's parameters and buffers, by the user's names; the union is the model."""
        import torch

        return {name: value for name, value in self.model.state_dict().items() if isinstance(value, torch.Tensor)}

    def micro_batch(self) -> contextlib.AbstractContextManager[None]:
        """Entered around the forward pass of each micro batch."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Back to how parameters lie between steps, after passes without a backward."""


class StrategyOptions(BaseModel):
    """Options that every strategy has; a strategy's own class adds to them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication library: `auto` is NCCL on GPUs and gloo on CPUs."""


@dataclass(frozen=True)
class Layout:
    """What a strategy is asked to agree to, before a process starts: `counts` are micro batches a replica and step."""

    spec: RunSpec
    device: str
    devices: int
    counts: tuple[int, ...]


class Strategy(abc.ABC):
    """How work is split over devices."""

    Options: ClassVar[type[StrategyOptions]] = StrategyOptions
    uneven_replicas: ClassVar[bool] = True
    """Whether replicas may run different numbers of micro batches in one step."""
    exact_numerics: ClassVar[bool] = False
    """Whether the strategy has `numerics: exact`."""

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options

    @abc.abstractmethod
    def replicas(self, world: int) -> int:
        """How many whole copies of the model `world` ranks hold; PlanError where the strategy cannot use them."""

    def processes(self, devices: int) -> int:
        """How many ranks `devices` devices have."""
        return devices

    def mesh(self, world: int) -> dict[str, int]:
        """The ranks as a mesh, outermost dimension first; PlanError where they cannot be one."""
        return {"replicate": self.replicas(world)}

    def check(self, layout: Layout) -> tuple[str, ...]:
        """What the plan should tell of this layout; PlanError for what does not compose, with the reason."""
        return ()

    def fits(self, model: nn.Module, layout: Layout) -> None:  # noqa: B027 - most take any model
        """PlanError where `model`, here without memory (on the meta device), cannot be laid out so."""

    def materialize(self, make: Callable[[], nn.Module], context: Context) -> nn.Module:
        """The model as `build` takes it: by default whole, with its weights, on the device."""
        from mgpu.parallel._blocks import prepare_blocks

        return prepare_blocks(make().to(context.device, context.dtype), context)

    def scaler(self, context: Context) -> Any:
        """What scales the losses of fp16; all ranks skip the same steps."""
        import torch

        return torch.amp.GradScaler(context.device.type)

    @abc.abstractmethod
    def build(self, model: nn.Module, task: Task, context: Context) -> Trainable:
        """Lay `model` (of `materialize`, weights alike on all ranks) over the ranks."""

    @abc.abstractmethod
    def forward_backward(self, trainable: Trainable, window: Window) -> StepLoss:
        """Leave the gradient of the global batch in `.grad`: sum of losses over all its units / number of units."""

    def confirm(self, trainable: Trainable, totals: StepLoss) -> None:  # noqa: B027 - few have anything to see
        """See by `totals` that the ranks did the same in the step; raises before it is logged or saved."""

    def state(self, trainable: Trainable) -> dict[str, Tensor]:
        """What this rank must find again in a checkpoint beside the model and the optimizer."""
        return {}

    def load_state(self, trainable: Trainable, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - few have any
        """Take back what `state` gave on this rank; empty where the checkpoint has nothing for it."""

    def clip(self, trainable: Trainable, max_norm: float | None) -> Tensor:
        """Scale the whole gradient to at most `max_norm`, once; returns its norm before that."""
        import torch

        limit = float("inf") if max_norm is None else max_norm
        return torch.nn.utils.clip_grad_norm_(trainable.parameters, limit)


def backward_one(trainable: Trainable, micro_batch: MicroBatch, weight: float = 1.0) -> Tensor:
    """Forward and backward of one micro batch; returns float64 [sum of losses, units] on the device, times `weight`."""
    import torch

    context = trainable.context
    context.reseed(micro_batch.seed)
    with context.autocast(), trainable.micro_batch():
        loss_sum, units = trainable.task.loss(trainable.module, micro_batch.batch)
    scaled = loss_sum * (context.loss_scale * weight)
    (context.scaler.scale(scaled) if context.scaler else scaled).backward()
    count = units.detach() if isinstance(units, torch.Tensor) else torch.tensor(units, device=context.device)
    return torch.stack([loss_sum.detach().double(), count.double()]) * weight


def agree(context: Context, sums: Tensor, marks: Tensor | None = None) -> StepLoss:
    """Add up [sum of losses, units], the votes to stop and `marks` (float64) over all ranks, in one small all-reduce.

    Where several ranks hold one replica, one of them gives its sums and the others give zeros.
    """
    import torch

    vote = torch.tensor([float(context.stop.asked)], dtype=torch.float64, device=context.device)
    totals = torch.cat([sums, vote] if marks is None else [sums, vote, marks])
    if context.world > 1:
        torch.distributed.all_reduce(totals)
    return StepLoss(loss_sum=totals[0], units=totals[1], stop_votes=totals[2], marks=totals[3:])


def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient by `factor` (a scalar on the device), in one fused pass a dtype."""
    from mgpu.parallel._gradients import multiply

    multiply([parameter.grad for parameter in parameters if parameter.grad is not None], factor)
