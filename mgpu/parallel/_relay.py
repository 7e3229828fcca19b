"""One micro batch at a time through the stages of a pipeline, of any shape: forward, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu.parallel._calls import Call
from mgpu.parallel._running import Unchanged
from mgpu.parallel._stages import differentiable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mgpu.parallel._pipelined import Pipeline


@dataclass(frozen=True)
class Shape:
    """What a receiver must know of a tensor."""

    size: tuple[int, ...]
    kind: torch.dtype


def _told(leaf: Any) -> Any:
    """How a leaf of an output is announced to other ranks."""
    import torch

    if isinstance(leaf, torch.Tensor):
        return Shape(tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float | complex | str | bytes) else None


class Relay:
    """Hands activations from rank to rank, and gradients back. All ranks of the group call its methods together."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.shapes: dict[Any, tuple[Shape, ...]] = {}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for one input, on every rank of the group; without gradient."""
        import torch

        pipeline = self.pipeline
        if torch.is_grad_enabled():
            raise RuntimeError("a pipeline's model is called outside of training: use torch.no_grad()")
        call = Call(args, kwargs)
        pipeline.calls = [(call, None, 1.0)]
        output = None
        given: tuple[Tensor, ...] = ()
        for stage in range(pipeline.count):
            given = self._forward_to(stage, given, call.key)
            if stage in pipeline.own:
                given = output = pipeline.pass_stage(stage, given)
        pipeline.calls = []
        return self._from_last(output)

    def _from_last(self, output: Any) -> Any:
        """The last stage's output, whatever it is made of, on every rank of the group.

        Of what is no tensor, plain values travel; anything else (a cache of keys and values) is None on all ranks.
        """
        import torch
        import torch.distributed as dist
        from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

        pipeline = self.pipeline
        source = self._global(pipeline.owner_of_stage[-1])
        mine = pipeline.rank == pipeline.owner_of_stage[-1]
        device = pipeline.context.device
        told: list[Any] = [None]
        if mine:
            told = [tree_map(_told, output)]
        dist.broadcast_object_list(told, src=source, group=pipeline.group, device=device)
        values = iter([leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)] if mine else ())

        def bring(shape: Shape) -> Tensor:
            value = next(values).contiguous() if mine else torch.empty(shape.size, dtype=shape.kind, device=device)
            dist.broadcast(value, src=source, group=pipeline.group)
            return value

        received: Any = tree_map_only(Shape, bring, told[0])
        return received

    def forward_backward(self) -> None:
        """The one call in `pipeline.calls`, forward and backward; gradients add up in the parameters."""
        import torch

        pipeline = self.pipeline
        key = pipeline.calls[0][0].key
        inputs: dict[int, tuple[Tensor, ...]] = {}
        outputs: dict[int, tuple[Tensor, ...]] = {}
        given: tuple[Tensor, ...] = ()
        for stage in range(pipeline.count):
            given = self._forward_to(stage, given, key)
            if stage in pipeline.own:
                given = inputs[stage] = tuple(value.detach().requires_grad_(differentiable(value)) for value in given)
                made = pipeline.pass_stage(stage, given)
                given = outputs[stage] = made if isinstance(made, tuple) else (made,)
        gradients: tuple[Tensor, ...] = ()
        for stage in reversed(range(pipeline.count)):
            if stage in pipeline.own:
                _backward([value for value in outputs[stage] if differentiable(value)], gradients)
                held = [value for value in inputs[stage] if value.requires_grad]
                gradients = tuple(torch.zeros_like(value) if value.grad is None else value.grad for value in held)
            gradients = self._back_from(stage, gradients, key)

    def probe(self) -> dict[int, tuple[Callable[[torch.device], Tensor], ...]]:
        """What each stage of this rank gets and hands over, from a pass of the first call at hand: makers of examples.

        The last stage hands over its loss: a schedule compares it with the example.
        """
        import torch

        pipeline = self.pipeline
        key = pipeline.calls[0][0].key
        given: tuple[Tensor, ...] = ()
        found: dict[int, tuple[Callable[[torch.device], Tensor], ...]] = {}
        sums = len(pipeline.sums)
        with torch.no_grad(), Unchanged(pipeline.model):
            for stage in range(pipeline.count):
                given = self._forward_to(stage, given, key)
                if stage in pipeline.own:
                    found[stage - 1] = tuple(map(_maker, given))
                    given = pipeline.pass_stage(stage, given)
                    found[stage] = tuple(map(_maker, (given,) if isinstance(given, torch.Tensor) else given))
        del pipeline.sums[sums:]
        return found

    def _forward_to(self, stage: int, values: tuple[Tensor, ...], key: Any) -> tuple[Tensor, ...]:
        """Bring what the stage before handed over to the rank of `stage`."""
        if stage == 0:
            return ()
        return self._carry(stage - 1, stage, values, (key, stage))

    def _back_from(self, stage: int, values: tuple[Tensor, ...], key: Any) -> tuple[Tensor, ...]:
        """Bring the gradients that `stage` made for its input to the rank of the stage before."""
        if stage == 0:
            return ()
        return self._carry(stage, stage - 1, values, (key, stage, "back"))

    def _carry(self, source: int, target: int, values: tuple[Tensor, ...], key: Any) -> tuple[Tensor, ...]:
        import torch
        import torch.distributed as dist

        pipeline = self.pipeline
        sender, receiver = pipeline.owner_of_stage[source], pipeline.owner_of_stage[target]
        if sender == receiver or pipeline.rank not in (sender, receiver):
            return values if pipeline.rank == receiver else ()
        device, group = pipeline.context.device, pipeline.group
        key = (*key, torch.is_autocast_enabled(device.type), torch.is_grad_enabled(), pipeline.model.training)
        if pipeline.rank == sender:
            values = tuple(value.detach().contiguous() for value in values)
            if key not in self.shapes:
                self.shapes[key] = tuple(Shape(tuple(value.shape), value.dtype) for value in values)
                dist.send_object_list([self.shapes[key]], dst=self._global(receiver), group=group, device=device)
            for value in values:
                dist.send(value, dst=self._global(receiver), group=group)
            return ()
        if key not in self.shapes:
            told: list[Any] = [None]
            dist.recv_object_list(told, src=self._global(sender), group=group, device=device)
            self.shapes[key] = told[0]
        received = tuple(torch.empty(shape.size, dtype=shape.kind, device=device) for shape in self.shapes[key])
        for value in received:
            dist.recv(value, src=self._global(sender), group=group)
        return received

    def _global(self, rank: int) -> int:
        import torch.distributed as dist

        return dist.get_global_rank(self.pipeline.group, rank)


def _backward(outputs: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
    """Backward from what a stage handed over, given the gradients of it; from the loss, given none."""
    import torch

    pairs = [
        (value, gradient)
        for value, gradient in zip(outputs, gradients or (None,) * len(outputs), strict=True)
        if value.requires_grad
    ]
    if pairs:
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])


def _maker(value: Tensor) -> Callable[[torch.device], Tensor]:
    import torch

    size, stride, kind = value.shape, value.stride(), value.dtype
    return lambda device: torch.empty_strided(size, stride, dtype=kind, device=device).requires_grad_(
        kind.is_floating_point or kind.is_complex
    )
