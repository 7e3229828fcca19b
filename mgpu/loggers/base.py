"""What every logger is: something that is told the numbers of a run, one logged step at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

from mgpu.runs import Run

Value = float | int | str | None


class Logger(ABC):
    """A place that metrics go to. One file of this folder holds one logger, and is named as `loggers:` names it.

    It is made without arguments, opened once an attempt, told steps in rising order, and closed whatever happens.
    Nothing more is asked of it, so that anything that can draw a curve can be one.
    """

    where: ClassVar[Literal["rank0", "front"]] = "rank0"
    """The process it lives in: `rank0` trains and has the numbers first; `front` is what the user started, has the
    terminal, and reads them from metrics.jsonl."""

    @abstractmethod
    def open(self, run: Run, *, resume_step: int) -> None:
        """An attempt begins. Steps above `resume_step` that were logged before will be trained, and told, again."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """The numbers of an optimizer step: epoch, samples, loss, lr, grad_norm, samples_per_s, units_per_s, seconds.

        `seconds` counts from the start of the attempt's training. A key may be missing, a value None.
        """

    def evaluated(self, step: int, values: Mapping[str, Value]) -> None:  # noqa: B027 - not every logger shows these
        """The evaluation data was gone through after `step`: its loss and metrics."""

    def close(self, outcome: str) -> None:  # noqa: B027 - not every logger holds something open
        """The attempt is over; `outcome` is the state it ended in. Also called after an error, and may come twice."""
