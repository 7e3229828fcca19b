"""What the user's command does with a run: start its node, show it, pass signals on, and tell how it ended."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from types import FrameType
from typing import Any

from rich.console import Console

from mgpu.errors import EXIT_SIGNAL_BASE
from mgpu.files import LineTail
from mgpu.loggers.console import ConsoleLogger
from mgpu.runs import Run, State

POLL_SECONDS = 0.1
_TRACEBACK = "Traceback (most recent call last):"


class Front:
    """One attempt of a run, seen from the terminal."""

    def __init__(self, run: Run, attempt: int, quiet: bool = False) -> None:
        self.run = run
        self.attempt = attempt
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.display = ConsoleLogger(self.console)
        self.metrics = LineTail(run.metrics_path)
        self.events = LineTail(run.events_path)
        self.output = _OutputTail(run, attempt)
        self.node: subprocess.Popen[bytes] | None = None

    def watch(self, listener: socket.socket, resume_step: int) -> int:
        """Start the node, show the run until it ends, and return its exit code."""
        self.metrics.skip_to_end()
        self.events.skip_to_end()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, self._pass_on)
        command = [
            sys.executable,
            "-m",
            "mgpu.launch.node",
            str(self.run.path),
            str(self.attempt),
            str(listener.fileno()),
        ]
        log = self.run.node_log_path(self.attempt, 0)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.node = subprocess.Popen(
                command,
                pass_fds=(listener.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        listener.close()
        self.display.open(self.run, resume_step=resume_step)
        try:
            while self.node.poll() is None:
                self._show()
                try:
                    self.node.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
            self._show()
        finally:
            self.display.close(str(self.run.state))
        code = self.node.returncode
        return EXIT_SIGNAL_BASE - code if code < 0 else code

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        if self.node is not None and self.node.poll() is None:
            self.node.send_signal(signum)

    def _show(self) -> None:
        for line in self.output.read():
            self.display.print_line(line)
        for values in self.metrics.read():
            self.display.log(int(values.get("step", 0)), values)
        for event in self.events.read():
            if event.get("event") == "attempt_started":
                print(self.run.id, flush=True)  # what a script wants; only once nothing can be refused any more
            elif event.get("event") == "evaluated":
                values = {key: value for key, value in event.items() if key not in ("event", "time", "unix", "step")}
                self.display.evaluated(event["step"], values)
            elif event.get("event") == "note":
                self.display.print_line(event["text"])


class _OutputTail:
    """Whole lines of what rank 0 prints, up to the traceback it ends with: the report names the cause, whosever it is."""

    def __init__(self, run: Run, attempt: int) -> None:
        self._path = run.log_path(attempt, 0)
        self._failure = run.failure_path(attempt, 0)
        self._offset = 0

    def read(self) -> list[str]:
        if self._offset == sys.maxsize or not self._path.exists():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            whole, newline, _ = stream.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        lines = whole.decode(errors="replace").split("\n") if newline else []
        # The record is written before the traceback, so that here it is known whose traceback this is.
        if _TRACEBACK in lines and self._failure.exists():
            self._offset = sys.maxsize
            return lines[: lines.index(_TRACEBACK)]
        return lines


def refusals(run: Run) -> list[dict[str, Any]]:
    """The faults that the check before the start found, if it refused the run."""
    path = run.path / "refused.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def report(run: Run, attempt: int, code: int, console: Console) -> None:
    """The last thing on the screen: the result and what to do next, or the cause."""
    events = [e for e in run.events() if e["event"] == "attempt_ended" and e["attempt"] == attempt]
    ended: dict[str, Any] = events[-1] if events else {}
    state, step = ended.get("state", str(run.state)), run.last_step
    cause = ended.get("cause")
    if state == State.COMPLETED:
        console.print(f"completed  {run.id}  at step {step}", style="green")
        console.print("next:  mgpu show latest\n       mgpu logs latest\n       mgpu ls")
        return
    if cause is None or cause["kind"] == "unfinished":
        console.print(f"{state}  {run.id}  at step {step}, exit {code}\ncontinue:  mgpu resume {run.id}")
        if not ended:
            console.print(f"the supervisor ended without a word: {run.node_log_path(attempt, 0)}")
        return
    who = "the run" if cause["rank"] is None else f"rank {cause['rank']}"
    lines = [f"failed  {run.id}  after step {step}, exit {code}", f"cause  {who}: {cause['what']}"]
    lines += [f"place  {cause['place']}"] if cause["place"] else []
    if cause["victims"]:
        lines.append(f"followed by rank {', '.join(map(str, cause['victims']))}: victims of the above")
    lines += [f"log    {cause['log']}"] if cause["log"] else []
    lines.append(f"next   mend it, then: mgpu resume {run.id}")
    console.print("\n".join(lines), style="red", markup=False, soft_wrap=True)
