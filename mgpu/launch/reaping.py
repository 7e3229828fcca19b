"""Ending what an earlier start of a run left behind, which only a kill of all its supervisors at once can do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mgpu.launch.processes import end_all
from mgpu.runs import Run, State

_MARK = b"MGPU_RUN="
_SECONDS = 5.0


def reap_leftovers(run: Run) -> list[str]:
    """Kill the processes of earlier attempts of `run`, and of the lost runs beside it; a line for each run concerned.

    Every process of a run carries the run's path in the environment it was started with. Called before the node starts.
    """
    told = []
    by_run: dict[str, list[int]] = {}
    for pid, path in _marked():
        by_run.setdefault(path, []).append(pid)
    for path, pids in by_run.items():
        found = Run(path)
        is_ours = found == run
        if not is_ours and (found.path.parent != run.path.parent or found.state is not State.LOST):
            continue
        left = end_all(pids, _SECONDS)
        told.append(f"ended {len(pids) - len(left)} processes that an earlier start of {found.id} had left")
    return told


def _marked() -> Iterator[tuple[int, str]]:
    """This user's processes that belong to a run, and its path. This process and its parents are left out."""
    above = _ancestors(os.getpid())
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) in above:
            continue
        try:
            if entry.stat().st_uid != os.getuid():
                continue
            names = Path(entry.path, "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for name in names:
            if name.startswith(_MARK):
                yield int(entry.name), os.fsdecode(name.removeprefix(_MARK))


def _ancestors(pid: int) -> set[int]:
    found = set()
    while pid > 0:
        found.add(pid)
        try:
            text = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            break
        pid = int(text[text.rfind(b")") + 2 :].split()[1])
    return found
