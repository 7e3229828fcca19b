"""Whether the process that supervises an attempt still lives, told from what it wrote down when it started."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DEAD_STATES = "ZXx"


def this_process() -> dict[str, Any]:
    """What an `attempt_started` event says of its writer: pid, process_start, host, boot_id.

    `process_start` is in clock ticks since boot; with it a process number that was given out again is not mistaken for
    the first bearer. It and `boot_id` are None where the system has no /proc.
    """
    pid = os.getpid()
    seen = _process(pid)
    return {
        "pid": pid,
        "process_start": None if seen is None else seen[1],
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
    }


def is_gone(supervisor: Mapping[str, Any]) -> bool:
    """Whether the writer of this `attempt_started` event has certainly ended.

    False wherever that cannot be known: on another host, or when the event lacks a field.
    """
    pid, host, boot = supervisor.get("pid"), supervisor.get("host"), supervisor.get("boot_id")
    if host != socket.gethostname():
        return False
    here = _boot_id()
    if isinstance(boot, str) and here is not None and boot != here:
        return True
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return False
    seen = _process(pid)
    if seen is None:
        return not _exists(pid)
    state, start = seen
    return state in _DEAD_STATES or supervisor.get("process_start") not in (None, start)


def _process(pid: int) -> tuple[str, int] | None:
    """State letter and start time (field 22) of /proc/<pid>/stat; None if there is no such file."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # Field 2 is the program's name in parentheses, and may itself hold blanks and parentheses.
    fields = text[text.rfind(b")") + 1 :].split()
    return fields[0].decode(), int(fields[19])


def _exists(pid: int) -> bool:
    """For where /proc shows nothing: no /proc at all, or one that hides other users' processes (hidepid)."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None
