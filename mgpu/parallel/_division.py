"""Where `split: auto` cuts a model: the costs it is judged by, the most even cuts, and that all ranks make the same.

The first rank judges and tells the others, so that a clock that runs differently elsewhere changes nothing. What it has
chosen is kept with the run: the next attempt cuts in the same places, and draws the same dropout masks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from mgpu.errors import PlanError
from mgpu.files import write_json
from mgpu.parallel._cuts import KEY, Part, balanced, parts_of, places_to_cut, weights_of
from mgpu.parallel._survey import Survey, Unknown, survey
from mgpu.parallel.base import Context, Task

if TYPE_CHECKING:
    from torch import nn

Measure = Literal["time", "flops", "memory", "weights"]
WORDS: dict[Measure, str] = {
    "time": "measured time of a micro batch",
    "flops": "floating-point operations of a micro batch",
    "memory": "memory of weights, gradients, optimizer state and the activations of a micro batch",
    "weights": "number of weights",
}
KEPT = "split.json"


def measures_of(split: str, device: str) -> tuple[Measure, ...]:
    """What a pipeline's `split` asks for, in the order in which it is tried."""
    automatic: tuple[Measure, ...] = ("flops", "weights") if device == "cpu" else ("time", "flops", "weights")
    return automatic if split == "auto" else (cast(Measure, split),)


def announced(measures: Sequence[Measure]) -> str:
    """What a plan says of a division that is made when the run starts."""
    first, *rest = (WORDS[measure] for measure in measures)
    return f"split by {first}{''.join(f', or else by {other}' for other in rest)}: worked out when the run starts"


@dataclass(frozen=True)
class Division:
    """Names of the modules that stages 1, 2, ... begin with, and how they were chosen, for people."""

    cuts: tuple[str, ...]
    note: str


class _Costs:
    """The costs of a model's stretches by one measure or another; the survey is made once, where one is needed."""

    def __init__(self, model: nn.Module, parts: list[Part], task: Task, context: Context) -> None:
        self.model, self.parts, self.task, self.context = model, parts, task, context
        self.count = 1 + max(part.stage for part in parts)
        self.survey: Survey | None = None
        self.batch: Any = None

    def by(self, measure: Measure) -> Sequence[float]:
        """Unknown where the measure says nothing of this model."""
        if measure == "weights":
            return [sum(weights_of(part) for part in self.parts if part.stage == index) for index in range(self.count)]
        survey = self._surveyed()
        if measure == "time":
            from mgpu.parallel._timing import seconds_of

            return seconds_of(self.model, self.parts, survey, self.task, self.batch, self.context)
        if measure == "memory":
            from mgpu.parallel._memory import bytes_of

            held = bytes_of(self.model, self.parts, self.context)
            return [at_rest + kept for at_rest, kept in zip(held, survey.activations, strict=True)]
        if not any(survey.work):
            raise Unknown("the model has no matrix products, convolutions or attention")
        return survey.work

    def _surveyed(self) -> Survey:
        if self.survey is None:
            self.batch = self.context.example() if self.context.example else None
            if self.batch is None:
                raise Unknown("there is no micro batch to try")
            self.survey = survey(self.model, self.parts, self.task, self.batch, self.context)
        return self.survey


def divide(
    model: nn.Module, stages: int, measures: Sequence[Measure], task: Task, context: Context, what: str = "stage"
) -> Division:
    """Cut `model` (whole, with its weights) into `stages`; collective over all ranks, which get the same answer.

    `measures` are tried in order, until one says something of this model. PlanError where none does, or there are too few
    blocks. `what` is the word for a stage.
    """
    names = places_to_cut(model, stages)
    told: list[Any] = [None]
    if context.rank == 0:
        told = [_kept(context, names, stages, measures) or _chosen(model, names, stages, measures, task, context, what)]
    if context.world > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(told, src=0, device=context.device)
    answer = told[0]
    if isinstance(answer, str):
        raise PlanError(f"split: {measures[0]} cannot cut this model: {answer}", key=KEY, hint="write split: weights")
    cuts, note = answer
    return Division(tuple(cuts), note)


def _chosen(
    model: nn.Module,
    names: list[str],
    stages: int,
    measures: Sequence[Measure],
    task: Task,
    context: Context,
    what: str,
) -> tuple[list[str], str] | str:
    """The cuts and the note; the reason alone where none of the measures has any."""
    costs = _Costs(model, parts_of(model, names[1:]), task, context)
    reasons = []
    for measure in measures:
        try:
            found = costs.by(measure)
        except Unknown as error:
            reasons.append(f"{WORDS[measure]} unknown: {error}")
            continue
        starts = balanced(found, stages)
        if costs.survey is not None and not costs.survey.loss_counted:
            reasons.append("without the loss, which reads values")
        cuts, note = [names[start] for start in starts], _note(measure, names, found, starts, what, reasons)
        return cuts, note + _keep(context, names, stages, measures, cuts, note)
    return "; ".join(reasons)


def _keep(
    context: Context, names: list[str], stages: int, measures: Sequence[Measure], cuts: list[str], note: str
) -> str:
    """Write the choice down for the attempts to come; returns what people must know if that fails."""
    if context.folder is None:
        return ""
    kept = {"blocks": names, "stages": stages, "measures": list(measures), "cuts": cuts, "note": note}
    try:
        write_json(context.folder / KEPT, kept)
    except OSError as error:
        return f" (not kept for later attempts: {error.strerror})"
    return ""


def _kept(context: Context, names: list[str], stages: int, measures: Sequence[Measure]) -> tuple[list[str], str] | None:
    """What an attempt before has chosen for the same blocks, stages and measures."""
    path = context.folder / KEPT if context.folder is not None else None
    if path is None or not path.exists():
        return None
    asked = {"blocks": names, "stages": stages, "measures": list(measures)}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if any(kept[key] != value for key, value in asked.items()):
            return None
        return list(kept["cuts"]), f"{kept['note']} (as in the attempt before)"
    except (OSError, ValueError, KeyError, TypeError):  # not what was written: choose again
        return None


def _note(
    measure: Measure, names: list[str], costs: Sequence[float], starts: list[int], what: str, reasons: list[str]
) -> str:
    bounds = [0, *starts, len(names)]
    total = sum(costs) or 1
    stages = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        blocks = names[start] if stop == start + 1 else f"{names[start]} to {names[stop - 1]}"
        stages.append(f"{what} {index}: {blocks}, {sum(costs[start:stop]) / total:.0%}")
    because = f" ({'; '.join(reasons)})" if reasons else ""
    return f"split by {WORDS[measure]}{because}: {'; '.join(stages)}"
