"""Learning which values travel from stage to stage, from one pass without values.

A twin of the model whose parameters have no memory runs the whole forward once on blanks (PyTorch's FakeTensors), and its
code outside of the parts is followed. Nothing of another rank is needed for this, so that all ranks learn the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mgpu.parallel._following import Following, answer_calls, changes_first, tensors_of
from mgpu.parallel._routes import Event, Route, Uncuttable, Value

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mgpu.parallel._calls import Call
    from mgpu.parallel._cuts import Part


def blank_copy(model: nn.Module, blank: Any, device: Any, kept: Iterable[Tensor] = ()) -> nn.Module:
    """A copy of `model` whose parameters and buffers are blanks of the mode `blank`, but for the buffers in `kept`.

    Uncuttable where the model cannot be copied.
    """
    import copy

    import torch

    memo: dict[int, Any] = {id(buffer): buffer for buffer in kept}
    with blank, torch.no_grad():
        for parameter in model.parameters():
            empty = torch.empty_like(parameter, device=device)
            memo[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
        for buffer in model.buffers():
            if id(buffer) not in memo:
                memo[id(buffer)] = torch.empty_like(buffer, device=device)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise Uncuttable(
            f"the model cannot be copied, so where its values flow cannot be worked out: {error}"
        ) from error


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Puts the random numbers of Python and torch back to where they were."""
    import random

    import torch

    state = random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)


class Twin:
    """A copy of a model in which parameters and the buffers of parts are blanks, for working out routes."""

    def __init__(self, model: nn.Module, parts: list[Part], direct: list[str], device: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.blank = FakeTensorMode(allow_non_fake_inputs=True)
        self.parts, self.stages = parts, 1 + max(part.stage for part in parts)
        inside = {id(buffer) for part in parts for buffer in part.module.buffers()}
        self.shared = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in inside}
        self.direct = direct
        self.model = blank_copy(model, self.blank, device, self.shared.values())
        modules = dict(self.model.named_modules())
        self.modules = {part.name: modules[part.name] for part in parts}

    def route(self, model: nn.Module, call: Call) -> Route:
        """Which events a call of `model` has, and what travels. Draws no random numbers, changes no buffers."""
        import torch

        training = {name: module.training for name, module in model.named_modules()}
        for name, module in self.model.named_modules():
            module.training = training.get(name, module.training)
        for name, buffer in model.named_buffers():
            if name in self.shared:
                holder, _, last = name.rpartition(".")
                self.model.get_submodule(holder)._buffers[last] = buffer.clone()
        with undrawn(), torch.no_grad():
            return _Learning(self).run(call.args, call.kwargs)


class _Learning:
    """One pass of a twin."""

    def __init__(self, twin: Twin) -> None:
        self.twin = twin
        self.route = Route(twin.stages)
        self.following = Following(self._operation)
        self.stale: dict[Value, str] = {}
        """Values that a later stage has changed in place behind another name."""

    def run(self, args: Any, kwargs: Any) -> Route:
        undo = [
            answer_calls(self.twin.modules[part.name], functools.partial(self._answer, part))
            for part in self.twin.parts
        ]
        for index, name in enumerate(self.twin.direct):
            self.following.marks[self.twin.model.get_parameter(name)] = (-1 - index, 0)
        try:
            with self.following:
                output = self.twin.model.forward(*args, **kwargs)
        finally:
            for restore in undo:
                restore()
        self._take("the model's output", self.twin.stages - 1, output)
        self.route.settle()
        return self.route

    def _answer(self, part: Part, forward: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            if self.following.inside:
                return forward(*args, **kwargs)
            self._take(part.name, part.stage, (args, kwargs))
            with self.following.away():
                before = [(tensor, tensor._version) for tensor in tensors_of((args, kwargs))]
                output = self._run(part.name, part.stage, forward, args, kwargs)
                changed = [tensor for tensor, version in before if tensor._version != version]
            event = Event(part.name, part.name, part.stage, output, part=True, changes=bool(changed))
            for tensor in changed:
                self._changed(event, tensor, itself=True)
            return self._add(event)

        return answer

    def _operation(self, function: Any, args: Any, kwargs: Any, values: list[Value]) -> Any:
        from torch.overrides import resolve_name

        name = resolve_name(function) or str(function)
        stage = max(self.route.stage_of(value) for value in values)
        self._take(name, stage, (args, kwargs))
        output = self._run(name, stage, function, args, kwargs)
        event = Event(function, name, stage, output, changes=changes_first(function, output, args))
        if not event.changes:
            return self._add(event)
        self._changed(event, args[0])
        self.route.events.append(event)
        self.following.mark(len(self.route.events) - 1, args[0])
        return output

    def _changed(self, event: Event, target: Tensor, itself: bool = False) -> None:
        """An earlier stage's value changed by a later one is seen there only by the name that it was changed by.

        `itself` tells that a module has changed it inside: then it is seen by no name outside.
        """
        before = self.following.marks.get(target)
        if before is None or self.route.stage_of(before) == event.stage:
            return
        with self.following.unseen():
            storage = target.untyped_storage()._cdata
            for other, value in self.following.marks.items():
                if (itself or other is not target) and other.untyped_storage()._cdata == storage:
                    self.stale[value] = event.name

    def _add(self, event: Event) -> Any:
        """Blanks of its own for each event: an operation may give back what it was called with."""
        from torch import Tensor
        from torch.utils._pytree import tree_map_only

        with self.following.unseen(), self.twin.blank:
            output = tree_map_only(Tensor, lambda value: value.detach(), event.output)
        self.route.events.append(dataclasses.replace(event, output=output))
        self.following.mark(len(self.route.events) - 1, output)
        return output

    def _take(self, name: str, stage: int, tree: Any) -> None:
        """Note what an event takes; Uncuttable where it cannot be had there."""
        from torch._subclasses.fake_tensor import FakeTensor

        for tensor in tensors_of(tree):
            value = self.following.marks.get(tensor)
            if value is None:
                if isinstance(tensor, FakeTensor):
                    self._refuse_parameter(name, stage, tensor)
                    raise Uncuttable(
                        f"{name} in stage {stage} takes a value that was made where it cannot be followed (a function "
                        "of torch.autograd or of another library between modules); put it inside a module with "
                        "parameters, or choose other split points"
                    )
                continue
            made = self.route.stage_of(value)
            if made > stage:
                raise Uncuttable(
                    f"{name} of stage {stage} takes a value of the later stage {made}, made by {self._maker(value)}: "
                    "values flow forward only, and modules belong to stages in the order in which the model defines them"
                )
            if value in self.stale:
                raise Uncuttable(
                    f"{name} in stage {stage} takes a value of stage {made} that {self.stale[value]} has changed in place "
                    "in a later stage; choose other split points"
                )
            if made < stage:
                self.route.needs.setdefault(stage, set()).add(value)

    def _refuse_parameter(self, name: str, stage: int, tensor: Tensor) -> None:
        """A parameter of a part that code between parts takes is not there on other ranks."""
        for owner, parameter in self.twin.model.named_parameters():
            if parameter is tensor:
                raise Uncuttable(
                    f"{name} in stage {stage} takes {owner} outside of the module that has it; call the module instead (a "
                    "tied weight may be the weight of a second module)"
                )

    def _maker(self, value: Value) -> str:
        return self.route.events[value[0]].name if value[0] >= 0 else self.twin.direct[-1 - value[0]]

    def _run(self, name: str, stage: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

        try:
            with self.twin.blank:
                return function(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise Uncuttable(
                f"{name} in stage {stage} depends on the values of activations ({error.func}), not on their shapes alone: "
                "other stages, which have no values, cannot follow; choose other split points"
            ) from error
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, Uncuttable):
                raise
            raise Uncuttable(f"{name} in stage {stage} cannot be worked out without values: {error}") from error
