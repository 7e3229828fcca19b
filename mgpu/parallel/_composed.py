"""What fsdp, tensor, pipeline and hybrid are made of: degrees of a device mesh, applied from the inside out.

Ranks are numbered so that tensor peers are nearest, then pipeline stages, then shards, then replicas: a replica (one of
`replicate x shard`) is a contiguous run of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from mgpu.errors import PlanError, TaskError
from mgpu.parallel._calls import PlainLoss
from mgpu.parallel._composing import check_heads, check_sharding, check_stages
from mgpu.parallel._gradients import align, clip_whole, forget_unused, local_gradients, multiply, sum_over
from mgpu.parallel._lockstep import passes
from mgpu.parallel._running import RunningStatistics, Unchanged
from mgpu.parallel._tensor_loss import WholeLoss, loss_context
from mgpu.parallel._tensor_peers import settle_peers
from mgpu.parallel.base import Context, Layout, StepLoss, Strategy, Task, Trainable, Window, agree, backward_one

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from mgpu.parallel._participation import Participation
    from mgpu.parallel._pipelined import Pipeline
    from mgpu.parallel._sharded import Sharding
    from mgpu.parallel._tensor_plans import TensorSplit


_DROPOUT = (
    "dropout, if the model has any, draws other masks here than in other layouts: parts of the model draw by themselves"
)


@dataclass(frozen=True)
class Degrees:
    """Sizes of the mesh, outermost first."""

    replicate: int = 1
    shard: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.pipeline * self.tensor

    @property
    def replicas(self) -> int:
        return self.replicate * self.shard

    def sizes(self) -> dict[str, int]:
        """The dimensions that have more than one rank."""
        sizes = {name: getattr(self, name) for name in ("replicate", "shard", "pipeline", "tensor")}
        return {name: size for name, size in sizes.items() if size > 1}


@dataclass(frozen=True)
class Composed(Trainable):
    """A model laid over a mesh. `holders` says how many ranks hold (a part of) each parameter."""

    mesh: DeviceMesh | None = None
    degrees: Degrees = Degrees()
    pipeline: Pipeline | None = None
    sharding: Sharding | None = None
    loss_parallel: bool = False
    holders: Mapping[str, int] | None = None
    apart: frozenset[str] = frozenset()
    """Parameters that each tensor peer uses on its part of the heads."""
    everywhere: tuple[str, ...] = ()
    """The names of all parameters of the whole model."""

    @property
    def listener(self) -> Participation | None:
        """Tells who uses what, where parameters are sharded."""
        return self.sharding.participation if self.sharding is not None else None

    def marks(self) -> Tensor | None:
        """What ranks that share parameters tell each other: which of all parameters this one used, and in which order."""
        import torch

        listener = self.listener
        if listener is None:
            return None
        used = {name for name, parameter in self.named_parameters.items() if listener.has_used(parameter)}
        orders = [0.0] * (2 * self.degrees.pipeline)
        stage = self.context.rank // self.degrees.tensor % self.degrees.pipeline
        orders[2 * stage : 2 * stage + 2] = [float(listener.order), float(listener.order) ** 2]
        told = [*orders, *(float(name in used) for name in self.everywhere)]
        return torch.tensor(told, dtype=torch.float64).to(self.context.device, non_blocking=True)

    def forget_unused(self, marks: Tensor | None) -> None:
        """No gradient for sharded parameters that nobody used."""
        listener = self.listener
        if listener is None or marks is None:
            return
        whole = {id(parameter) for parameter in self.sharding.scalars} if self.sharding is not None else set()
        unused = {
            name: parameter
            for name, parameter in self.named_parameters.items()
            if parameter.grad is not None and not listener.has_used(parameter) and id(parameter) not in whole
        }
        if unused:  # else there is no need to wait for the device
            places = {name: 2 * self.degrees.pipeline + place for place, name in enumerate(self.everywhere)}
            forget_unused(list(unused.values()), marks[[places[name] for name in unused]])

    @property
    def aliases(self) -> Mapping[str, str]:
        names = self.pipeline.first_names if self.pipeline is not None else {}
        return {name: first for name, first in names.items() if name != first}

    def settle(self) -> None:
        if self.sharding is not None:
            self.sharding.settle()

    def group(self, *names: str) -> Any:
        """The process group over dimensions of the mesh; None where it has but one rank."""
        present = [name for name in names if name in self.degrees.sizes()]
        if not present or self.mesh is None:
            return None
        if len(present) == 1:
            return self.mesh.get_group(present[0])
        return self.mesh[tuple(present)]._flatten("_".join(present)).get_group()


class ComposedStrategy(Strategy):
    """The engine; a strategy says its degrees and the options of the parts it uses."""

    made: Sharding | None = None
    """How this rank's model is sharded, from the moment it was made."""
    peers_compared: bool = False
    """Whether a first gradient of what tensor peers hold whole was found the same on all of them."""

    def degrees(self, world: int) -> Degrees:
        """The mesh of `world` ranks; PlanError where the strategy's options do not multiply to it."""
        raise PlanError("a strategy of this kind says its degrees")

    def divided(self, world: int, replicate: int, rest: str) -> Degrees:
        """`replicate` groups, each with all its ranks in the dimension `rest`."""
        if world % replicate:
            raise PlanError(
                f"{world} devices do not divide into {replicate} groups",
                key=("parallel", "replicate"),
                hint=f"write a number that divides {world}",
            )
        return Degrees(**{"replicate": replicate, rest: world // replicate})

    def sharding(self) -> Sharding | None:
        """How parameters are sharded; None where they are not."""
        return None

    def tensor_split(self) -> TensorSplit | None:
        """How layers are split inside; None where they are not."""
        return None

    def pipeline(self) -> dict[str, Any] | None:
        """Schedule, split and chunks of a pipeline; None where there is none."""
        return None

    def replicas(self, world: int) -> int:
        return self.degrees(world).replicas

    def mesh(self, world: int) -> dict[str, int]:
        return self.degrees(world).sizes() or {"replicate": 1}

    def check(self, layout: Layout) -> tuple[str, ...]:
        from mgpu.parallel._division import announced, measures_of
        from mgpu.parallel._schedules import SCHEDULES, check_schedule

        degrees = self.degrees(layout.devices)
        stages, sharding, split = self.pipeline(), self.sharding(), self.tensor_split()
        notes: tuple[str, ...] = ()
        if stages is not None and degrees.pipeline > 1:
            schedule = SCHEDULES[stages["schedule"]]
            notes += (*check_schedule(schedule, layout.counts, degrees.pipeline, stages["chunks"]), _DROPOUT)
            if isinstance(stages["split"], str):
                notes += (announced(measures_of(stages["split"], layout.device)),)
            check_stages(layout, schedule.name, schedule.several, stages, degrees)
        if sharding is not None:
            check_sharding(layout, sharding, degrees)
        if split is not None and degrees.tensor > 1:
            check_heads(layout, degrees.tensor)
            notes += (_DROPOUT,)
            if layout.spec.precision == "fp16":
                raise PlanError(
                    "fp16 does not compose with tensor: losses cannot be scaled there",
                    key=("precision",),
                    hint="write bf16",
                )
        return tuple(dict.fromkeys(notes))

    def fits(self, model: nn.Module, layout: Layout) -> None:
        from mgpu.parallel._cuts import parts_of, places_to_cut
        from mgpu.parallel._pipelined import refuse_hooks
        from mgpu.parallel._schedules import SCHEDULES

        degrees = self.degrees(layout.devices)
        stages, sharding, split = self.pipeline(), self.sharding(), self.tensor_split()
        if split is not None and degrees.tensor > 1:
            split.check(model, degrees.tensor, degrees.shard)
        if sharding is not None and degrees.shard > 1:
            sharding.units(model)
        if stages is not None and degrees.pipeline > 1:
            count = SCHEDULES[stages["schedule"]].stages(degrees.pipeline, stages["chunks"])
            refuse_hooks(model)
            split_at = stages["split"]
            parts_of(model, places_to_cut(model, count)[1:] if isinstance(split_at, str) else split_at)

    def scaler(self, context: Context) -> Any:
        """Ranks hold different gradients, so they share whether one of them overflowed."""
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        if context.world == 1:
            return super().scaler(context)
        return ShardedGradScaler(context.device.type)

    def materialize(self, make: Any, context: Context) -> nn.Module:
        """On the host: what this rank does not keep need never be on the device."""
        self.made = self.sharding()
        model: nn.Module = self.made.make(make, context) if self.made is not None else make()
        return model

    def build(self, model: nn.Module, task: Task, context: Context) -> Trainable:
        from torch.distributed.device_mesh import init_device_mesh

        from mgpu.parallel._blocks import prepare_blocks
        from mgpu.parallel._pipelined import Pipeline

        degrees = self.degrees(context.world)
        sizes = degrees.sizes()
        everywhere = tuple(name for name, _ in model.named_parameters())
        mesh = None
        if sizes:
            mesh = init_device_mesh(context.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        pipeline = None
        if degrees.pipeline > 1:
            assert mesh is not None
            pipeline = Pipeline(model, context, mesh.get_group("pipeline"), task, **(self.pipeline() or {}))
        sharding = self.made
        if sharding is None or not sharding.on_meta:
            model.to(context.device) if pipeline is None else pipeline.to(context.device)
            _spread_first_weights(model, context, degrees, mesh)
        split = self.tensor_split()
        if split is not None and degrees.tensor > 1:
            assert mesh is not None
            split.apply(model, mesh["tensor"])
        prepare_blocks(model, context)
        if pipeline is not None:
            pipeline.cutting.cut()
        if sharding is not None and degrees.shard > 1:
            assert mesh is not None
            data = ("replicate", "shard") if degrees.replicate > 1 else ("shard",)
            sharding.apply(model, [model] if pipeline is None else pipeline.stages, mesh[data], context)
        elif sharding is not None:
            sharding.fill(model, context)
        owned = pipeline.owned() if pipeline is not None else dict(model.named_parameters())
        parallel_loss = split is not None and split.loss_parallel and degrees.tensor > 1
        trainable = Composed(
            model=model,
            module=model,
            task=WholeLoss(task) if parallel_loss else PlainLoss(task) if sizes and pipeline is None else task,
            context=context,
            lockstep=degrees.shard > 1,
            counts=context.rank % (degrees.pipeline * degrees.tensor) == 0,
            owned=owned if pipeline is not None else None,
            mesh=mesh,
            degrees=degrees,
            pipeline=pipeline,
            sharding=sharding,
            loss_parallel=parallel_loss,
            holders=_holders(owned, degrees, pipeline),
            notes=tuple(part.note for part in (pipeline, sharding) if part is not None and part.note),
            everywhere=everywhere,
            apart=split.apart(model) if split is not None and degrees.tensor > 1 else frozenset(),
        )
        if pipeline is not None:
            pipeline.attach(trainable)
        return trainable

    def forward_backward(self, trainable: Trainable, window: Window) -> StepLoss:
        assert isinstance(trainable, Composed)
        context, degrees, pipeline = trainable.context, trainable.degrees, trainable.pipeline
        data = trainable.group("replicate", "shard")
        if trainable.listener is not None:
            trainable.listener.begin()
        with RunningStatistics(trainable.model, window.counts, context.replica, data):
            sums = self._passes(trainable, window) if pipeline is None else pipeline.run(trainable, window)
        if pipeline is None and not trainable.counts:
            sums = sums * 0
        totals = agree(context, sums, trainable.marks())
        if degrees.tensor > 1:
            align(trainable.parameters)
            group = trainable.group("tensor")
            settle_peers(trainable.named_parameters, trainable.apart, group, compare=not self.peers_compared)
            self.peers_compared = True
        if degrees.replicate > 1 and degrees.shard == 1:
            sum_over(trainable.group("replicate"), trainable.parameters)
        if trainable.sharding is not None and trainable.sharding.scalars:
            sum_over(data, [scalar for scalar in trainable.sharding.scalars if scalar.requires_grad])
        trainable.forget_unused(totals.marks)
        if pipeline is not None:
            pipeline.sum_tied()
        multiply(local_gradients(trainable.parameters), 1.0 / (totals.units * context.loss_scale))
        return totals

    def confirm(self, trainable: Trainable, totals: StepLoss) -> None:
        assert isinstance(trainable, Composed)
        if trainable.listener is None or totals.marks is None:
            return
        degrees = trainable.degrees
        for total, squares in totals.marks[: 2 * degrees.pipeline].view(-1, 2).tolist():
            if squares * (degrees.world // degrees.pipeline) != total**2:  # whole numbers, of which float64 has enough
                raise TaskError(
                    "the ranks went through the model's blocks in different orders in one step, by their data or by chance: "
                    "each gathers blocks from the others as it comes to them",
                    hint="write parallel.wrap: whole, which gathers the model at once, or strategy: ddp with "
                    "unused_parameters: true",
                )

    def _passes(self, trainable: Composed, window: Window) -> Tensor:
        import contextlib

        import torch

        context, sharding = trainable.context, trainable.sharding
        sums = torch.zeros(2, dtype=torch.float64, device=context.device)
        length = max(window.counts) if trainable.lockstep else window.counts[context.replica]
        for index, (micro_batch, real) in enumerate(passes(trainable, window)):
            if sharding is not None:
                sharding.before_pass(trainable.module, last=index == length - 1)
            with (
                contextlib.nullcontext() if real else Unchanged(trainable.model),
                loss_context(trainable.loss_parallel),
            ):
                sums += backward_one(trainable, micro_batch, 1.0 if real else 0.0)
        return sums

    def clip(self, trainable: Trainable, max_norm: float | None) -> Tensor:
        assert isinstance(trainable, Composed) and trainable.holders is not None
        parameters = {name: value for name, value in trainable.named_parameters.items() if value.requires_grad}
        return clip_whole(parameters, trainable.holders, trainable.context.device, max_norm)


def _holders(owned: Mapping[str, Any], degrees: Degrees, pipeline: Pipeline | None) -> dict[str, int]:
    ranks = degrees.world // degrees.pipeline
    tied = pipeline.owners() if pipeline is not None else {}
    return {name: ranks * tied.get(name, 1) for name in owned}


def _spread_first_weights(model: nn.Module, context: Context, degrees: Degrees, mesh: DeviceMesh | None) -> None:
    """The first replica's weights and buffers, everywhere: a model whose code draws outside torch's seed is alike too."""
    import torch

    if mesh is None:
        return
    values = [value.detach() for value in (*model.parameters(), *model.buffers())]
    stages = degrees.pipeline
    per_stage = (
        mesh
        if stages == 1
        else mesh[tuple(name for name in degrees.sizes() if name != "pipeline")]
        if len(degrees.sizes()) > 1
        else None
    )
    if per_stage is None:
        return
    group = per_stage._flatten("holders").get_group() if per_stage.ndim > 1 else per_stage.get_group()
    source = int(per_stage.mesh.flatten()[0])
    for value in values:
        torch.distributed.broadcast(value, src=source, group=group)


def degree_product(name: str, degrees: Mapping[str, int], world: int) -> None:
    """PlanError where the degrees do not multiply to the number of ranks."""
    product = prod(degrees.values())
    if product != world:
        terms = " x ".join(f"{key} {value}" for key, value in degrees.items())
        raise PlanError(
            f"{terms} = {product} ranks, the devices are {world}",
            key=("parallel",),
            hint=f"the degrees of {name} multiply to the number of devices",
        )
