"""What another command may ask of a run that is under way: to stop, and where its ranks are."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from mgpu.errors import Refusal
from mgpu.launch.processes import is_alive, send
from mgpu.launch.stacks import Stack, collect
from mgpu.runs import Run, State, shell_reference
from mgpu.runs.heartbeat import Beat, Board
from mgpu.spec import load_spec

_POLL_SECONDS = 0.05
_END_SECONDS = 15.0
"""Beyond the grace, for the last ones to be ended and the end to be written down."""


def stop(run: Run, *, now: bool) -> State:
    """Ask a run to save and stop, or with `now` to end at once, and wait until it has; the state it ended in."""
    pid = _ask(run, signal.SIGINT if now else signal.SIGTERM)
    if now:
        # Two interrupts are what a person in front of it would do; handlers that have not run yet would see but one.
        time.sleep(2 * _POLL_SECONDS)
        send(pid, signal.SIGINT)
    grace = 0 if now else load_spec(run.spec_path).spec.watchdog.grace.seconds
    deadline = time.monotonic() + grace + _END_SECONDS
    while time.monotonic() < deadline:
        if (state := run.state) is not State.RUNNING:
            return state
        time.sleep(_POLL_SECONDS)
    raise Refusal(
        f"{run.id} does not stop: its supervisor is process {pid}",
        hint=f"mgpu stop --now {shell_reference(run)}, or kill {pid}",
    )


def _ask(run: Run, signum: int) -> int:
    """Signal whoever is at work on the run: the command that starts it, and soon after its node. The process asked."""
    while True:
        pid = int(_supervisor(run)["pid"])
        if send(pid, signum):
            return pid


def stacks(run: Run) -> dict[int, Stack]:
    """The stacks of all ranks of a live run, which goes on as before."""
    event = _supervisor(run)["event"]
    if event != "attempt_started":
        what = "is starting: it has no ranks yet" if event == "starting" else "is between two attempts: it has no ranks"
        raise Refusal(f"{run.id} {what}", hint="in a moment it has")
    beats = live_beats(run)
    if not beats:
        raise Refusal(
            f"the ranks of {run.id} cannot be read", hint="only the user who runs it can, on the host it runs on"
        )
    return collect(beats)


def live_beats(run: Run) -> Mapping[int, Beat]:
    """Where each live rank of a run stands; empty where that cannot be read from here, and between attempts."""
    started = run.history().supervisor
    if started is None or started["event"] != "attempt_started" or started.get("host") != socket.gethostname():
        return {}
    board = Board.of(started)
    return {} if board is None else {r: beat for r, beat in board.all().items() if beat.pid and is_alive(beat.pid)}


def _supervisor(run: Run) -> Mapping[str, Any]:
    state = run.state
    supervisor = run.history().supervisor
    if state is not State.RUNNING or supervisor is None:
        raise Refusal(f"{run.id} is not running: {state}", hint=f"see mgpu show {shell_reference(run)}")
    if supervisor.get("host") != socket.gethostname():
        raise Refusal(f"{run.id} runs on {supervisor.get('host')}", hint="ask there")
    return supervisor
