"""Was a process killed for lack of memory? By the counters of its memory cgroup, and by the kernel's log where readable."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_KERNEL_LOG = "/dev/kmsg"
_KILLED = re.compile(r"Killed process (\d+) .*?anon-rss:(\d+)kB")


@dataclass(frozen=True)
class Group:
    """A memory cgroup: kills for lack of memory in it so far, and its limit in bytes (None: none)."""

    kills: int
    limit: int | None


def groups_of(pid: int) -> dict[str, Group]:
    """The memory cgroup of `pid` and those above it, by path; empty where that cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _ROOT / "memory" if controllers else _ROOT
        for depth in [Path(inside.strip("/")), *Path(inside.strip("/")).parents]:
            group = _read(root / depth)
            if group is not None:
                found[str(root / depth)] = group
    return found


def refreshed(paths: Iterable[str]) -> dict[str, Group]:
    """The same groups as they are now."""
    return {path: group for path in paths if (group := _read(Path(path))) is not None}


def killed_by_kernel(pid: int) -> int | None:
    """Bytes in use when the kernel killed `pid` for lack of memory, by its log; None if it says nothing of that."""
    try:
        handle = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    told = None
    try:
        while True:
            try:
                record = os.read(handle, 8192).decode(errors="replace")
            except BrokenPipeError:  # that record was overwritten meanwhile: go on with the next
                continue
            if not record:  # no kernel's log after all, but a file in its place
                return told
            match = _KILLED.search(record)
            if match and int(match[1]) == pid:
                told = int(match[2]) * 1024
    except OSError:
        return told
    finally:
        os.close(handle)


def explanation(pid: int, before: dict[str, Group], peak_bytes: int) -> str:
    """Why SIGKILL may have come to `pid`; empty if nothing points to memory. `before` was read when it started."""
    now = refreshed(before)
    grown = [path for path, group in now.items() if group.kills > before[path].kills]
    used = killed_by_kernel(pid)
    if used is None and not grown:
        return ""
    limits = [group.limit for group in (now[path] for path in grown) if group.limit is not None]
    limit = f" of the {size_text(min(limits))} that its cgroup may use" if limits else ""
    return f"out of memory: the kernel killed it with {size_text(used or peak_bytes)} in use{limit}"


def size_text(count: float) -> str:
    """`1.5 GiB`"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit in ("B", "KiB") else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _read(folder: Path) -> Group | None:
    """Version 2 counts in memory.events and limits by memory.max; version 1 in memory.oom_control and limit_in_bytes."""
    for events, limit in (("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes")):
        try:
            counts = dict(line.split() for line in (folder / events).read_text().splitlines())
            written = (folder / limit).read_text().strip()
        except (OSError, ValueError):
            continue
        # Without a limit, version 1 writes the largest multiple of a page there is.
        number = None if written == "max" or int(written) >= 2**60 else int(written)
        return Group(int(counts.get("oom_kill", 0)), number)
    return None
