"""What a run's events add up to. The state is a fold of them and is never stored, so it cannot disagree with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

D = TypeVar("D")


class State(StrEnum):
    """Where a run stands.

    ::

        created ──> queued ──> running ──> completed | failed | interrupted | preempted
           └──────────────────────^ │
                                    └ ─ ─> lost     (its supervisor is gone; mostly worked out on reading)
    """

    CREATED = "created"
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"
    LOST = "lost"


ENDED = frozenset({State.COMPLETED, State.FAILED, State.INTERRUPTED, State.PREEMPTED, State.LOST})
"""The states an attempt can end in. LOST is written where a part of the supervision died and the rest could still tell."""


@dataclass(frozen=True)
class History:
    """A run as its events tell it. `state` is rarely LOST: events cannot tell that their writer is gone."""

    state: State = State.CREATED
    attempts: int = 0
    """Attempts started; they are numbered from 1, so this is also the number of the newest."""
    last_step: int = 0
    """The newest optimizer step that an event names."""
    exit_code: int | None = None
    """What the newest attempt ended with; None before it has."""
    supervisor: Mapping[str, Any] | None = None
    """The event of whoever is at work now: `starting` of the command that starts an attempt, `attempt_started` of its node,
    `restarting` between two attempts. None when nobody is."""


def fold(events: Iterable[Mapping[str, Any]]) -> History:
    """Add up `events`, oldest first. Never raises: unknown kinds and fields of a wrong type are passed over."""
    state, attempts, step, exit_code = State.CREATED, 0, 0, None
    supervisor: Mapping[str, Any] | None = None
    before: tuple[State, int | None] = state, exit_code
    for event in events:
        kind = event.get("event")
        if kind == "queued" and supervisor is None:
            state = State.QUEUED
        elif kind == "attempt_started":
            # The count steps in where a torn line took a number with it: no attempt may write over another's logs.
            attempts = max(attempts + 1, whole(event.get("attempt"), 0))
            state, exit_code, supervisor = State.RUNNING, None, event
        elif kind in ("starting", "restarting"):
            before = state, exit_code
            state, exit_code, supervisor = State.RUNNING, None, event
        elif kind == "refused":
            (state, exit_code), supervisor = before, None
        elif kind == "attempt_ended":
            state, supervisor = _ending(event.get("state")), None
            exit_code = whole(event.get("exit_code"), None)
        if kind == "training":
            # A resumed attempt begins at its checkpoint, which may lie before the step the last one died at.
            step = whole(event.get("start_step"), step)
        else:
            step = max(step, whole(event.get("step"), 0))
    return History(state, attempts, step, exit_code, supervisor)


def whole(value: object, default: D) -> int | D:
    """`value` if it is a whole number (true and false are none), else `default`."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _ending(name: object) -> State:
    return next((state for state in ENDED if state == name), State.FAILED)
