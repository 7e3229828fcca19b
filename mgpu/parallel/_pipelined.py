"""A pipeline over the ranks of one group: its stages, and how a window of micro batches goes through them.

Full micro batches run by one of PyTorch's schedules. What a schedule cannot take (the smaller micro batch at the end of
an epoch, fewer micro batches than it needs, evaluation) goes through one at a time, by `_relay`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mgpu.errors import PlanError
from mgpu.parallel._calls import Call, call_of, loss_at_the_end
from mgpu.parallel._cuts import parts_of
from mgpu.parallel._division import divide, measures_of
from mgpu.parallel._following import tensors_of
from mgpu.parallel._gradients import sum_over
from mgpu.parallel._lockstep import passes
from mgpu.parallel._relay import Relay
from mgpu.parallel._running import Unchanged, tracking_norms
from mgpu.parallel._schedules import SCHEDULES
from mgpu.parallel._stages import Cutting, direct_parameters
from mgpu.parallel.base import Context, MicroBatch, Task, Trainable, Window

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn


_APART = 0x9E3779B1
"""Between the seeds of stages; a generator of the CPU takes but the lower 32 bits of a seed."""


class Pipeline:
    """The stages of this rank, and the ways through them. Built by all ranks of `group` alike, from the whole model."""

    def __init__(
        self,
        model: nn.Module,
        context: Context,
        group: dist.ProcessGroup,
        task: Task,
        schedule: str = "1f1b",
        split: str | tuple[str, ...] = "auto",
        chunks: int = 2,
    ) -> None:
        self.model, self.context, self.group = model, context, group
        self.ranks, self.rank = group.size(), group.rank()
        self.schedule, self.chunks = SCHEDULES[schedule], chunks
        self.owner_of_stage = self.schedule.owners(self.ranks, chunks)
        self.count = len(self.owner_of_stage)
        self.note = ""
        if isinstance(split, str):
            division = divide(model, self.count, measures_of(split, context.device.type), task, context)
            split, self.note = division.cuts, division.note
        cuts = list(split)
        if len(cuts) != self.count - 1:
            raise PlanError(
                f"{len(cuts)} split points make {len(cuts) + 1} stages, the schedule {schedule} has {self.count}",
                key=("parallel", "split"),
                hint=f"name {self.count - 1} modules",
            )
        refuse_hooks(model)
        self.has_norms = bool(
            tracking_norms(model)
        )  # then micro batches must come in order: running averages depend on it
        self.parts = parts_of(model, cuts)
        empty = set(range(self.count)) - {part.stage for part in self.parts}
        if empty:
            raise PlanError(f"stage {min(empty)} has no parameters", key=("parallel", "split"))
        self.own = [stage for stage, owner in enumerate(self.owner_of_stage) if owner == self.rank]
        self.direct = direct_parameters(model, self.parts)
        self._tied_stages = self._find_tied()
        self.tie_groups = self._make_tie_groups()
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self.first_names = {
            name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self.cutting = Cutting(model, self.parts, self.own, context.device, self.schedule.splits_backward)
        self.module_of = {index: _stage(self, index) for index in self.own}
        self.schedules: dict[Any, Any] = {}
        self.calls: list[tuple[Call, MicroBatch | None, float]] = []
        self.sums: list[Tensor] = []
        self.trainable: Trainable | None = None
        self.relay: Relay | None = None

    def _find_tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that modules of several stages share, with those stages; by first name."""
        stages: dict[int, set[int]] = {}
        for part in self.parts:
            for parameter in part.module.parameters():
                stages.setdefault(id(parameter), set()).add(part.stage)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {names[key]: tuple(sorted(found)) for key, found in stages.items() if len(found) > 1 and key in names}

    def _make_tie_groups(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """A process group for each tied parameter that several ranks hold. All ranks of the world make all groups."""
        import torch.distributed as dist

        groups: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for name, stages in self._tied_stages.items():
            owners = sorted({self.owner_of_stage[stage] for stage in stages})
            if len(owners) > 1:
                mine = [dist.get_global_rank(self.group, owner) for owner in owners]
                everybodys: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everybodys, mine)
                made = {tuple(ranks): dist.new_group(list(ranks)) for ranks in sorted(set(map(tuple, everybodys)))}
                if self.rank in owners:
                    groups[name] = (made[tuple(mine)], tuple(owners))
        return groups

    def to(self, device: torch.device) -> None:
        """Move what this rank keeps to `device`."""
        for module in self.model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.data = parameter.data.to(device)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def owned(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by the whole model's names; a tied one by its first name, wherever that is."""
        found: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            found.setdefault(self.first_names[name], parameter)
        return found

    def owners(self) -> dict[str, int]:
        """How many pipeline ranks hold each tied parameter."""
        return {
            name: len({self.owner_of_stage[stage] for stage in stages}) for name, stages in self._tied_stages.items()
        }

    @property
    def stages(self) -> list[nn.Module]:
        """This rank's stages as modules."""
        return list(self.module_of.values())

    def sum_tied(self) -> None:
        """Add up the gradients of parameters that stages on several ranks share."""
        assert self.trainable is not None
        parameters = self.trainable.named_parameters
        for name, (group, _) in sorted(self.tie_groups.items()):
            if parameters[name].requires_grad:
                sum_over(group, [parameters[name]])

    def attach(self, trainable: Trainable) -> None:
        """Make calls of the user's model go through all stages: every rank of the group calls it, and gets its output."""
        import torch

        self.trainable = trainable
        if self.context.scaler is not None:  # it begins with its first loss, which only the last stage has
            self.context.scaler.scale(torch.zeros((), device=self.context.device))
        self.relay = Relay(self)
        self.model.forward = self.relay.call

    def run_stage(self, stage: int, given: tuple[Tensor, ...], index: int) -> Any:
        """The part of `stage` in one of the calls at hand: the tensors it hands over; of the last, the scaled loss.

        A call without a micro batch is one from outside of training: of that, the last stage gives the output itself.
        """
        import torch
        from torch import Tensor

        call, micro_batch, weight = self.calls[index]
        context = self.context
        if micro_batch is None:
            return self.cutting.run(stage, given, call)
        with context.autocast():
            self.cutting.route(call)  # not under this stage's seed
        context.reseed((micro_batch.seed + stage * _APART) % (1 << 63))
        with context.autocast():
            output = self.cutting.run(stage, given, call)
            if stage != self.count - 1:
                return output
            assert self.trainable is not None
            splits = self.schedule.splits_backward
            context.reseed(micro_batch.seed)  # what the task draws before its call is what the call was made of
            loss_sum, units = loss_at_the_end(self.trainable.task, self.model, micro_batch.batch, output, splits)
        count = units.detach() if isinstance(units, Tensor) else torch.tensor(units, device=context.device)
        self.sums.append(torch.stack([loss_sum.detach().double(), count.double()]) * weight)
        scaled = loss_sum * (context.loss_scale * weight)
        return context.scaler.scale(scaled) if context.scaler else scaled

    def pass_stage(self, stage: int, given: tuple[Tensor, ...]) -> Any:
        """Call a stage of this rank for the one call at hand, as a module: hooks on it run."""
        import torch

        return self.module_of[stage](*given, micro=torch.zeros(1, dtype=torch.int64))

    def run(self, trainable: Trainable, window: Window) -> Tensor:
        """Forward and backward of a window; [sum of losses, units] on the rank of the last stage, zeros elsewhere."""
        import torch

        assert self.relay is not None
        self.sums = []
        whole: list[tuple[Call, MicroBatch | None, float]] = [
            (call_of(trainable.task, self.model, micro_batch, self.context), micro_batch, 1.0 if real else 0.0)
            for micro_batch, real in passes(trainable, window)
        ]
        size = _size(whole[0][0]) if whole else None
        full = [item for item in whole if _size(item[0]) == size and item[2]]
        rest = [item for item in whole if not (_size(item[0]) == size and item[2])]
        takes = not (self.schedule.kind is None or self.schedule.fault(len(full), self.ranks, self.chunks))
        if trainable.lockstep:
            takes = self._alike((len(full), size) if takes and not rest else None)
        is_in_order = all(one is other for one, other in zip(whole, full + rest, strict=True))
        if not takes or (self.has_norms and not is_in_order):
            full, rest = [], whole
        if full:
            self.calls = full
            self._scheduled(len(full), size)
        for item in rest:
            self.calls = [item]
            context = Unchanged(self.model) if not item[2] else None
            if context is None:
                self.relay.forward_backward()
            else:
                with context:
                    self.relay.forward_backward()
        self.calls = []
        sums = torch.zeros(2, dtype=torch.float64, device=self.context.device)
        for part in self.sums:
            sums += part
        counted = self.rank == self.owner_of_stage[-1] and self._speaks()
        return sums if counted else sums * 0

    def _alike(self, window: Any) -> bool:
        """Whether all replicas can run their whole window by the same schedule: their collectives must be the same."""
        import torch
        import torch.distributed as dist

        mark = -1 if window is None else hash(window) & 0x7FFF_FFFF  # numbers alone: alike in all processes
        bounds = torch.tensor([mark, -mark], device=self.context.device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MIN)
        least, most = bounds.tolist()
        return bool(least == -most and least >= 0)

    def _speaks(self) -> bool:
        """Of the tensor peers that hold the last stage, the first."""
        assert self.trainable is not None
        degrees = self.trainable.degrees  # type: ignore[attr-defined]
        return bool(self.context.rank % degrees.tensor == 0)

    def _scheduled(self, count: int, size: Any) -> None:
        import torch

        if (count, size) not in self.schedules:
            self.schedules[count, size] = self._make_schedule(count, size)
        schedule = self.schedules[count, size]
        indices = torch.arange(count)
        arguments = (indices,) if 0 in self.own else ()
        target = indices if self.count - 1 in self.own else None
        schedule.step(*arguments, micro=indices, target=target, losses=[], return_outputs=False)

    def _make_schedule(self, count: int, size: Any) -> Any:
        import torch
        from torch.distributed import pipelining

        assert self.relay is not None and self.schedule.kind is not None
        shapes = self.relay.probe()
        device = self.context.device
        stages = []
        for index, stage in self.module_of.items():
            before = [make(device) for make in shapes.get(index - 1, ())]
            after = [make(device) for make in shapes[index]]
            stages.append(
                _neighbourly(
                    stage,
                    index,
                    self.count,
                    device,
                    input_args=tuple(before) if index else torch.zeros(1, dtype=torch.int64),
                    output_args=tuple(after),
                    group=self.group,
                )
            )
        kind = getattr(pipelining, self.schedule.kind)
        return kind(stages if self.schedule.several else stages[0], count, loss_fn=_as_it_is, scale_grads=False)


def refuse_hooks(model: nn.Module) -> None:
    """PlanError where a hook sees the whole model's pass, of which a rank has but a part."""
    if model._forward_hooks or model._forward_pre_hooks:
        raise PlanError(
            "the model has forward hooks on itself, not on a module inside: a pipeline has no place for them",
            key=("parallel", "strategy"),
            hint="do the same in its forward, or use another strategy",
        )


def _neighbourly(*arguments: Any, **options: Any) -> Any:
    """A `PipelineStage` that greets no neighbour on its own rank, where a V-shaped schedule turns: gloo cannot do that."""
    from torch.distributed.pipelining import PipelineStage

    class Stage(PipelineStage):
        def _get_init_p2p_neighbors_ops(self) -> list[Any]:
            return [
                greeting for greeting in super()._get_init_p2p_neighbors_ops() if greeting.group_peer != self.group_rank
            ]

    return Stage(*arguments, **options)


def _as_it_is(loss: Tensor, target: Tensor) -> Tensor:
    return loss


def _size(call: Call) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in tensors_of((call.args, call.kwargs)))


def _stage(pipeline: Pipeline, index: int) -> nn.Module:
    """One stage as a module: it has the parts it owns, so that its parameters are its own, and runs its share."""
    from torch import nn

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(part.module for part in pipeline.parts if part.stage == index)
            for position, parameter in enumerate(pipeline.direct.values() if index == 0 else ()):
                self.register_parameter(f"direct_{position}", parameter)

        def forward(self, *given: Tensor, micro: Tensor) -> Any:
            """`micro` is the index of the micro batch, all that the first stage takes; the last returns its loss."""
            return pipeline.run_stage(index, given if index else (), int(micro))

    return Stage()
