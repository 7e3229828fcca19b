"""What ranks print: kept within bounds and datable by the node, followed by whoever wants to read it.

A rank writes straight into its file, so nothing stands between a crash and its last words. The node only moves a file
that has grown too large aside, and notes now and then how long each file was: that dates every line, for `--since`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from mgpu.files import append_line, read_lines
from mgpu.launch.processes import send
from mgpu.runs import Run
from mgpu.runs.requests import REOPEN_SIGNAL, catches

_NOTE_SECONDS = 5.0
_ROTATE_SECONDS = 1.0


def older(log: Path) -> Path:
    """Where the part of a log is that was moved aside."""
    return log.with_name(f"{log.name}.1")


class LogKeeper:
    """Looks after the logs of one attempt."""

    def __init__(self, run: Run, attempt: int, world: int, limit: int) -> None:
        self._logs = {rank: run.log_path(attempt, rank) for rank in range(world)}
        self._clock = clock_path(run, attempt)
        self._limit = limit
        self._moved = dict.fromkeys(self._logs, 0)
        """Bytes that were written before what the current file holds."""
        self._dropped = dict.fromkeys(self._logs, 0)
        """Bytes that are in neither of the two files any more."""
        self._noted: dict[int, int] = {}
        self._next_note = self._next_look = 0.0

    def tick(self, now: float, pids: Sequence[int]) -> None:
        """Called often; `now` is monotonic seconds."""
        if now >= self._next_look:
            self._next_look = now + _ROTATE_SECONDS
            sizes = {rank: _size(path) for rank, path in self._logs.items()}
            for rank, size in sizes.items():
                if size > self._limit and catches(pids[rank], REOPEN_SIGNAL):
                    self._move(rank, size, pids[rank])
            if now >= self._next_note:
                self._next_note = now + _NOTE_SECONDS
                self._note(sizes)

    def _move(self, rank: int, size: int, pid: int) -> None:
        try:
            self._logs[rank].rename(older(self._logs[rank]))
        except OSError:  # a disk without room for the name: the log is too large until there is some
            return
        self._dropped[rank] = self._moved[rank]
        self._moved[rank] += size
        send(pid, REOPEN_SIGNAL)

    def _note(self, sizes: dict[int, int]) -> None:
        totals = {rank: self._moved[rank] + _size(self._logs[rank]) for rank in sizes}
        changed = {rank: total for rank, total in totals.items() if self._noted.get(rank) != total}
        if changed:
            self._noted.update(changed)
            dropped = {str(rank): self._dropped[rank] for rank in changed if self._dropped[rank]}
            written = {str(rank): total for rank, total in changed.items()}
            with contextlib.suppress(OSError):  # a full disk: what was not noted dates the lines less well
                append_line(self._clock, {"unix": time.time(), "written": written, "dropped": dropped})


def clock_path(run: Run, attempt: int) -> Path:
    """Where it is noted how much each rank had written at which time."""
    return run.log_path(attempt, 0).with_name("clock.jsonl")


def offset_at(run: Run, attempt: int, rank: int, unix: float) -> int:
    """Where in what is kept of a log (the part moved aside, then the file) the time `unix` surely was not yet reached."""
    offset = dropped = 0
    is_past = False
    for line in read_lines(clock_path(run, attempt)):
        is_past = is_past or float(line.get("unix", 0)) > unix
        if not is_past:
            offset = int(line.get("written", {}).get(str(rank), offset))
        dropped = int(line.get("dropped", {}).get(str(rank), dropped))
    return max(0, offset - dropped)


def written(log: Path, skip: int = 0) -> Iterator[bytes]:
    """What is kept of a log, the part that was moved aside first, without the first `skip` bytes."""
    for path in (older(log), log):
        size = _size(path)
        if skip < size:
            with path.open("rb") as stream:
                stream.seek(skip)
                while block := stream.read(1 << 20):
                    yield block
        skip = max(0, skip - size)


class LogTail:
    """Follows a log that somebody writes: each `read` gives the bytes that are new, whatever becomes of the file."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._stream: BinaryIO | None = None

    def read(self) -> bytes:
        if self._stream is None:
            try:
                self._stream = self._log.open("rb")
            except OSError:
                return b""
        block = self._stream.read()
        if not self._is_replaced():
            return block
        # What was written between the read and the move is read before the new file is.
        block += self._stream.read()
        self._stream.close()
        self._stream = None
        return block + self.read()

    def skip_to_end(self) -> None:
        self.read()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _is_replaced(self) -> bool:
        assert self._stream is not None
        try:
            return os.stat(self._log).st_ino != os.fstat(self._stream.fileno()).st_ino
        except OSError:
            return False


class TextTail:
    """Whole lines out of a `LogTail`."""

    def __init__(self, log: Path) -> None:
        self._tail = LogTail(log)
        self._rest = b""

    def read(self, *, at_end: bool = False) -> list[str]:
        """The lines that were finished since; with `at_end` the last one too, finished or not."""
        whole, newline, rest = (self._rest + self._tail.read()).rpartition(b"\n")
        self._rest = rest
        lines = whole.decode(errors="replace").split("\n") if newline else []
        if at_end and rest:
            lines.append(rest.decode(errors="replace"))
            self._rest = b""
        return lines

    def close(self) -> None:
        self._tail.close()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
