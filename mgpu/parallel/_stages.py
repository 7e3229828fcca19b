"""A model cut into stages while its forward stays the user's own.

Every stage runs the whole forward. A module of its own runs; a module of another stage answers with a blank, a tensor that
has a shape and no values (PyTorch's FakeTensor), and so do operations on blanks. Where a module or an operation of this
stage takes a value of an earlier one, it gets what was handed over. After the last thing that is its own to do, a stage
hands over all values that later stages take, also those that it was only given for them: `_twin` has learnt which.

Modules without parameters and persistent buffers belong to no stage: they run where the values are that they take, and in
all stages where they take the model's inputs alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mgpu.parallel._calls import Call
from mgpu.parallel._cuts import Part
from mgpu.parallel._following import Following, answer_calls, replaced, tensors_of
from mgpu.parallel._routes import Event, Route, Uncuttable, Value
from mgpu.parallel._twin import Twin

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class HandedOver(BaseException):
    """Ends a stage's pass; no `except Exception` in a user's forward may catch it."""


class Cutting:
    """Which stage is running, and what each part answers. Parts of other ranks give up their memory at once."""

    def __init__(
        self,
        model: nn.Module,
        parts: list[Part],
        own: Sequence[int],
        device: torch.device | None = None,
        splits_backward: bool = False,
    ) -> None:
        self.model, self.parts = model, parts
        self.direct = list(direct_parameters(model, parts))
        self.twin = Twin(model, parts, self.direct, device)
        self.splits_backward = splits_backward
        self.routes: dict[Any, Route] = {}
        self.following = Following(self._operation)
        self.turn: Turn | None = None
        self.forward: Callable[..., Any] = model.forward
        for part in parts:
            if part.stage not in own:
                take_away(part.module)
        if 0 not in own:
            self._blank_direct_parameters()

    def cut(self) -> None:
        """Replace the parts' calls, once what belongs inside them (recomputation, compilation) is there."""
        for part in self.parts:
            answer_calls(part.module, functools.partial(self._answer, part))

    def route(self, call: Call) -> Route:
        """What travels in a call like this one; worked out once for its shapes. Uncuttable where it cannot."""
        import torch

        kinds = {leaf.device.type for leaf in tensors_of((call.args, call.kwargs))}
        mixed = tuple(kind for kind in sorted(kinds) if torch.is_autocast_enabled(kind))
        key = call.key, mixed, self.model.training
        if key not in self.routes:
            self.routes[key] = self.twin.route(self.model, call)
        return self.routes[key]

    def run(self, stage: int, given: Sequence[Tensor], call: Call) -> Any:
        """One pass of `stage`: the tensors it hands over, or the model's output if it is the last."""
        route = self.route(call)
        self.turn = turn = Turn(route, stage, [own_name(value) for value in given])
        self.following.clear()
        for index, name in enumerate(self.direct):
            holder, _, last = name.rpartition(".")
            parameter = getattr(self.model.get_submodule(holder), last)
            self.following.marks[parameter] = (-1 - index, 0)
            if stage == 0:
                turn.made[-1 - index, 0] = parameter
        try:
            with self.following:
                output = self.forward(*call.args, **call.kwargs)
            if stage != route.stages - 1:
                raise turn.astray("it ended")
            return self._real(output, "the model's output")
        except HandedOver:
            return turn.handed_over(apart=self.splits_backward)
        finally:
            self.turn = None
            self.following.clear()

    def _answer(self, part: Part, original: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            turn = self.turn
            if turn is None:
                return original(*args, **kwargs)
            if self.following.inside:
                if part.stage != turn.stage:
                    raise Uncuttable(
                        f"{part.name} of stage {part.stage} is called inside a module of stage {turn.stage}"
                    )
                return original(*args, **kwargs)
            number, event = turn.next(part.name)
            if part.stage != turn.stage:
                return self._blank(number, event)
            args, kwargs = self._real((args, kwargs), part.name, changes=event.changes)
            with self.following.away():
                output = _apart(original(*args, **kwargs), (args, kwargs))
            return self._done(number, output)

        return answer

    def _operation(self, function: Any, args: Any, kwargs: Any, values: list[Value]) -> Any:
        turn = self.turn
        assert turn is not None
        number, event = turn.next(function)
        own = event.stage == turn.stage
        if event.changes:
            target = args[0]
            output = None
            if own:
                args, kwargs = self._real((args, kwargs), event.name, changes=True)
                output = function(*args, **kwargs)
                turn.changed[number, 0] = args[0]
                self.following.marks[args[0]] = (number, 0)
            self.following.marks[target] = (number, 0)
            if own:
                self._done(number, args[0])
            return output if own or event.output is None else target
        if not own:
            return self._blank(number, event)
        args, kwargs = self._real((args, kwargs), event.name)
        return self._done(number, function(*args, **kwargs))

    def _done(self, number: int, output: Any) -> Any:
        assert self.turn is not None
        self.following.mark(number, output)
        self.turn.done(number, tensors_of(output))
        return output

    def _blank(self, number: int, event: Event) -> Any:
        from torch import Tensor
        from torch.utils._pytree import tree_map

        output = event.output
        if not isinstance(output, Tensor):
            output = tree_map(lambda leaf: leaf, output)  # the forward may change a list that it got
        self.following.mark(number, output)
        return output

    def _real(self, tree: Any, name: str, changes: bool = False) -> Any:
        """`tree` with what was handed over in the place of blanks; a copy of what is going to be changed in place."""
        from torch._subclasses.fake_tensor import FakeTensor

        turn = self.turn
        assert turn is not None

        def real(tensor: Tensor) -> Tensor:
            value = self.following.marks.get(tensor)
            if value is None:
                if isinstance(tensor, FakeTensor):
                    raise turn.astray(f"{name} takes a value from elsewhere")
                return tensor
            if (found := turn.changed.get(value)) is not None:
                return found
            if turn.route.stage_of(value) == turn.stage:
                return tensor
            if value not in turn.received:
                raise turn.astray(f"{name} takes another value")
            return turn.received[value].clone() if changes else turn.received[value]

        return replaced(tree, real)

    def _blank_direct_parameters(self) -> None:
        """Parameters of modules that several stages share (a class token) belong to stage 0: blanks on other ranks."""
        import torch

        inside = {id(module) for part in self.parts for module in part.module.modules()}
        for module in self.model.modules():
            for name, parameter in list(module._parameters.items()) if id(module) not in inside else ():
                if parameter is None:
                    continue
                del module._parameters[name]
                with self.twin.blank:
                    blank = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                setattr(module, name, blank)


class Turn:
    """One pass of one stage: how far it has come, and the values it was given and has made for others."""

    def __init__(self, route: Route, stage: int, given: Sequence[Tensor]) -> None:
        self.route, self.stage = route, stage
        self.received = dict(zip(route.sends[stage - 1] if stage else (), given, strict=True))
        self.wanted = set(route.sends[stage])
        self.made: dict[Value, Tensor] = {}
        self.changed: dict[Value, Tensor] = {}
        """What an operation in place has made of a value, for those who know it by the blank."""
        self.position = 0

    def next(self, what: Any) -> tuple[int, Event]:
        """The event that is due, which must be this one."""
        number = self.position
        if number >= len(self.route.events) or self.route.events[number].what != what:
            raise self.astray(f"it called {getattr(what, '__name__', what)}")
        self.position += 1
        return number, self.route.events[number]

    def done(self, number: int, tensors: list[Tensor]) -> None:
        """Keep what later stages take; HandedOver after the stage's last event."""
        for place, tensor in enumerate(tensors):
            if (number, place) in self.wanted:
                self.made[number, place] = tensor
        if number == self.route.last[self.stage] and self.stage < self.route.stages - 1:
            raise HandedOver

    def handed_over(self, apart: bool) -> tuple[Tensor, ...]:
        """All that the next stage gets, each a tensor of its own; `apart` for a backward pass in two halves."""
        sent = self.route.sends[self.stage]
        values = [self.received[value] if value in self.received else self._made(value) for value in sent]
        if apart and self.received and len(values) > 1:
            return join(list(self.received.values()), values)
        return tuple(plain(value, {id(other) for other in values[:index]}) for index, value in enumerate(values))

    def _made(self, value: Value) -> Tensor:
        if value not in self.made:
            raise self.astray("a value that others take was not made")
        return self.made[value]

    def astray(self, what: str) -> Uncuttable:
        """The error of a forward that does not do what it did without values."""
        events = self.route.events
        due = events[self.position].name if self.position < len(events) else "the end"
        return Uncuttable(
            f"stage {self.stage}: the model's forward went another way than before for inputs of the same shape: {what} "
            f"where {due} was due. Code between modules may not depend on values or chance; choose other split points, so "
            "that it is inside one module"
        )


def _apart(output: Any, given: Any) -> Any:
    """`output` with another name for each tensor in it that a part gives back as it got it: a value has one maker."""
    same = {id(tensor) for tensor in tensors_of(given)}
    return replaced(output, lambda value: value.view_as(value) if id(value) in same else value)


def own_name(value: Tensor) -> Tensor:
    """A received value for a stage to use: its gradient is contiguous, as what travels must be."""
    if not value.requires_grad:
        return value
    name = value.view_as(value)
    name.register_hook(lambda gradient: gradient.contiguous())
    return name


def join(received: list[Tensor], values: list[Tensor]) -> tuple[Tensor, ...]:
    """`values` as copies that autograd takes to depend on all that was received.

    PyTorch's schedules that work out the gradients of inputs and weights apart give none to a weight on whose way to the
    stage's outputs nothing comes in that was received (a bias by positions that a later stage takes).
    """
    import torch

    class Join(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Tensor, *anchors: Tensor) -> Tensor:
            return value.clone(memory_format=torch.contiguous_format)

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            return gradients[0], *(None for _ in anchors)

    anchors = [value for value in received if value.requires_grad]
    return tuple(
        Join.apply(value, *anchors) if differentiable(value) and anchors else plain(value, set())  # type: ignore[no-untyped-call]
        for value in values
    )


def differentiable(value: Tensor) -> bool:
    """Whether a gradient of `value` travels back."""
    return value.is_floating_point() or value.is_complex()


def plain(value: Tensor, others: set[int]) -> Tensor:
    """`value` as a tensor of its own: what is not contiguous cannot travel, and schedules that split the backward pass
    detach in place, which no view, no parameter and nothing that was given may suffer."""
    import torch

    apart = not value._is_view() and not (value.is_leaf and value.requires_grad) and id(value) not in others
    if apart and value.is_contiguous():
        return value
    return value.clone(memory_format=torch.contiguous_format)


def take_away(module: nn.Module) -> None:
    """Let go of the parameters and buffers of a module that another rank has."""
    for inner in module.modules():
        for holder in (inner._parameters, inner._buffers):
            for name in holder:
                holder[name] = None


def direct_parameters(model: nn.Module, parts: list[Part]) -> dict[str, nn.Parameter]:
    """Parameters that are in no part, by name."""
    inside = {id(parameter) for part in parts for parameter in part.module.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in inside}
