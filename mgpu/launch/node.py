"""One host's part of a run: start → watch → end → tell."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from mgpu.errors import EXIT_COMPLETED, EXIT_FAILED, EXIT_PREEMPTED, EXIT_REFUSED, EXIT_SIGNAL_BASE
from mgpu.files import write_json
from mgpu.launch.diagnosis import Cause, judge
from mgpu.launch.link import Link
from mgpu.plan.plan import Plan
from mgpu.runs import Run, State
from mgpu.runs.liveness import this_process

PR_SET_PDEATHSIG = 1
SETTLE_SECONDS = 2.0


class Node:
    """Supervises the ranks of one attempt on this host."""

    def __init__(self, run: Run, attempt: int, listener: int) -> None:
        self.run = run
        self.attempt = attempt
        self.plan = Plan.from_json(json.loads(run.plan_path.read_text()))
        self.pids: list[int] = []
        self.exits: dict[int, int] = {}
        self.order: list[int] = []
        self.asked: int | None = None
        self.told = False
        self.deadline: float | None = None
        mine, theirs = socket.socketpair()
        self.link = Link(mine)
        self.spawner = subprocess.Popen(
            [sys.executable, "-m", "mgpu.launch.spawner", str(theirs.fileno()), str(listener)],
            pass_fds=(theirs.fileno(), listener),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        os.close(listener)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """The first asks the ranks to save and stop; a second ends them at once."""
        now = time.monotonic()
        self.deadline = now if self.asked is not None and signum != signal.SIGUSR1 else now + self.plan.grace
        self.asked = self.asked or signum
        for rank, pid in enumerate(self.pids):
            if rank not in self.exits:
                os.kill(pid, signal.SIGTERM)

    def supervise(self) -> int:
        """Run the attempt to its end; returns the exit code."""
        try:
            self._expect("ready")
            self.link.send(do="check", run=str(self.run.path))
            faults = self._expect("checked")["faults"]
            if faults:
                write_json(self.run.path / "refused.json", faults)
                return EXIT_REFUSED
            self._start()
            self._watch()
        finally:
            self._end()
        return self._tell(judge(self.run, self.attempt, self.exits, self.order), self._step())

    def _start(self) -> None:
        self.link.send(do="start", run=str(self.run.path), attempt=self.attempt, world=self.plan.world)
        started = self._expect("started")
        self.pids = started["pids"]
        self.run.record(
            "attempt_started",
            attempt=self.attempt,
            **this_process(),
            master_port=started["port"],
            world=self.plan.world,
            pids=self.pids,
        )
        if self.asked is not None:
            self._on_signal(signal.SIGUSR1, None)

    def _watch(self) -> None:
        """Until all ranks are gone, or one has failed and the others had time to record their own end."""
        while len(self.exits) < self.plan.world:
            if self.deadline is not None and time.monotonic() >= self.deadline:
                return
            if self.asked is not None and not self.told:
                self.told = True
                self.run.record("stop_asked", attempt=self.attempt, signal=signal.Signals(self.asked).name)
            message = self._receive(timeout=0.2)
            if message is None:
                continue
            self.exits[message["rank"]] = message["code"]
            self.order.append(message["rank"])
            if message["code"] != 0 and self.deadline is None:
                self.deadline = time.monotonic() + SETTLE_SECONDS

    def _end(self) -> None:
        """Nothing stays: the group of every rank is killed, whether the rank still lives or not."""
        for pid in self.pids:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.spawner.kill()
        self.spawner.wait()

    def _tell(self, cause: Cause | None, step: int) -> int:
        state, code = self._outcome(cause)
        told = None if state is State.COMPLETED or cause is None else cause.to_json()
        self.run.record("attempt_ended", attempt=self.attempt, state=str(state), exit_code=code, step=step, cause=told)
        return code

    def _outcome(self, cause: Cause | None) -> tuple[State, int]:
        if self.asked is not None and (cause is None or cause.kind in ("unfinished", "killed", "victim")):
            if self.asked == signal.SIGUSR1:
                return State.PREEMPTED, EXIT_PREEMPTED
            return State.INTERRUPTED, EXIT_SIGNAL_BASE + self.asked
        if cause is None:
            return State.COMPLETED, EXIT_COMPLETED
        return State.FAILED, cause.exit_code or EXIT_FAILED

    def _step(self) -> int:
        return self.run.last_step

    def _expect(self, kind: str) -> dict[str, Any]:
        while True:
            message = self._receive(timeout=None)
            if message is not None and message["kind"] == kind:
                return message

    def _receive(self, timeout: float | None) -> dict[str, Any] | None:
        """The next message of the spawner; None when there is none in time."""
        try:
            return self.link.receive(timeout)
        except EOFError:
            raise RuntimeError(f"the spawner ended with code {self.spawner.wait()}") from None


def main(path: str, attempt: int, listener: int) -> int:
    """Run one attempt of the run at `path` on this host, as a child of the front."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return Node(Run(Path(path)), attempt, listener).supervise()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
