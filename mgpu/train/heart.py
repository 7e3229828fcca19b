"""This process's sign of life to its supervisor: `beat(step)` says that the work goes on.

mgpu's own loop calls it. A script under `script:` may call it as well, once a step; from its first beat on it is watched
for hangs like any training (`watchdog.hang`). Outside of mgpu it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from mgpu.runs.heartbeat import Heart, Phase

Item = TypeVar("Item")

_heart: Heart | None = None


def attach(heart: Heart) -> None:
    """Make `heart` the one that this process beats."""
    global _heart
    _heart = heart


def beat(step: int, phase: Phase = Phase.TRAINING) -> None:
    """Say that optimizer step `step` (from 1) is being worked on. About a microsecond."""
    if _heart is not None:
        _heart.beat(step, phase)
        if not _heart.get("beats_itself"):
            _heart.set("beats_itself", 1)


def beating(items: Iterable[Item], step: int, phase: Phase) -> Iterator[Item]:
    """`items`, with a beat before each: a long evaluation is no hang as long as it goes on."""
    for item in items:
        beat(step, phase)
        yield item
