"""The node's hold on its spawner: start it, ask it, hear of it, end it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from mgpu.errors import MgpuError
from mgpu.launch import stopping
from mgpu.launch.link import Link, Message
from mgpu.runs.naming import ending


class SpawnerGone(MgpuError):
    """The process that ranks are forked from has ended by itself, or was killed."""


class SpawnerHandle:
    """A spawner that is importing torch already."""

    def __init__(self, listener: int, board: int, *, is_script: bool, threads: int) -> None:
        self.while_waiting: Callable[[], None] = lambda: None
        """Called ten times a second while an answer is awaited; may raise to give the waiting up."""
        self.when_asked: Callable[[int], None] = lambda signum: None
        """Called with a signal of a stop that the spawner was sent."""
        self.ended_stores: dict[int, int] = {}
        """How a process that held the run's store has ended, by its id: an exit code, or a signal as a negative one."""
        mine, theirs = socket.socketpair()
        self._link = Link(mine)
        self._waiting: list[Message] = []
        stopping.block()  # until the spawner listens itself, a signal waits for it
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mgpu.launch.spawner", str(theirs.fileno()), str(listener), str(board),
             "script" if is_script else "train"],
            pass_fds=(theirs.fileno(), listener, board),
            stdin=subprocess.DEVNULL,
            # Read when torch is loaded, so it cannot wait for the ranks.
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        stopping.unblock()
        theirs.close()
        os.close(listener)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until_ready(self) -> None:
        """Until torch is imported."""
        self._expect("ready")

    def check(self, run: str) -> list[dict[str, Any]]:
        """The preflight's faults."""
        self._link.send(do="check", run=run)
        faults: list[dict[str, Any]] = self._expect("checked")["faults"]
        return faults

    def start(self, run: str, attempt: int, world: int) -> tuple[list[int], int, int]:
        """Fork the ranks; their process ids, the port of the store, and the id of the process that holds it."""
        self._link.send(do="start", run=run, attempt=attempt, world=world)
        started = self._expect("started")
        return started["pids"], started["port"], started["store"]

    def ask_collectives(self) -> None:
        """Have every live rank write its flight recorder."""
        self._link.send(do="collectives")

    def next_exit(self, timeout: float) -> Message | None:
        """The next `exited` message: rank, code, seen_ns, peak_bytes. None when there is none in time."""
        if self._waiting:
            return self._waiting.pop(0)
        message = self._receive(timeout)
        return message if message is not None and message["kind"] == "exited" else None

    def close(self) -> None:
        """End it. What it had forked must have been ended before."""
        self.process.kill()
        self.process.wait()

    def _expect(self, kind: str) -> Message:
        while True:
            message = self._receive(0.1)
            if message is None:
                self.while_waiting()
            elif message["kind"] == kind:
                return message
            elif message["kind"] == "exited":
                self._waiting.append(message)

    def _receive(self, timeout: float | None) -> Message | None:
        try:
            message = self._link.receive(timeout)
        except (EOFError, ConnectionError):
            code = self.process.wait()
            raise SpawnerGone(f"the process that ranks are forked from {ending(code)}") from None
        if message is not None and message["kind"] == "asked":
            self.when_asked(message["signum"])
            return None
        if message is not None and message["kind"] == "store ended":
            self.ended_stores[message["pid"]] = message["code"]
            return None
        return message
