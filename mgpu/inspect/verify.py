"""`mgpu verify`: is the layout part of the result of this training? Its first steps in several layouts, compared.

A difference is set against what rounding explains: the reference layout is recorded in double precision as well, and the
distance between the two, times `LENIENCE`, is what another order of the same sums may cost. Under `numerics: exact` nothing
may differ at all.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mgpu.errors import Refusal
from mgpu.inspect.layouts import EVERY_STRATEGY, Layout, choose
from mgpu.inspect.recording import Recording, Step, distance, record
from mgpu.spec import load_spec

LENIENCE = 10.0
FLOOR = {"fp64": 1e-12}
"""Smallest difference that counts, relative to the value, by precision; FLOOR_SINGLE for the others."""
FLOOR_SINGLE = 2e-6
KERNEL_NOISE = 1e-2
"""What two runs of one layout may differ by on GPUs, relative: some of their kernels add in no fixed order."""


@dataclass(frozen=True)
class Difference:
    """The first thing of a layout that is not as in the reference. `size` and `allowed` are relative to the value."""

    step: int
    what: str
    size: float | None
    allowed: float
    cause: str


@dataclass(frozen=True)
class Row:
    """One layout against the reference: the largest relative difference of each kind, and the first that is too large."""

    layout: Layout
    steps: int
    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    first: Difference | None = None


@dataclass(frozen=True)
class Verdict:
    """`allowed`: what rounding explains, relative, for loss, gradients and parameters at the last step."""

    reference: Layout
    steps: int
    exact: bool
    rows: tuple[Row, ...]
    allowed: tuple[float, float, float]

    @property
    def agrees(self) -> bool:
        return all(row.first is None for row in self.rows)


def verify(
    path: Path, overrides: Sequence[str], layouts: Sequence[str], steps: int, tell: Callable[[str], None]
) -> Verdict:
    """Record and compare. The first layout is the reference; without `layouts`, those that fit the batch and the machine.

    `all` are all strategies; one that turns out not to fit the model is left out, and told.
    """
    loaded = load_spec(path, overrides)
    spec = loaded.spec
    if spec.script is not None or spec.batch is None:
        raise Refusal("a script does its own training: there is nothing to compare")
    chosen = choose(path, overrides, loaded, layouts, tell)
    if not chosen:
        raise Refusal("no layout to verify", hint="name some: --layouts cpu:1,cpu:2")
    size, micro = spec.batch.size, spec.batch.micro_size
    samples = 3 * size + size // 2 + max(1, micro // 2)  # three whole batches and an uneven tail an epoch
    with tempfile.TemporaryDirectory(prefix="mgpu-verify-") as folder:

        def run(layout: Layout, *changes: str) -> Recording:
            tell(f"{layout}{' in double precision' if changes else ''}: {steps} steps")
            return record(path, [*overrides, *changes], layout, steps, samples, Path(folder))

        reference = run(chosen[0])
        if reference.failure:
            raise Refusal(f"layout {chosen[0]}, the reference, fails by itself: {reference.failure}")
        _check_repeats(reference, run(chosen[0]), spec.precision)
        double = reference if spec.numerics == "exact" else run(chosen[0], "precision=fp64")
        if double.failure:
            raise Refusal(f"the model does not train in double precision, the yardstick: {double.failure}")
        yardstick = Yardstick(reference, double, exact=spec.numerics == "exact", precision=spec.precision)
        rows = []
        for layout in chosen[1:]:
            try:
                rows.append(compare(reference, run(layout), yardstick))
            except Refusal as error:  # by the preflight, which has seen the model
                if list(layouts) != [EVERY_STRATEGY]:
                    raise
                tell(f"{error.message}; left out")
    return Verdict(chosen[0], len(reference.steps), spec.numerics == "exact", tuple(rows), yardstick.summary())


def _check_repeats(reference: Recording, again: Recording, precision: str) -> None:
    """Refusal where the same layout gives other numbers the second time: there is nothing that layouts could agree on."""
    floor = Yardstick(reference, reference, exact=False, precision=precision)
    noise = 0.0 if reference.layout.devices.startswith("cpu") else KERNEL_NOISE
    for index, (first, second) in enumerate(zip(reference.steps, again.steps, strict=False)):
        for difference in _differences(index, first, second, floor):
            if difference.size is None or not difference.size <= noise:
                what = f"step {difference.step}, {difference.what}"
                raise Refusal(
                    f"layout {reference.layout} gives another result when it is repeated: {what}",
                    hint="draw random numbers from the generators of Python, NumPy and torch, which mgpu seeds",
                )


class Yardstick:
    """What rounding explains, step by step: absolute differences that two layouts may have."""

    def __init__(self, reference: Recording, double: Recording, *, exact: bool, precision: str) -> None:
        self._exact = exact
        self._floor = FLOOR.get(precision, FLOOR_SINGLE)
        self._steps = reference.steps
        self._loss: list[float] = []
        self._apart: dict[str, list[dict[str, float]]] = {"gradients": [], "parameters": []}
        for own, other in zip(reference.steps, double.steps, strict=False):
            self._loss.append(max([abs(own.loss - other.loss), *self._loss[-1:]]))
            for kind, known in self._apart.items():
                here, there = getattr(own, kind), getattr(other, kind)
                before = known[-1] if known else {}
                known.append({n: max(distance(here[n], there.get(n, here[n])), before.get(n, 0.0)) for n in here})

    def loss(self, index: int) -> float:
        if self._exact:
            return 0.0
        return LENIENCE * self._loss[index] + self._floor * abs(self._steps[index].loss)

    def tensor(self, kind: str, index: int, name: str) -> float:
        """For the gradient or the parameter `name` after step number `index`."""
        if self._exact:
            return 0.0
        values: dict[str, list[float]] = getattr(self._steps[index], kind)
        largest = max(value[0] for value in values.values())
        own = values[name][0] if name in values else 0.0
        return LENIENCE * self._apart[kind][index].get(name, 0.0) + self._floor * (own + 1e-2 * largest)

    def norm(self, index: int) -> float:
        """For the norm of the whole gradient."""
        names = self._steps[index].gradients
        return math.sqrt(sum(self.tensor("gradients", index, name) ** 2 for name in names))

    def summary(self) -> tuple[float, float, float]:
        """For loss, gradients and parameters at the last step, relative."""
        last = len(self._steps) - 1
        step = self._steps[last]

        def whole(kind: str) -> float:
            values: dict[str, list[float]] = getattr(step, kind)
            norm = math.sqrt(sum(value[0] ** 2 for value in values.values())) or 1.0
            return math.sqrt(sum(self.tensor(kind, last, name) ** 2 for name in values)) / norm

        return self.loss(last) / (abs(step.loss) or 1.0), whole("gradients"), whole("parameters")


def compare(reference: Recording, other: Recording, yardstick: Yardstick) -> Row:
    """Step by step, in the order of cause and effect: data, units, rate, loss, gradients, parameters."""
    loss = gradient = parameter = 0.0
    first: Difference | None = None
    for index, (right, found) in enumerate(zip(reference.steps, other.steps, strict=False)):
        loss = max(loss, abs(right.loss - found.loss) / (abs(right.loss) or 1.0))
        gradient = max(gradient, _relative(right.gradients, found.gradients))
        parameter = max(parameter, _relative(right.parameters, found.parameters))
        first = first or next(_differences(index, right, found, yardstick), None)
    if first is None and other.failure:
        first = Difference(len(other.steps) + 1, "the run failed", None, 0.0, other.failure)
    elif other.failure and first is not None:
        first = Difference(
            first.step, first.what, first.size, first.allowed, f"{first.cause}; the run failed: {other.failure}"
        )
    elif first is None and len(other.steps) != len(reference.steps):
        what = f"{len(other.steps)} steps in place of {len(reference.steps)}"
        first = Difference(len(other.steps), what, None, 0.0, "the length of the training depends on the layout")
    return Row(other.layout, len(other.steps), loss, gradient, parameter, first)


def _relative(right: dict[str, list[float]], found: dict[str, list[float]]) -> float:
    """The distance of all tensors together, relative to their norm."""
    apart = math.sqrt(sum(distance(value, found.get(name, [0.0] * len(value))) ** 2 for name, value in right.items()))
    return apart / (math.sqrt(sum(value[0] ** 2 for value in right.values())) or 1.0)


def _differences(index: int, right: Step, found: Step, yardstick: Yardstick) -> Iterator[Difference]:
    yield from _of_data(right, found)
    if odd := sorted(name for name in {**right.lr, **found.lr} if right.lr.get(name) != found.lr.get(name)):
        mine, theirs = (lr.get(odd[0]) for lr in (right.lr, found.lr))
        size = None if mine is None or theirs is None else abs(theirs - mine) / (abs(mine) or 1.0)
        cause = (
            "something steps the learning rate once a micro batch or a rank; mgpu's schedule is a function of the step"
        )
        yield Difference(right.number, f"learning rate of {odd[0]}", size, 0.0, cause)
    allowed, apart = yardstick.loss(index), abs(right.loss - found.loss)
    if not apart <= allowed:
        scale = abs(right.loss) or 1.0
        yield Difference(right.number, "loss", apart / scale, allowed / scale, _cause_of_loss(right, found, allowed))
    yield from _of_tensors("gradients", index, right, found, yardstick)
    norm, allowed = abs(right.grad_norm - found.grad_norm), yardstick.norm(index)
    if not norm <= allowed:
        scale = right.grad_norm or 1.0
        cause = "each gradient agrees, their norm does not: it is taken over a part of them"
        yield Difference(right.number, "gradient norm", norm / scale, allowed / scale, cause)
    yield from _of_tensors("parameters", index, right, found, yardstick)
    for name, ranks in found.torn.items():
        what = f"parameter {name} differs between ranks (rank {', '.join(map(str, ranks))})"
        yield Difference(right.number, what, None, 0.0, _UNSYNCED)


_UNSYNCED = (
    "its gradient is not summed over the ranks: used around the wrapped model, ignored by DDP, or changed outside the "
    "optimizer"
)


def _of_data(right: Step, found: Step) -> Iterator[Difference]:
    for index, (ids, content) in right.micro.items():
        if index not in found.micro or index in found.twice or found.micro[index][0] != ids:
            cause = (
                "the order or the split of the data depends on the layout: a sampler or a data set that looks at RANK?"
            )
            yield Difference(right.number, f"samples of micro batch {index}", None, 0.0, cause)
        elif found.micro[index][1] != content:
            cause = (
                "the same samples hold other values: random numbers that do not come from the generators which mgpu seeds "
                "before each sample (a seed made of rank or worker?)"
            )
            yield Difference(right.number, f"content of micro batch {index}", None, 0.0, cause)
    if len(found.micro) > len(right.micro):
        yield Difference(right.number, "number of micro batches", None, 0.0, "the data set depends on the layout")
    if right.units != found.units:
        cause = "the task counts units over something else than its micro batch"
        size = abs(found.units - right.units) / (right.units or 1.0)
        yield Difference(right.number, "units", size, 0.0, cause)


def _cause_of_loss(right: Step, found: Step, allowed: float) -> str:
    for index, (total, units) in right.losses.items():
        if index in found.losses:
            answer = found.losses[index]
            if abs(answer[0] - total) > allowed * max(1.0, units) or answer[1] != units:
                return (
                    f"the task's loss of micro batch {index} is {answer[0]:.6g} over {answer[1]:g} units in place of "
                    f"{total:.6g} over {units:g}: it depends on rank, world size or what the task saw before"
                )
    if right.number == 1:
        return "the model's forward pass depends on the layout: random numbers of its own, or other initial weights"
    return "an earlier step went another way"


def _of_tensors(kind: str, index: int, right: Step, found: Step, yardstick: Yardstick) -> Iterator[Difference]:
    mine, theirs = getattr(right, kind), getattr(found, kind)
    word = kind.removesuffix("s")
    odd = []
    for name, value in mine.items():
        apart = distance(value, theirs[name]) if name in theirs else math.inf
        if not apart <= yardstick.tensor(kind, index, name):
            odd.append((name, apart))
    if not odd:
        return
    name, apart = odd[0]
    scale = mine[name][0] or 1.0
    allowed = yardstick.tensor(kind, index, name) / scale
    others = f" and {len(odd) - 1} more of {len(mine)}" if len(odd) > 1 else ""
    yield Difference(
        right.number, f"{word} of {name}{others}" if kind == "gradients" else f"parameter {name}{others}", apart / scale,
        allowed, _cause_of_tensors(kind, [n for n, _ in odd], mine, theirs),
    )  # fmt: skip


def _cause_of_tensors(kind: str, odd: list[str], right: dict[str, list[float]], found: dict[str, list[float]]) -> str:
    if kind == "parameters":
        return "the gradients agree, the update does not: the optimizer's own state, clipping or rate depends on the layout"
    if len(odd) < len(right):
        return _UNSYNCED
    ratios = [found[name][0] / right[name][0] for name in odd if name in found and right[name][0]]
    if ratios and max(ratios) - min(ratios) < 1e-3 * max(ratios):
        return f"all gradients are {ratios[0]:.4g} times as large: an average over ranks or micro batches of unequal weight"
    return "the loss agrees, the gradient does not: the backward pass or the sum over ranks depends on the layout"
