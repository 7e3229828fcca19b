"""The checkpoints of a run as rows: what is there, and is it whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mgpu.checkpoint.folder import CheckpointFolder
from mgpu.checkpoint.manifest import Manifest
from mgpu.errors import DamagedCheckpoint

Health = Literal["whole", "verified", "damaged", "incomplete"]


@dataclass(frozen=True)
class Row:
    """One checkpoint. health: `whole` (all files are there, sizes fit), `verified` (hashes fit too), `damaged`,
    `incomplete` (its writing was cut off, or is going on)."""

    name: str
    path: str
    health: Health
    step: int | None = None
    bytes: int = 0
    created: float | None = None
    metrics: dict[str, float] | None = None
    fault: str = ""


def rows(folder: CheckpointFolder, *, check: bool = False) -> list[Row]:
    """Newest first; with `check`, every file is read and its hash compared."""
    found = [_row(folder.path_of(step), step, check) for step in folder.steps()]
    cut = [Row(name, str(folder.path), "incomplete", int(name.rpartition("-")[2])) for name in folder.incomplete()]
    return sorted([*found, *cut], key=lambda row: -(row.step or 0))


def _seen(path: Path) -> tuple[int, float | None]:
    """Size and time by what lies there, for want of a manifest that can be trusted."""
    try:
        return sum(file.stat().st_size for file in path.iterdir()), path.stat().st_mtime
    except OSError:
        return 0, None


def _row(path: Path, step: int, check: bool) -> Row:
    try:
        manifest = Manifest.read(path)
        manifest.verify(path, contents=check)
    except DamagedCheckpoint as damage:
        return Row(path.name, str(path), "damaged", step, *_seen(path), fault=damage.message)
    return Row(
        path.name,
        str(path),
        "verified" if check else "whole",
        step,
        bytes=manifest.bytes,
        created=manifest.created,
        metrics=dict(manifest.metrics),
    )
