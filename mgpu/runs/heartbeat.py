"""Where each rank of an attempt stands right now: step, phase and the time of its last sign of life, in shared memory.

The supervisor makes one anonymous memory file (`memfd`) a start; the ranks inherit it and write, everybody else reads.
Nothing of it has a name, so nothing can be left behind. One beat costs about a microsecond: no lock and no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_SLOT_BYTES = 128
_SLOT = struct.Struct("<11q")
_BEAT = struct.Struct("<3q")
_NUMBER = struct.Struct("<q")
_FIELDS = (
    "step", "phase", "beat_ns", "pid", "stacks", "ended", "failed_ns", "asked", "beats_itself", "unrecorded", "lingers",
)  # fmt: skip


class Phase(IntEnum):
    """What a rank does. The first step of an attempt stands apart: it compiles, allocates and connects."""

    STARTING = 0
    FIRST_STEP = 1
    TRAINING = 2
    EVALUATING = 3
    SAVING = 4
    ENDING = 5
    SCRIPT = 6

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


class Ended(IntEnum):
    """How a rank that ends by itself came to its end; a rank that leaves without a word stays at NO."""

    NO = 0
    COMPLETED = 1
    STOPPED = 2


@dataclass(frozen=True)
class Beat:
    """One rank's slot, as it was read.

    `step` is the optimizer step in work, counted from 1 (0 before the first); times are monotonic nanoseconds, 0 where
    there was none. `stacks` is the rank's file descriptor that stacks are written to. `asked` is the signal that asked
    this rank itself to stop. `beats_itself` is False for a script that never called `beat`. `unrecorded` is the errno for
    which this rank's error could not be written down, 0 where it was, or there was none. `lingers` says that this rank has
    failed, and only waits until a checkpoint that it had saved before is written.
    """

    step: int
    phase: Phase
    beat_ns: int
    pid: int
    stacks: int
    ended: Ended
    failed_ns: int
    asked: int
    beats_itself: bool
    unrecorded: int = 0
    lingers: bool = False


class Board:
    """The slots of all ranks of this host."""

    def __init__(self, descriptor: int, world: int, *, readable_only: bool = False) -> None:
        self.descriptor = descriptor
        self.world = world
        access = mmap.ACCESS_READ if readable_only else mmap.ACCESS_WRITE
        self._memory = mmap.mmap(descriptor, world * _SLOT_BYTES, access=access)

    @classmethod
    def create(cls, world: int) -> Board:
        """A new board, all slots empty. Its descriptor is not inherited unless that is asked for."""
        descriptor = os.memfd_create("mgpu-heartbeats", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, world * _SLOT_BYTES)
        return cls(descriptor, world)

    @classmethod
    def of(cls, started: Mapping[str, Any]) -> Board | None:
        """The board of a live attempt, by its `attempt_started` event; None where it cannot be read any more."""
        try:
            path = f"/proc/{started['pid']}/fd/{started['heartbeats']}"
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, KeyError):
            return None
        try:
            return cls(descriptor, int(started["world"]), readable_only=True)
        except (OSError, ValueError, KeyError):
            return None
        finally:
            os.close(descriptor)

    def read(self, rank: int) -> Beat:
        values = _SLOT.unpack_from(self._memory, rank * _SLOT_BYTES)
        slot = dict(zip(_FIELDS, values, strict=True))
        return Beat(
            step=slot["step"],
            phase=Phase(slot["phase"]),
            beat_ns=slot["beat_ns"],
            pid=slot["pid"],
            stacks=slot["stacks"],
            ended=Ended(slot["ended"]),
            failed_ns=slot["failed_ns"],
            asked=slot["asked"],
            beats_itself=bool(slot["beats_itself"]),
            unrecorded=slot["unrecorded"],
            lingers=bool(slot["lingers"]),
        )

    def all(self) -> dict[int, Beat]:
        return {rank: self.read(rank) for rank in range(self.world)}

    def clear(self) -> None:
        """Empty all slots, for a new attempt."""
        self._memory[:] = bytes(len(self._memory))

    def heart(self, rank: int) -> Heart:
        return Heart(self._memory, rank)


class Heart:
    """One rank's own slot, to write."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self._memory = memory
        self._start = rank * _SLOT_BYTES

    def beat(self, step: int, phase: Phase) -> None:
        """A sign of life."""
        _BEAT.pack_into(self._memory, self._start, step, phase, time.monotonic_ns())

    def set(self, field: str, value: int) -> None:
        """Write one of the fields of `Beat` that do not change with every step."""
        _NUMBER.pack_into(self._memory, self._start + _NUMBER.size * _FIELDS.index(field), value)

    def get(self, field: str) -> int:
        value: int = _NUMBER.unpack_from(self._memory, self._start + _NUMBER.size * _FIELDS.index(field))[0]
        return value
