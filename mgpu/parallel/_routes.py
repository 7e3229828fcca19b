"""Which values of a model's forward pass travel from stage to stage.

Each call of a part and each operation on values that parts made is an event, numbered in order; an operation belongs to
the latest stage whose values it takes. `_twin` learns them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Value = tuple[int, int]
"""A tensor by the event that makes it and its place among that event's tensors; (-1 - n, 0) is direct parameter n."""


class Uncuttable(RuntimeError):
    """A model whose values do not flow from stage to stage."""


@dataclass(frozen=True)
class Event:
    """One call of a part, or one operation between parts. `output` holds blanks where the model has tensors."""

    what: Any
    """The name of the part, or the operation's function."""
    name: str
    stage: int
    output: Any
    part: bool = False
    changes: bool = False
    """Whether the operation changes its first operand."""


@dataclass
class Route:
    """What all stages do for calls of one shape."""

    stages: int
    events: list[Event] = field(default_factory=list)
    needs: dict[int, set[Value]] = field(default_factory=dict)
    """The values of earlier stages that each stage takes."""

    def stage_of(self, value: Value) -> int:
        return 0 if value[0] < 0 else self.events[value[0]].stage

    def settle(self) -> None:
        """Work out what is sent once all events are known; Uncuttable where a stage has nothing to do or to send."""
        for stage in range(self.stages):
            if not any(event.stage == stage and event.part for event in self.events):
                before = f"stage {stage - 1} came to the end of the model: " if stage else ""
                raise Uncuttable(f"{before}no module of stage {stage} was called")
        self.sends = [
            sorted(
                value
                for value in set().union(*(self.needs.get(later, ()) for later in range(stage + 1, self.stages)))
                if self.stage_of(value) <= stage
            )
            for stage in range(self.stages)
        ]
        for stage in range(self.stages - 1):
            if not self.sends[stage]:
                raise Uncuttable(f"no later stage takes a value of stage {stage}: choose other split points")
        sent = set().union(*self.sends)
        self.last = [
            max(
                number
                for number, event in enumerate(self.events)
                if event.stage == stage and (event.part or any(value[0] == number for value in sent))
            )
            for stage in range(self.stages)
        ]
        """The event after which each stage has nothing more to do."""
