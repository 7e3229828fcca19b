"""Helper processes (loaders, writers, the store): they die with the process they help, and leave the stopping to it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

from mgpu.runs.requests import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process once the thread that made it is gone. `parent` is who that was, where known."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it ended before the line above
        os._exit(os.EX_UNAVAILABLE)


@contextlib.contextmanager
def stops_held_back() -> Iterator[None]:
    """Signals of a stop wait, and in helpers forked meanwhile until they are deaf to them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def be_deaf_to_stops() -> None:
    """Ignore the signals of a stop, also those held back until now: whoever is helped may need this process to stop."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
