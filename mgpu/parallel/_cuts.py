"""Where a model can be cut, the parts that each stage has, and how costs are spread most evenly over stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu.errors import PlanError
from mgpu.parallel._blocks import repeated_blocks

if TYPE_CHECKING:
    from torch import nn

KEY = ("parallel", "split")


@dataclass(frozen=True)
class Part:
    """A module with state, all of one stage."""

    name: str
    module: nn.Module
    stage: int


def parts_of(model: nn.Module, cuts: Sequence[str]) -> list[Part]:
    """The modules that hold state, in the order they were defined, with their stages.

    `cuts` are the names of the modules that stages 1, 2, ... begin with, in that order. Everything defined before a cut
    belongs to the stages before it. PlanError where a cut is no module, or out of order.
    """
    order = {name: position for position, (name, _) in enumerate(model.named_modules())}
    unknown = [name for name in cuts if name not in order]
    if unknown:
        raise PlanError(f"the model has no module {unknown[0]!r}", key=KEY, hint=_near(unknown[0], order))
    places = [order[name] for name in cuts]
    if places != sorted(set(places)):
        raise PlanError(f"split points out of order: {', '.join(cuts)}", key=KEY, hint="write them as the model runs")
    stage_of = {name: sum(place <= position for place in places) for name, position in order.items()}
    return _parts(model, "", stage_of)


def _near(name: str, known: Any) -> str:
    from mgpu.errors import suggest

    return suggest(name, [word for word in known if word])


def _parts(module: nn.Module, name: str, stage_of: dict[str, int]) -> list[Part]:
    prefix = f"{name}." if name else ""
    stages = {stage_of[prefix + inner if inner else name] for inner, part in module.named_modules() if _has_state(part)}
    if not stages:
        return []
    if len(stages) == 1 and name and callable_module(module):
        return [Part(name, module, stages.pop())]
    found = []
    for child, part in module.named_children():
        found += _parts(part, prefix + child, stage_of)
    return found


def callable_module(module: nn.Module) -> bool:
    """Whether a module has a forward of its own; lists of modules have none."""
    from torch import nn

    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def _has_state(module: nn.Module) -> bool:
    persistent = set(module._buffers) - module._non_persistent_buffers_set
    return bool(module._parameters) or bool(persistent)


def places_to_cut(model: nn.Module, stages: int) -> list[str]:
    """Names of the modules that a stage may begin with, in order; PlanError where there are too few of them.

    They are the repeated blocks of a model that is a stack, the layers of its lists otherwise. What is defined before the
    first of them always belongs to the first stage.
    """
    names = list(repeated_blocks(model)) or list(_members(model, ""))
    if len(names) < stages:
        raise PlanError(
            f"{len(names)} blocks ({', '.join(names) or 'none'}) do not make {stages} stages",
            key=("parallel",),
            hint="name the split points: split: [layers.1, layers.2], or use fewer stages",
        )
    return names


def _members(module: nn.Module, prefix: str) -> Iterator[str]:
    """The modules with parameters that a module or a list in it is made of, down to those that are no lists."""
    from torch import nn

    for name, child in module.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from _members(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield prefix + name


def weights_of(part: Part) -> int:
    """The number of weights that a part multiplies by: matrices and kernels, no tables."""
    from torch import nn

    tables = {
        id(parameter)
        for inner in part.module.modules()
        if isinstance(inner, nn.Embedding)
        for parameter in inner.parameters()
    }
    return sum(
        parameter.numel()
        for parameter in part.module.parameters()
        if parameter.dim() > 1 and id(parameter) not in tables
    )


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Where stages 1, 2, ... begin in a row of costs, so that the dearest stage is as cheap as can be.

    Of the ways that do that, the one whose stages are most alike (least sum of squares); of those, the first. Exact, by
    dynamic programming.

    >>> balanced([1, 1, 1, 1], 2), balanced([1, 1, 1, 3], 2), balanced([1, 1, 1, 1, 9], 3)
    ([2], [3], [2, 4])
    """
    sums: list[float] = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(start: int, stop: int) -> float:
        return sums[stop] - sums[start]

    dearest, _ = _best(len(costs), stages, lambda before, start, stop: max(before, cost_of(start, stop)))

    def squares(before: float, start: int, stop: int) -> float:
        cost = cost_of(start, stop)
        return before + cost * cost if cost <= dearest else math.inf

    return _best(len(costs), stages, squares)[1]


def _best(count: int, stages: int, extend: Callable[[float, int, int], float]) -> tuple[float, list[int]]:
    """The least value of a division, built up stage by stage with `extend(value so far, start, stop)`, and its starts."""
    best = {stop: (extend(0.0, 0, stop), list[int]()) for stop in range(1, count + 1)}
    for stage in range(2, stages + 1):
        best = {
            stop: min(
                (extend(best[start][0], start, stop), [*best[start][1], start]) for start in range(stage - 1, stop)
            )
            for stop in range(stage, count + 1)
        }
    return best[count]
