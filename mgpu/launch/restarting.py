"""Whether a failed attempt is followed by another one, by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu.launch.diagnosis import Cause
from mgpu.spec.models import Restart

_LONGEST_WAIT = 60.0
SCRIPT_SECONDS = 60.0
"""A script does not tell when it saves; having run for this long counts as progress."""


@dataclass(frozen=True)
class Ending:
    """One failed attempt, as far as a restart depends on it. `unix` is when it ended."""

    cause: Cause
    unix: float
    progressed: bool


@dataclass(frozen=True)
class Decision:
    """`wait` is the back-off in seconds before the next attempt, None if there is none; `why` tells a refusal."""

    wait: float | None
    why: str = ""


def decide(limits: Restart, endings: Sequence[Ending], restarts: Sequence[float], now: float) -> Decision:
    """After the last of `endings` (oldest first). `restarts` are the unix times of the automatic starts so far."""
    last = endings[-1]
    if limits.max == 0:
        return Decision(None)
    if last.cause.deterministic:
        return Decision(None, "the error would come again")
    if any(_same(last.cause, before.cause) for before in endings[:-1]):
        return Decision(None, f"the same error came at step {last.cause.step} before")
    if not last.progressed:
        return Decision(None, "no new checkpoint since the start: it would only fail again")
    counted = [at for at in restarts if limits.window is None or now - at <= limits.window.seconds]
    if len(counted) >= limits.max:
        within = f" within {limits.window}" if limits.window else ""
        return Decision(None, f"{len(counted)} of {limits.max} restarts{within} are used up")
    return Decision(0.0 if not counted else min(_LONGEST_WAIT, 2.0 ** (len(counted) - 1)))


def _same(one: Cause, other: Cause) -> bool:
    """Kills from outside are never the same: what killed may be gone."""
    if one.kind not in ("error", "exit", "left early"):
        return False
    return (one.kind, one.what, one.place, one.step) == (other.kind, other.what, other.place, other.step)
