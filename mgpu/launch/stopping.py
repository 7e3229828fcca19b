"""What the node was asked by signals, and whether the front that started it still lives."""

from __future__ import annotations

import os
import select
import signal
import time
from types import FrameType

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def block() -> None:
    """Hold the signals of a stop back, in this process and in those it starts, until `StopRequest.listen`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)


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
        self._counts: dict[tuple[str, int], int] = {}
        self.is_orphaned = False
        """Whether the front is gone: it holds the other end of the lifeline."""

    def listen(self) -> None:
        """Install the handlers. A HUP that was ignored before (nohup) stays ignored."""
        for signum in HEARD:
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._hear)
        unblock()

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self._heard.append(signum)

    def look(self) -> bool:
        """Take in what was heard; whether a stop is asked for.

        A second interrupt makes it urgent. A scheduler sends one signal to every process of a job, so that it comes here
        twice, directly and through the front: the two ways are counted apart.
        """
        self._read_lifeline()
        for way, heard in (("signal", self._heard), ("front", self._passed_on)):
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
