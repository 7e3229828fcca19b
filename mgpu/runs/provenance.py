"""What a run was made on and from: machine, software, git state. Recorded before anything can fail.

Nothing here raises, and nothing imports what it reports on: whatever cannot be found out is null, and `not_found` says why.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import mgpu
from mgpu.files import write_json
from mgpu.runs.run import Run

T = TypeVar("T")

_PACKAGES = (
    *("torch", "numpy", "pydantic", "pyyaml", "rich", "typer", "safetensors", "nvidia-ml-py", "triton"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "torchvision", "torchmetrics", "transformers", "tensorflow", "keras"),
)
_ENVIRONMENT = re.compile(r"(CUDA|NCCL|OMP|SLURM|TORCH)_")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_HIDDEN = "(hidden)"
_GIT_SECONDS = 2.0
_SHOWN_CHANGES = 20


def write_provenance(run: Run, command: list[str], spec_source: str) -> None:
    """Write provenance.json of `run`."""
    write_json(run.provenance_path, collect(command, spec_source))


def collect(command: list[str], spec_source: str) -> dict[str, Any]:
    """All that is worth knowing later, as JSON values. `spec_source` is the path of the spec; its folder's git state
    is recorded beside that of the working directory."""
    search = _Search()
    spec_git, here_git = _git_states(search, Path(spec_source).parent, Path())
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "host": search.or_none("host", socket.gethostname),
        "user": search.or_none("user", getpass.getuser),
        "directory": search.or_none("directory", os.getcwd),
        "command": list(command),
        "spec": spec_source,
        "mgpu": mgpu.__version__,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": {name: search.or_none(name, _version, name) for name in _PACKAGES},
        "platform": search.or_none("platform", platform.platform),
        "kernel": search.or_none("kernel", platform.release),
        "cpu": {
            "count": os.cpu_count(),
            "allowed": search.or_none("allowed CPUs", _allowed_cpus),
            "memory_bytes": search.or_none("memory", _memory_bytes),
        },
        "gpu": search.or_none("GPUs", _gpus, search),
        "git": {"spec": spec_git, "directory": here_git},
        "environment": _environment(),
        "not_found": search.faults,
    }


class _Search:
    """Answers, or null; and why not."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def or_none(self, what: str, find: Callable[..., T], *arguments: object) -> T | None:
        try:
            return find(*arguments)
        except Exception as error:
            # Of any kind: drivers, file systems and user databases fail in their own ways, and no run ends over this page.
            self.faults.append(f"{what}: {type(error).__name__}: {error}")
            return None


def _version(package: str) -> str | None:
    """None for a package that is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _allowed_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _environment() -> dict[str, str]:
    return {
        name: _HIDDEN if _SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if _ENVIRONMENT.match(name)
    }


def _gpus(search: _Search) -> dict[str, Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "devices": [_gpu(search, device) for device in devices],
        }
    finally:
        pynvml.nvmlShutdown()


def _gpu(search: _Search, device: Any) -> dict[str, Any]:
    import pynvml

    memory = search.or_none("memory of a GPU", pynvml.nvmlDeviceGetMemoryInfo, device)
    return {
        "name": search.or_none("name of a GPU", lambda: _text(pynvml.nvmlDeviceGetName(device))),
        "uuid": search.or_none("UUID of a GPU", lambda: _text(pynvml.nvmlDeviceGetUUID(device))),
        "memory_bytes": None if memory is None else int(memory.total),
    }


def _text(value: str | bytes) -> str:
    """Older releases of pynvml answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _git_states(search: _Search, *folders: Path) -> list[dict[str, Any] | None]:
    """The git state of each folder. One call of git a work tree, and one time limit for all of them."""
    deadline = time.monotonic() + _GIT_SECONDS
    known: dict[Path, dict[str, Any] | None] = {}
    states = []
    for folder in folders:
        tree = search.or_none("git", _work_tree, folder)
        if tree is not None and tree not in known:
            known[tree] = search.or_none("git", _git_state, tree, deadline)
        states.append(None if tree is None else known[tree])
    return states


def _work_tree(folder: Path) -> Path | None:
    folder = folder.resolve()
    return next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)


def _git_state(tree: Path, deadline: float) -> dict[str, Any]:
    done = subprocess.run(
        ["git", "-C", str(tree), "status", "--porcelain=v2", "--branch", "--untracked-files=normal"],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=max(deadline - time.monotonic(), 0.01),
        # A status refreshes the index if it may; that would take a lock from under the user's own git commands.
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )
    return {"root": str(tree), **parse_git_status(done.stdout.decode(errors="replace"))}


def parse_git_status(text: str) -> dict[str, Any]:
    """Read `git status --porcelain=v2 --branch` (format: git-status(1), "Porcelain Format Version 2").

    `commit` and `branch` are None before the first commit and on a detached head. `changes` shows the first 20 changed
    files as `<XY> <path>`, `??` for one that git does not know; `changed` and `untracked` count them all.
    """
    head: dict[str, str] = {}
    changes = []
    untracked = 0
    for line in text.splitlines():
        if line.startswith("# branch."):
            name, _, value = line.removeprefix("# branch.").partition(" ")
            head[name] = value
        elif line.startswith("? "):
            untracked += 1
            changes.append(f"?? {line[2:]}")
        elif line[:2] in _FIELDS_BEFORE_PATH:
            fields = line.split(" ", _FIELDS_BEFORE_PATH[line[:2]])
            changes.append(f"{fields[1]} {fields[-1].partition(chr(9))[0]}")
    return {
        "commit": _unless(head.get("oid"), "(initial)"),
        "branch": _unless(head.get("head"), "(detached)"),
        "dirty": bool(changes),
        "changed": len(changes) - untracked,
        "untracked": untracked,
        "changes": changes[:_SHOWN_CHANGES],
    }


_FIELDS_BEFORE_PATH = {"1 ": 8, "2 ": 9, "u ": 10}
"""Ordinary, renamed (its old path follows a tab) and unmerged entries."""


def _unless(value: str | None, absent: str) -> str | None:
    return None if value == absent else value
