"""What the user's command does with a run: start its node, show it, pass signals on, and tell how it ended."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from mgpu.errors import EXIT_SIGNAL_BASE
from mgpu.files import LineTail, has_room
from mgpu.launch import stopping
from mgpu.launch.output import LogTail, TextTail
from mgpu.runs import Run

if TYPE_CHECKING:
    from rich.console import Console

    from mgpu.loggers.console import ConsoleLogger

POLL_SECONDS = 0.05
_ROOM_SECONDS = 1.0
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
        self.metrics = LineTail(run.metrics_path)
        self.events = LineTail(run.events_path)
        self.is_script = run.plan().get("size") is None
        self.output = _Output(run, attempt, self.is_script)
        self.node: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._relay = relay
        self._is_started = self._is_full = False
        self._look_again = 0.0

    @functools.cached_property
    def console(self) -> Console:
        """Where people read. Made when first needed: the node is started before Rich is imported."""
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True)

    @functools.cached_property
    def display(self) -> ConsoleLogger:
        from mgpu.loggers.console import ConsoleLogger

        return ConsoleLogger(self.console)

    def start(self, listener: socket.socket) -> None:
        """Start the node, which starts its spawner; it runs while the rest is prepared."""
        self.metrics.skip_to_end()
        self.events.skip_to_end()
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
        self.display.open(self.run, resume_step=resume_step)
        try:
            while self.node.poll() is None:
                self._show()
                if self.detach and self._is_started:
                    return 0
                try:
                    self.node.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
            self._show(at_end=True)
        finally:
            self._quietly(self.output.finish_line)
            self._quietly(lambda: self.display.close(str(self.run.state)))
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

    def _show(self, *, at_end: bool = False) -> None:
        self._quietly(lambda: self._show_all(at_end))

    def _quietly(self, show: Any) -> None:
        """A terminal that was closed, or a reader that left, is no reason to lose the run: from then on it is silent."""
        try:
            show()
        except OSError:
            from rich.console import Console

            from mgpu.loggers.console import ConsoleLogger

            self.console = Console(file=open(os.devnull, "w", encoding="utf-8"), quiet=True)  # noqa: SIM115
            self.display = ConsoleLogger(self.console)
            self.output.mute()

    def _show_all(self, at_end: bool) -> None:
        self._look_for_room()
        self.output.show(self.display, at_end=at_end)
        for values in self.metrics.read():
            self.display.log(int(values.get("step", 0)), values)
        for event in self.events.read():
            self._tell(event)

    def _look_for_room(self) -> None:
        """Said here, for on a full disk nobody else can: all that the ranks and the node say goes through files of the run."""
        now = time.monotonic()
        if now < self._look_again or not self.run.path.exists():
            return
        self._look_again = now + _ROOM_SECONDS
        is_full = not has_room(self.run.path)
        if is_full and not self._is_full:
            text = f"warning: no room is left where {self.run.path} lies ({os.strerror(errno.ENOSPC)}): nothing can be saved"
            self.display.print_line(f"{text} or logged until there is; training goes on", style="red")
        self._is_full = is_full

    def _tell(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "attempt_started":
            if not self._is_started and self.say_id:
                print(self.run.id, flush=True)
            self._is_started = True
            self.attempt = event["attempt"]
            self.output.follow(self.attempt)
        elif kind == "evaluated":
            values = {key: value for key, value in event.items() if key not in ("event", "time", "unix", "step")}
            self.display.evaluated(event["step"], values)
        elif kind == "note":
            self.display.print_line(event["text"])
        elif kind == "stop_asked":
            more = "; once more to end at once" if event["signal"] == "SIGINT" else ""
            self.display.print_line(f"{event['signal']}: saving a checkpoint, then stopping{more}")
        elif kind == "restarting":
            from mgpu.launch.report import attempt_lines

            self.output.show(self.display, at_end=True)
            self.output.finish_line()
            for line in attempt_lines(self.run, self.attempt):
                self.display.print_line(line, style="red")
            wait = f" in {event['wait']:.0f} s" if event["wait"] else ""
            count = f"restart {event['number']} of {event['max']}"
            self.display.print_line(f"{count}{wait}, from the checkpoint of step {event['from_step']}")


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
