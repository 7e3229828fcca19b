"""A run followed from any terminal: a rank's output on stdout, and on stderr all that its own front would show."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mgpu.launch.output import LogTail, older
from mgpu.launch.screen import Screen, is_script
from mgpu.runs import Run, State
from mgpu.runs.liveness import is_gone

if TYPE_CHECKING:
    from mgpu.loggers.console import ConsoleLogger

_POLL_SECONDS = 0.2
_LOOKS = 4
"""As often is the screen brought up to date meanwhile: a resume replaces the metrics, and is seen before it goes on."""
_END_SECONDS = 10.0
"""A node has left, or begun the next attempt, this long after an attempt has ended; asked where it cannot be seen."""


class LogPrinter:
    """Bytes to stdout: all as they come; only whole lines; or only those of them that match."""

    def __init__(self, pattern: re.Pattern[bytes] | None, *, whole_lines: bool = False) -> None:
        self._pattern = pattern
        self._whole_lines = whole_lines or pattern is not None
        self._rest = b""
        self.is_open_line = False
        """What was written last did not end its line."""

    def write(self, block: bytes) -> None:
        if self._whole_lines:
            whole, newline, self._rest = (self._rest + block).rpartition(b"\n")
            block = whole + newline
        if self._pattern is not None:
            block = b"".join(line + b"\n" for line in block.split(b"\n")[:-1] if self._pattern.search(line))
        self._put(block)

    def close(self) -> None:
        """The last line, finished or not."""
        rest, self._rest = self._rest, b""
        if self._pattern is None:
            self._put(rest)
        elif rest and self._pattern.search(rest):
            self._put(rest + b"\n")

    def _put(self, block: bytes) -> None:
        if block:
            sys.stdout.buffer.write(block)
            sys.stdout.buffer.flush()
            self.is_open_line = not block.endswith(b"\n")


class FollowedLog:
    """What a rank printed and prints, attempt after attempt, on stdout. The first `skip` bytes are left out.

    Where stdout and stderr are one terminal (or file) and there are steps to show, it writes whole lines, between which
    they go. Elsewhere every byte passes as it comes, so that nobody who reads stdout is disturbed.
    """

    def __init__(self, run: Run, rank: int, attempt: int, skip: int, pattern: re.Pattern[bytes] | None) -> None:
        self._run, self._rank, self._attempt = run, rank, attempt
        self._is_shared = _is_one_file()
        self._printer = LogPrinter(pattern, whole_lines=self._is_shared and not is_script(run))
        self._tail, kept = _opened(run.log_path(attempt, rank))
        self._unshown = kept[skip:]
        self.failure: OSError | None = None
        """Why stdout takes nothing any more."""

    def show(self, display: ConsoleLogger | None, *, at_end: bool) -> None:
        block, self._unshown = self._unshown + self._tail.read(), b""
        if not block and not at_end:
            return
        try:
            with contextlib.nullcontext() if display is None else display.aside():
                self._printer.write(block)
                if at_end:
                    self._printer.close()
        except OSError as error:
            self.failure = error

    def follow(self, attempt: int) -> None:
        if attempt != self._attempt:
            self._attempt = attempt
            self._unshown += self._tail.read()
            self._tail.close()
            self._tail, kept = _opened(self._run.log_path(attempt, self._rank))
            self._unshown += kept

    def finish_line(self) -> None:
        if self._is_shared and self._printer.is_open_line:
            self._printer.is_open_line = False
            sys.stderr.write("\n")
            sys.stderr.flush()

    def mute(self) -> None:
        """Only stderr has lost its reader."""

    def close(self) -> None:
        self._tail.close()


class Pauses:
    """Sleeps, and is interrupted for sure: Python drops what a handler raises in the moment in which it clears an object up."""

    def __init__(self) -> None:
        self._interrupted = False
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._hear)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def __call__(self, seconds: float) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        time.sleep(seconds)


def follow_log(run: Run, log: FollowedLog, attempt: int | None, pause: Callable[[float], None]) -> None:
    """Print `log` until the run ends; where `attempt` is given, until that attempt does."""
    while True:
        history = run.history()
        is_at_end = is_over(run) if attempt is None else history.attempts != attempt or run.state is not State.RUNNING
        log.show(None, at_end=is_at_end)
        if log.failure is not None:
            raise log.failure
        if is_at_end:
            return
        if attempt is None and history.attempts:
            log.follow(history.attempts)
        pause(_POLL_SECONDS)


def follow_run(run: Run, log: FollowedLog, pause: Callable[[float], None]) -> None:
    """Show the run beside `log` until it ends, and how it ended. Nothing that happens here touches the run."""
    from mgpu.launch.report import print_report

    plan, attempt = run.plan(), run.attempts
    screen = Screen(run, attempt, log)
    screen.display.open(run, resume_step=run.last_step)
    number = f"attempt {attempt}" if attempt else "starting"
    layout = f"{plan.get('strategy')} on {plan.get('world')} x {plan.get('device')}"
    try:
        screen.tell(f"{run.id}  {number}: {layout}", *plan.get("notes", ()))
        log.show(screen.display, at_end=False)
        screen.catch_up()
        while True:
            is_at_end = is_over(run)
            if not is_at_end:
                screen.look_for_room()
            screen.show(at_end=is_at_end)
            if log.failure is not None:
                raise log.failure
            if is_at_end:
                break
            for _ in range(_LOOKS):
                pause(_POLL_SECONDS / _LOOKS)
                screen.show()
    finally:
        screen.close()
    with contextlib.suppress(OSError):  # nobody reads it
        print_report(run, screen.attempt, run.exit_code, screen.console)


def is_over(run: Run) -> bool:
    """Whether no attempt will follow by itself: between two of them the events look for a moment as if the run had ended."""
    if run.state is State.RUNNING:
        return False
    start = run.newest_start()
    if start is None or is_gone(start):
        return True
    ends = [event.get("unix") for event in run.events() if event.get("event") == "attempt_ended"]
    newest = ends[-1] if ends else None
    return not isinstance(newest, int | float) or not 0 <= time.time() - newest < _END_SECONDS


def _opened(path: Path) -> tuple[LogTail, bytes]:
    """A tail of the log at `path`, and all that is kept of it so far, also in the part that was moved aside."""
    while True:
        before = _identities(path)
        tail = LogTail(path)
        try:
            moved = older(path).read_bytes()
        except OSError:
            moved = b""
        kept = moved + tail.read()
        if _identities(path) == before:
            return tail, kept
        tail.close()  # it was moved meanwhile: something would be missing, or there twice


def _identities(path: Path) -> list[int | None]:
    found: list[int | None] = []
    for one in (older(path), path):
        try:
            found.append(one.stat().st_ino)
        except OSError:
            found.append(None)
    return found


def _is_one_file() -> bool:
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:
        return False
