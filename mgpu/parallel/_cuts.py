"""Where a model is cut: the modules that stages begin with, and the parts that each stage has."""

from __future__ import annotations

from collections.abc import Sequence
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


def choose_cuts(model: nn.Module, stages: int) -> list[str]:
    """Names of the modules where `stages` stages of about equal work begin; PlanError where there are too few blocks.

    The work of a block is taken as the number of weights that it multiplies by (matrices and kernels, no tables).
    """
    blocks = repeated_blocks(model) or {
        name: child for name, child in model.named_children() if any(True for _ in child.parameters())
    }
    names = list(blocks)
    if len(names) < stages:
        raise PlanError(
            f"{len(names)} blocks ({', '.join(names) or 'none'}) do not make {stages} stages",
            key=("parallel",),
            hint="name the split points: split: [layers.1, layers.2], or use fewer stages",
        )
    costs = [_work(block) for block in blocks.values()]
    everything = {id(module): name for name, module in model.named_modules()}
    inside = {id(m) for block in blocks.values() for m in block.modules()}
    seen_block, before, after = False, 0.0, 0.0
    for module in model.modules():
        if id(module) in inside:
            seen_block = True
        elif not any(True for _ in module.children()) and id(module) in everything:
            before, after = (before, after + _work(module)) if seen_block else (before + _work(module), after)
    starts = _balanced(costs, stages, before, after)
    return [names[start] for start in starts]


def _work(module: nn.Module) -> float:
    from torch import nn

    tables = {
        id(parameter)
        for inner in module.modules()
        if isinstance(inner, nn.Embedding)
        for parameter in inner.parameters()
    }
    own_tables = isinstance(module, nn.Embedding)
    return float(
        sum(
            parameter.numel()
            for parameter in module.parameters()
            if parameter.dim() > 1 and not (own_tables or id(parameter) in tables)
        )
    )


def _balanced(costs: list[float], stages: int, before: float, after: float) -> list[int]:
    """Where stages 1, 2, ... begin, so that the dearest stage is as cheap as can be (dynamic programming).

    >>> _balanced([1, 1, 1, 1], 2, 0, 0), _balanced([1, 1, 1, 1], 2, 0, 2)
    ([2], [3])
    """
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (before if start == 0 else 0) + (after if stop == count else 0)

    best: dict[tuple[int, int], tuple[float, list[int]]] = {}
    for stop in range(1, count + 1):
        best[1, stop] = (cost_of(0, stop), [])
    for stage in range(2, stages + 1):
        for stop in range(stage, count + 1):
            options = []
            for start in range(stage - 1, stop):
                dearest, starts = best[stage - 1, start]
                options.append((max(dearest, cost_of(start, stop)), [*starts, start]))
            best[stage, stop] = min(options)
    return best[stages, count][1]
