"""A model cut into stages while its forward stays the user's own.

Every stage runs the whole forward. A module of its own runs; a module of an earlier stage answers with a blank, a tensor
that has a shape and no values (PyTorch's FakeTensor); the first call of a module of the next stage ends the pass, and what
it was called with is what this stage hands over. The first own module that is called with a blank gets what was handed
over by the stage before. A blank anywhere else is a value that would have to skip a stage: an error that names the module.

Modules without parameters and persistent buffers belong to no stage and run in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu.errors import PlanError
from mgpu.parallel._blocks import repeated_blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

KEY = ("parallel", "split")


class HandedOver(BaseException):
    """Ends a stage's pass; no `except Exception` in a user's forward may catch it."""

    def __init__(self, value: Any) -> None:
        super().__init__("handed over to the next stage")
        self.value = value


class Uncuttable(RuntimeError):
    """A model whose values do not flow from stage to stage."""


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


class Cutting:
    """Which stage is running, and what each part answers. Parts of other ranks give up their memory at once."""

    def __init__(self, model: nn.Module, parts: list[Part], own: Sequence[int]) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.model = model
        self.parts = parts
        self.blank = FakeTensorMode(allow_non_fake_inputs=True)
        self.running: int | None = None
        self.given: Tensor | None = None
        self.shapes: dict[Any, Any] = {}
        self.blanks: dict[Any, Any] = {}
        self.leaf_of: dict[int, int] = {}
        """Which argument of the first call of a stage is handed over, as the stage before it has chosen."""
        self.several = len(own) > 1
        self.forward: Callable[..., Any] = model.forward
        self.absent = {part.name: Absent(part.module) for part in parts if part.stage not in own}
        self._blank_direct_parameters(model, parts, own)

    def cut(self) -> None:
        """Replace the parts' forwards, once what belongs inside them (recomputation, compilation) is there."""
        for part in self.parts:
            part.module.forward = self._answer(part, part.module.forward)

    def run(self, stage: int, given: Tensor | None, last: int, args: Any, kwargs: Any) -> Any:
        """One pass of `stage`: what it hands over, or the model's output if it is the last."""
        self.running, self.given = stage, given
        try:
            output = self.forward(*args, **kwargs)
        except HandedOver as over:
            return over.value
        finally:
            self.running, self.given = None, None
        if stage != last:
            raise Uncuttable(f"stage {stage} came to the end of the model: no module of stage {stage + 1} was called")
        if (name := self._first_blank(output)) is not None:
            raise Uncuttable(f"the model's output depends on {name} of an earlier stage, which hands nothing over")
        return output

    def _answer(self, part: Part, forward: Callable[..., Any]) -> Callable[..., Any]:
        import torch
        from torch.utils._pytree import tree_map_only

        def answer(*args: Any, **kwargs: Any) -> Any:
            if self.running is None:
                return forward(*args, **kwargs)
            if part.stage == self.running:
                args, kwargs = self._hand_in(part, args, kwargs)
                output = forward(*args, **kwargs)
                if self.several and (key := _key(part, args, kwargs)) not in self.shapes:
                    self.shapes[key] = tree_map_only(
                        torch.Tensor, lambda value: torch.empty_like(value, device="meta"), output
                    )
                return output
            if part.stage == self.running + 1:
                raise HandedOver(self._hand_over(part, args, kwargs))
            if part.stage > self.running:
                raise Uncuttable(
                    f"{part.name} of stage {part.stage} is called before anything of stage {self.running + 1}"
                )
            return self._blank_answer(part, forward, args, kwargs)

        return answer

    def _hand_in(self, part: Part, args: Any, kwargs: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.utils._pytree import tree_flatten, tree_unflatten

        leaves, structure = tree_flatten((args, kwargs))
        blanks = [index for index, leaf in enumerate(leaves) if isinstance(leaf, FakeTensor)]
        if not blanks:
            return args, kwargs
        if self.given is None or len(blanks) > 1:
            raise Uncuttable(
                f"{part.name} of stage {part.stage} needs a value made in an earlier stage: only one tensor is handed "
                "over, to the first module of a stage; choose other split points"
            )
        if self.leaf_of.get(part.stage, blanks[0]) != blanks[0]:
            raise Uncuttable(
                f"{part.name}, which begins stage {part.stage}, is called with several tensors, and the one that is handed "
                "over is not the one that it misses; choose other split points"
            )
        leaves[blanks[0]], self.given = self.given, None
        return tree_unflatten(leaves, structure)

    def _hand_over(self, part: Part, args: Any, kwargs: Any) -> Any:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.utils._pytree import tree_leaves

        for index, leaf in enumerate(tree_leaves((args, kwargs))):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) and leaf.is_floating_point():
                self.leaf_of[part.stage] = index
                return leaf
        raise Uncuttable(f"{part.name} begins stage {part.stage}, but is called without a tensor of activations")

    def _blank_answer(self, part: Part, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a module of an earlier stage would return, without values: worked out once for each shape of its input."""
        import torch
        from torch.utils._pytree import tree_leaves, tree_map_only

        key = _key(part, args, kwargs)
        if key in self.blanks:
            return self.blanks[key]
        if key not in self.shapes:  # of another rank, without memory here; a module of this rank has run before
            meta_args, meta_kwargs = tree_map_only(
                torch.Tensor, lambda value: torch.empty_like(value, device="meta"), (args, kwargs)
            )
            running, self.running = self.running, None
            try:
                with torch.no_grad(), self.absent[part.name]:
                    self.shapes[key] = forward(*meta_args, **meta_kwargs)
            finally:
                self.running = running
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        device = next((leaf.device for leaf in tensors), torch.device("cpu"))
        with self.blank:
            self.blanks[key] = tree_map_only(torch.Tensor, lambda value: _blank_like(value, device), self.shapes[key])
        return self.blanks[key]

    def _first_blank(self, output: Any) -> str | None:
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.utils._pytree import tree_leaves

        return "a module" if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(output)) else None

    def _blank_direct_parameters(self, model: nn.Module, parts: list[Part], own: Sequence[int]) -> None:
        """Parameters of modules that several stages share (a class token) belong to stage 0: blanks on other ranks."""
        import torch

        inside = {id(module) for part in parts for module in part.module.modules()}
        for module in model.modules():
            if id(module) in inside or 0 in own:
                continue
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                del module._parameters[name]
                with self.blank:
                    setattr(module, name, torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device))


class Absent:
    """The parameters and buffers of a module of another rank: taken out of it, and put back without memory for a while."""

    def __init__(self, module: nn.Module) -> None:
        import torch

        self.places: list[tuple[dict[str, Any], str, Any]] = []
        for inner in module.modules():
            for name, parameter in inner._parameters.items():
                if parameter is not None:
                    blank = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                    self.places.append((inner._parameters, name, blank))
            for name, buffer in inner._buffers.items():
                if buffer is not None:
                    self.places.append((inner._buffers, name, torch.empty_like(buffer, device="meta")))
        self.__exit__()

    def __enter__(self) -> None:
        for holder, name, value in self.places:
            holder[name] = value

    def __exit__(self, *error: object) -> None:
        for holder, name, _ in self.places:
            holder[name] = None


def _key(part: Part, args: Any, kwargs: Any) -> Any:
    """What the shapes of a module's output depend on."""
    import torch
    from torch.utils._pytree import tree_flatten

    leaves, structure = tree_flatten((args, kwargs))
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
    mixed = any(torch.is_autocast_enabled(device) for device in devices)
    return (
        part.name,
        str(structure),
        mixed,
        tuple(
            (tuple(leaf.shape), leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else leaf
            if isinstance(leaf, int | float | str | bool | None)
            else type(leaf).__name__
            for leaf in leaves
        ),
    )


def _blank_like(value: Tensor, device: torch.device) -> Tensor:
    import torch

    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def direct_parameters(model: nn.Module, parts: list[Part]) -> dict[str, nn.Parameter]:
    """Parameters that are in no part, by name."""
    inside = {id(parameter) for part in parts for parameter in part.module.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in inside}


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
