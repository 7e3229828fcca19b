"""What Linux tells and lets do about processes: who descends from whom, in which state, and ending all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_DEAD = "ZXx"
STOPPED = ("T", "t")
"""The states of a process that a signal or a debugger has stopped."""
_POLL_SECONDS = 0.005


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, whatever session or group they are in."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def state_of(pid: int) -> str:
    """The letter of /proc/<pid>/stat: R running, S sleeping, D waiting for a disk, T stopped, Z ended; empty if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return chr(text[text.rfind(b")") + 2])


def is_alive(pid: int) -> bool:
    """Whether it runs or could: an ended process that nobody has waited for is not alive."""
    return state_of(pid) not in ("", *_DEAD)


def children_of(pid: int) -> list[int]:
    """The children of all threads of `pid`."""
    found: list[int] = []
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            found += map(int, Path(task.path, "children").read_text().split())
    except OSError:
        return found
    return found


def descendants_of(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = children_of(waiting.pop())
        found += children
        waiting += children
    return found


def send(pid: int, signum: int) -> bool:
    """Signal one process; False if it is gone."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def send_to_main_thread(pid: int, signum: int) -> None:
    """Signal the main thread, before it runs another instruction if it is stopped; a signal to the process may be taken
    by any thread, while the main one goes on. To the process where the C library has no tgkill. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "tgkill"):
        os.kill(pid, signum)
    elif libc.tgkill(pid, pid, signum):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def end_groups(groups: Iterable[int], signum: int = signal.SIGKILL) -> None:
    """Signal whole process groups, their leaders dead or not."""
    for group in groups:
        try:
            os.killpg(group, signum)
        except (ProcessLookupError, PermissionError):
            continue


def end_all(pids: Iterable[int], seconds: float) -> list[int]:
    """Kill processes and wait for their end; those that are still there after `seconds`."""
    living = [pid for pid in pids if send(pid, signal.SIGKILL)]
    deadline = time.monotonic() + seconds
    while living and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        living = [pid for pid in living if is_alive(pid)]
    return living


def end_tree(pid: int, seconds: float = 2.0, keep: Iterable[int] = ()) -> None:
    """Kill everything that descends from `pid`, itself excepted, and take in what has become its child.

    Again and again: what is killed may have left children of its own.
    """
    kept = set(keep)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        living = [found for found in descendants_of(pid) if found not in kept and is_alive(found)]
        if not living:
            return
        end_all(living, min(0.5, seconds))
