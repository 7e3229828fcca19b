"""What the processes of a run are called, in `ps` and `top` and to people, and how they ended."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

STORE = "mgpu-store"
WRITER = "mgpu-writer"
_LOADER = "pt_data_worker"
_PR_SET_NAME = 15
_WORDS = {STORE: "store process", WRITER: "checkpoint writer", _LOADER: "loader process"}


def name_process(name: str) -> None:
    """Give this process (its main thread) a name of at most 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def words_for(pid: int) -> str:
    """What process `pid` is: `checkpoint writer`, `loader process` (torch names it), or only `child process`."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        name = ""
    return _WORDS.get(name, "child process")


def ending(code: int) -> str:
    """How a process ended, by its exit code, or by a signal as a negative one."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal: most have no name
        return f"was killed by signal {-code}"
