"""What the user's command does with a run: start its node, show it, pass signals on, and tell how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from mgpu.errors import EXIT_SIGNAL_BASE
from mgpu.launch import stopping
from mgpu.launch.output import LogTail, TextTail
from mgpu.launch.screen import Screen, is_script
from mgpu.runs import Run

if TYPE_CHECKING:
    from rich.console import Console

    from mgpu.loggers.console import ConsoleLogger

POLL_SECONDS = 0.05
_TRACEBACK = "Traceback (most recent call last):"


class Front:
    """A run from its next attempt on, seen from the terminal.

    With `detach` the node lives on without it. `say_id` prints the run's id on stdout once nothing can be refused.
    """

    def __init__(
        self, run: Run, attempt: int, relay: stopping.SignalRelay, *, detach: bool = False, say_id: bool = True
    ) -> None:
        self.run = run
        self.attempt = attempt
        self.detach = detach
        self.say_id = say_id
        self.screen = Screen(run, attempt, _Output(run, attempt, raw=is_script(run)))
        self.screen.on_start = self._started
        self.node: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._relay = relay
        self._is_started = False

    @property
    def console(self) -> Console:
        """Where people read."""
        return self.screen.console

    def start(self, listener: socket.socket) -> None:
        """Start the node, which starts its spawner; it runs while the rest is prepared."""
        self.screen.skip_to_end()
        command = [sys.executable, "-m", "mgpu.launch.node", str(self.run.path), str(self.attempt)]
        command.append(str(listener.fileno()))
        held = [listener.fileno()]
        read = None
        if not self.detach:
            read, self._lifeline = os.pipe2(os.O_CLOEXEC)
            held.append(read)
            command.append(str(read))
        log = self.run.node_log_path(self.attempt, 0)
        log.parent.mkdir(parents=True, exist_ok=True)
        stopping.block()  # until the node listens itself, a signal waits for it
        try:
            with log.open("ab") as output:
                self.node = subprocess.Popen(
                    command,
                    pass_fds=held,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, "MGPU_RUN": str(self.run.path)},
                )
        finally:
            stopping.unblock()
        listener.close()
        if read is not None:
            os.close(read)
        self._relay.connect(self._pass_on)

    def watch(self, resume_step: int) -> int:
        """Show the run until it ends, or with `detach` until it has begun; its exit code."""
        assert self.node is not None
        self.screen.display.open(self.run, resume_step=resume_step)
        try:
            while self.node.poll() is None:
                self.screen.look_for_room()
                self.screen.show()
                if self.detach and self._is_started:
                    return 0
                try:
                    self.node.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
            self.screen.look_for_room()
            self.screen.show(at_end=True)
        finally:
            self.screen.close()
        code = self.node.returncode
        return EXIT_SIGNAL_BASE - code if code < 0 else code

    def abandon(self) -> None:
        """Something failed on this side before the run was watched: the node ends when the lifeline closes."""
        if self.node is not None:
            self.node.terminate()
            self.node.wait()

    def _pass_on(self, signum: int) -> None:
        with contextlib.suppress(OSError):  # the node may have just ended
            if self._lifeline is not None:
                os.write(self._lifeline, bytes([signum]))
            elif self.node is not None:
                self.node.send_signal(signum)

    def _started(self) -> None:
        if not self._is_started and self.say_id:
            print(self.run.id, flush=True)
        self._is_started = True


class _Output:
    """What rank 0 prints: of a training whole lines, of a script every byte as it comes (it draws bars of its own).

    Up to the traceback it ends with: the report names the cause, whosever it is.
    """

    def __init__(self, run: Run, attempt: int, raw: bool) -> None:
        self._run, self._raw, self._muted = run, raw, False
        self._is_open_line = False
        self._attempt = 0
        self.follow(attempt)

    def follow(self, attempt: int) -> None:
        if attempt == self._attempt:
            return
        self._attempt = attempt
        self._failure = self._run.failure_path(attempt, 0)
        log = self._run.log_path(attempt, 0)
        self._lines, self._bytes = TextTail(log), LogTail(log)
        self._is_over = False

    def finish_line(self) -> None:
        """What follows begins on a line of its own, also after a progress bar that was cut off."""
        if self._is_open_line and not self._muted:
            self._write(b"\n")

    def mute(self) -> None:
        self._muted = True

    def show(self, display: ConsoleLogger, *, at_end: bool) -> None:
        if self._muted or self._is_over:
            return
        if self._raw:
            self._pass_through(self._bytes.read())
            return
        lines = self._lines.read(at_end=at_end)
        # The record is written before the traceback, so that here it is known whose traceback this is.
        if _TRACEBACK in lines and self._failure.exists():
            lines, self._is_over = lines[: lines.index(_TRACEBACK)], True
        for line in lines:
            display.print_line(line)

    def _pass_through(self, block: bytes) -> None:
        start = block.find(_TRACEBACK.encode())
        if start >= 0 and self._failure.exists():
            block, self._is_over = block[:start], True
        if block:
            self._write(block)

    def _write(self, block: bytes) -> None:
        sys.stderr.flush()
        sys.stderr.buffer.write(block)
        sys.stderr.buffer.flush()
        self._is_open_line = not block.endswith(b"\n")


def refusals(run: Run) -> list[dict[str, Any]]:
    """The faults that the check before the start found, if it refused the run."""
    path = run.path / "refused.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    path.unlink(missing_ok=True)
    return found
