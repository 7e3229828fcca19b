"""Is anybody stuck, and who is the odd one: from the heartbeats when, from the stacks who."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mgpu import frames
from mgpu.launch.processes import STOPPED
from mgpu.launch.stacks import Stack
from mgpu.runs.heartbeat import Beat, Phase
from mgpu.spec.models import Watchdog

_SLOW_PHASES = (Phase.STARTING, Phase.FIRST_STEP, Phase.SAVING, Phase.ENDING)
_NANO = 1_000_000_000


@dataclass(frozen=True)
class Hang:
    """Nobody of `ranks` came further for `seconds`."""

    ranks: tuple[int, ...]
    seconds: float


class HangWatch:
    """Compares the ages of the heartbeats with what the spec allows."""

    def __init__(self, limits: Watchdog) -> None:
        self._limits = limits
        self._looked_ns = time.monotonic_ns()
        self._paused_ns = 0

    def check(self, beats: Mapping[int, Beat], living: Collection[int], now_ns: int) -> Hang | None:
        """The hang that `beats` show, if they do; `now_ns` is monotonic.

        Time in which this process itself did not run (a suspended machine, a debugger) does not count against the ranks.
        """
        gap = now_ns - self._looked_ns
        self._looked_ns = now_ns
        if gap > 5 * _NANO:
            self._paused_ns = now_ns
        stalled = {}
        for rank in living:
            limit = self._limit(beats[rank])
            age = (now_ns - max(beats[rank].beat_ns, self._paused_ns)) / _NANO
            if limit is not None and beats[rank].beat_ns and age > limit:
                stalled[rank] = age
        return Hang(tuple(sorted(stalled)), max(stalled.values())) if stalled else None

    def _limit(self, beat: Beat) -> float | None:
        """Seconds without a beat; None for a script that gives no sign of life of its own."""
        if beat.phase is Phase.SCRIPT:
            return None
        slow = beat.phase in _SLOW_PHASES
        return (self._limits.start if slow else self._limits.hang).seconds


@dataclass(frozen=True)
class Odd:
    """The rank that the others wait for, and why it is thought to be that one. `rank` is None if they are all alike."""

    rank: int | None
    what: str
    place: str = ""


def odd_rank(beats: Mapping[int, Beat], stacks: Mapping[int, Stack], numbers: Mapping[int, int]) -> Odd:
    """Who is in a different place. `numbers` are the ranks' newest collectives, by the flight recorder, where known."""
    for rank, stack in sorted(stacks.items()):
        if stack.state in STOPPED:
            return Odd(rank, "is stopped by a signal (SIGSTOP)", stack.place)
    for rank, stack in sorted(stacks.items()):
        is_saving = beats[rank].phase is Phase.SAVING
        for child in stack.children:
            is_waited_for = {"loader process": stack.in_loader, "checkpoint writer": is_saving}.get(child.what, False)
            if is_waited_for and child.state in STOPPED:
                what = f"waits for its {child.what} {child.pid}, which is stopped by a signal"
                return Odd(rank, what, stack.place)
    outside = [rank for rank, stack in sorted(stacks.items()) if not stack.in_collective]
    if outside and (len(outside) < len(stacks) or len(stacks) == 1):
        return _elsewhere(min(outside, key=lambda rank: beats[rank].step), stacks)
    if outside:
        steps = {beats[rank].step for rank in outside}
        if len(steps) > 1:
            return _elsewhere(min(outside, key=lambda rank: beats[rank].step), stacks)
        alike = len({stack.place for stack in stacks.values()}) == 1
        return Odd(None, f"all ranks are stuck{' in the same place' if alike else ''}", stacks[outside[0]].place)
    late = min(numbers, key=lambda rank: numbers[rank], default=None)
    if late is not None and numbers[late] < max(numbers.values()):
        what = f"never entered collective {max(numbers.values())}: its last is {numbers[late]}"
        return Odd(late, what, stacks[late].place if late in stacks else "")
    return Odd(None, "all ranks wait in a collective", stacks[min(stacks)].place if stacks else "")


def _elsewhere(rank: int, stacks: Mapping[int, Stack]) -> Odd:
    stack = stacks[rank]
    busy = [child for child in stack.children if child.what == "loader process" and frames.users(child.main)]
    if stack.in_loader and busy:
        return Odd(rank, f"waits for its loader process {busy[0].pid}", busy[0].place)
    if stack.in_loader:
        return Odd(rank, "waits for its data loader", stack.place)
    if stack.state == "D":
        return Odd(rank, "waits for a disk or a file server (process state D)", stack.place)
    if not stack.main:
        return Odd(rank, "does not answer", "")
    return Odd(rank, "is stuck", stack.place)
