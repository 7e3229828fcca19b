"""Signals that ask a run to stop: the front hands them on, the node makes a request of them."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType

from mgpu.runs.requests import STOP_SIGNALS


def block() -> None:
    """Hold the signals of a stop back, in this process and in those it starts, until `StopRequest.listen`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def install(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Have `handler` take the signals of a stop. A HUP that was ignored before (nohup) stays ignored."""
    for signum in STOP_SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, handler)


def forget() -> None:
    """Back to what the signals of a stop do by default; an interrupt does nothing: it is for the front."""
    install(signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class SignalRelay:
    """The front's side: hears signals from its first moment on, and hands them to the node once there is one."""

    def __init__(self) -> None:
        self._kept: list[int] = []
        self._hand_on: Callable[[int], None] = self._kept.append

    def listen(self) -> None:
        """Install the handlers."""
        install(lambda signum, frame: self._hand_on(signum))

    def connect(self, hand_on: Callable[[int], None]) -> None:
        """Hand on what was heard so far, and all that comes."""
        self._hand_on = hand_on
        while self._kept:
            hand_on(self._kept.pop(0))


class StopRequest:
    """The first request to stop, and whether it was made urgent. `preempt` is the signal that means a preemption."""

    def __init__(self, lifeline: int | None = None) -> None:
        self.preempt = signal.SIGUSR1
        self.signum: int | None = None
        self.asked_at = 0.0
        self.is_urgent = False
        self._heard: list[int] = []
        self._lifeline = lifeline
        self._passed_on: list[int] = []
        self._of_spawner: list[int] = []
        self._counts: dict[tuple[str, int], int] = {}
        self.is_orphaned = False
        """Whether the front is gone: it holds the other end of the lifeline."""

    def listen(self) -> None:
        """Install the handlers."""
        install(self._hear)
        unblock()

    def hear_of(self, signum: int) -> None:
        """The spawner was sent `signum`. It may have come to the node as well: a way of its own."""
        self._of_spawner.append(signum)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self._heard.append(signum)

    def look(self) -> bool:
        """Take in what was heard; whether a stop is asked for.

        A second interrupt makes it urgent. A scheduler sends one signal to every process of a job, so that it comes here
        three times, directly, through the front and through the spawner: the ways are counted apart.
        """
        self._read_lifeline()
        for way, heard in (("signal", self._heard), ("front", self._passed_on), ("spawner", self._of_spawner)):
            while heard:
                self._take(way, heard.pop(0))
        return self.signum is not None

    def _take(self, way: str, signum: int) -> None:
        if signum in (signal.SIGUSR1, signal.SIGUSR2) and signum != self.preempt:
            return
        if self.signum is None:
            self.signum, self.asked_at = signum, time.monotonic()
        self._counts[way, signum] = self._counts.get((way, signum), 0) + 1
        self.is_urgent = self.is_urgent or self._counts.get((way, signal.SIGINT), 0) > 1

    @property
    def is_preemption(self) -> bool:
        return self.signum == self.preempt

    def _read_lifeline(self) -> None:
        """The front writes the number of each signal that it was sent; its end closes the pipe."""
        while self._lifeline is not None and select.select([self._lifeline], [], [], 0)[0]:
            told = os.read(self._lifeline, 64)
            self._passed_on += told
            if not told:
                self.is_orphaned = True
                return
