"""The errors of mgpu, each with the exit code it ends the command with.

::

    MgpuError                    1
    ├── Refusal                  2   what can be known before the start is refused before the start
    │   ├── SpecError            2   one or more problems in a spec, each with file, line and column
    │   ├── UnknownName          2   a name that is not among the known ones; proposes the nearest
    │   ├── PlanError            2   the spec does not fit the hardware
    │   ├── TopologyError        2   a description of a machine that cannot be read, or asks for what it has not
    │   └── RunNotFound          2   no run, or more than one, answers to that name
    ├── DataError                1   the training data cannot be read as the plan needs it
    ├── TaskError                1   the task does not give what it must
    ├── DriftError               1   ranks no longer hold the same model
    └── CheckpointError          1   no usable checkpoint, or one that cannot be written
        └── DamagedCheckpoint    1   files that are not what was written; names the file
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EXIT_COMPLETED = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_HUNG = 3
EXIT_PREEMPTED = 75
EXIT_SIGNAL_BASE = 128


class MgpuError(Exception):
    """Anything mgpu tells the user instead of a traceback: what, where, and what to do."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def lines(self) -> list[str]:
        """The error as the user reads it: one line of what and where, one of what to do."""
        return [self.message, *([self.hint] if self.hint else [])]


class Refusal(MgpuError):
    """Bad input, found before any process was started."""

    exit_code = EXIT_REFUSED


@dataclass(frozen=True)
class Problem:
    """One fault in a spec.

    `key` is the path of mapping keys and list indices from the root; line and column count from 1, 0 where unknown.
    """

    key: tuple[str | int, ...]
    message: str
    hint: str = ""
    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        dotted = ".".join(str(part) for part in self.key)
        head = ": ".join(part for part in (place, dotted, self.message) if part)
        return f"{head}; {self.hint}" if self.hint else head


class SpecError(Refusal):
    """Every problem found in a spec, all at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def lines(self) -> list[str]:
        return [str(problem) for problem in self.problems]


class PlanError(Refusal):
    """The spec cannot be laid onto this hardware. `key` names the field of the spec to change."""

    def __init__(self, message: str, *, key: tuple[str | int, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


class TopologyError(Refusal):
    """A text that describes no machine, only part of one, or one that cannot be; or more GPUs asked for than it has."""


class UnknownName(Refusal):
    """A plugin, a command or a key that does not exist."""

    def __init__(self, kind: str, name: str, known: Sequence[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}", hint=suggest(name, known))
        self.name = name


class RunNotFound(Refusal):
    """No run answers to that name, or several do."""


class DataError(MgpuError):
    """The training data cannot be read as the plan needs it."""


class TaskError(MgpuError):
    """A method of the task does not give what it must."""


class DriftError(MgpuError):
    """What must be alike on all ranks no longer is."""


class CheckpointError(MgpuError):
    """No usable checkpoint: none, or of another model; or one that cannot be written."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, or is not what was written."""


def suggest(word: str, known: Iterable[str]) -> str:
    """`did you mean lr?`, or the known words when none is near, or nothing when there are none.

    >>> suggest("lrr", ["lr", "weight_decay"])
    'did you mean lr?'
    """
    choices = sorted(set(known))
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    return f"known here: {', '.join(choices)}" if choices else ""
