"""The checkpoints of one run on disk: published by a rename, checked before they are used, removed by a rename too.

A folder without its final name was never a checkpoint. Works without torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu.checkpoint.manifest import DATA, MANIFEST, Manifest
from mgpu.checkpoint.retention import Retention
from mgpu.errors import CheckpointError, DamagedCheckpoint, Refusal
from mgpu.files import sync_folder

_NAME = re.compile(r"step-(\d{8,})")
_TRIES = 10


@dataclass(frozen=True)
class Found:
    """A published checkpoint whose files are what was written. `data` is data.json."""

    step: int
    path: Path
    manifest: Manifest
    data: dict[str, Any]

    @classmethod
    def at(cls, path: Path, *, contents: bool = True) -> Found:
        """The checkpoint in `path`, verified (without `contents`: sizes only). DamagedCheckpoint says what is wrong."""
        manifest = Manifest.read(path)
        manifest.verify(path, contents=contents)
        try:
            data = json.loads((path / DATA).read_text())
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"{DATA} cannot be read ({type(error).__name__})") from error
        if not isinstance(data, dict):
            raise DamagedCheckpoint(f"{DATA} cannot be understood")
        return cls(manifest.step, path, manifest, data)


class CheckpointFolder:
    """`checkpoints/` of one run. Holds no state: each question looks again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def path_of(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def partial_of(self, step: int, token: str) -> Path:
        """Where a checkpoint is put together. `token` is of one save of one attempt, so the folder is always a fresh one."""
        return self.path / f".{self.path_of(step).name}.{token}.partial"

    def steps(self) -> list[int]:
        """Steps of the published checkpoints, newest first."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def incomplete(self) -> list[str]:
        """Names of checkpoints whose writing was cut off, oldest first."""
        return sorted({path.name[1:].partition(".")[0] for path in self.path.glob(".step-*.partial")})

    def newest(self) -> tuple[Found | None, list[str]]:
        """The newest good checkpoint, and what is to be told of those that were passed over for it."""
        for _ in range(_TRIES):
            try:
                return self._newest()
            except CheckpointError:  # retention was at work in between: look again
                continue
        raise CheckpointError(f"the checkpoints in {self.path} change faster than they can be read")

    def _newest(self) -> tuple[Found | None, list[str]]:
        warnings = [f"{name} is incomplete: its writing was cut off; passed over" for name in self.incomplete()]
        for step in self.steps():
            path = self.path_of(step)
            try:
                return self._verified(path), warnings
            except DamagedCheckpoint as damage:
                warnings.append(f"{path.name} is damaged: {damage.message}; passed over")
        return None, warnings

    def find(self, step: int | None = None) -> Found:
        """The checkpoint of `step` (Refusal if there is none), or the newest good one (CheckpointError if none is)."""
        if step is None:
            found, warnings = self.newest()
            if found is None:
                raise CheckpointError(f"no usable checkpoint in {self.path}", hint="; ".join(warnings))
            return found
        if step not in self.steps():
            known = ", ".join(map(str, self.steps())) or "none"
            raise Refusal(f"no checkpoint of step {step} in {self.path}", hint=f"there are: {known}")
        try:
            return self._verified(self.path_of(step))
        except DamagedCheckpoint as damage:
            raise DamagedCheckpoint(f"{self.path_of(step)}: {damage.message}") from damage

    @contextlib.contextmanager
    def kept(self, step: int | None = None) -> Iterator[Found]:
        """`find`, and what is found stays as long as it is read: of a run that saves and removes meanwhile, too."""
        with contextlib.ExitStack() as stack:
            for left in reversed(range(_TRIES)):
                found = self.find(step)
                try:
                    stack.enter_context(self.reading(found.path))
                    break
                except CheckpointError:
                    if step is not None or not left:
                        raise
            yield found

    def _verified(self, path: Path) -> Found:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # what is wrong with the manifest is told below
                stack.enter_context(self.reading(path))
            return Found.at(path)

    def publish(self, partial: Path, step: int) -> Path:
        """Give a complete, synced folder its final name, durably. One of that step that is there already makes way:
        training only comes by a step again after it had passed over its checkpoint."""
        final = self.path_of(step)
        sync_folder(partial)
        if final.exists():
            self._set_aside(final)
        partial.rename(final)
        sync_folder(self.path)
        self._clear("*.removed")
        return final

    def prune(self, retention: Retention, newest: int) -> list[int]:
        """Remove what `retention` does not keep, out of those up to `newest`; returns the steps removed.

        `newest` was published by the caller and is known to be good. Damaged ones go once they are older than all
        `keep` good ones. One that is being read stays until the next time.
        """
        manifests = []
        for step in self.steps():
            with contextlib.suppress(DamagedCheckpoint):
                manifest = Manifest.read(self.path_of(step))
                manifest.verify(self.path_of(step), contents=False)
                if step <= newest:
                    manifests.append(manifest)
        kept = retention.kept(manifests) | {newest}
        good = {manifest.step for manifest in manifests}
        newer = sorted(good, reverse=True)[: retention.keep]
        oldest = newer[-1] if len(newer) == retention.keep else 0
        surplus = [s for s in self.steps() if s <= newest and s not in kept and (s in good or s < oldest)]
        return [step for step in surplus if self.remove(step)]

    def remove(self, step: int) -> bool:
        """Take its name from a checkpoint, then its files; False if somebody is reading it."""
        path = self.path_of(step)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):
                stream = stack.enter_context((path / MANIFEST).open("rb"))
                if not _lock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
                    return False
            self._set_aside(path)
        self._clear("*.removed")
        return True

    def clear_leftovers(self) -> None:
        """Remove what earlier attempts left behind. Only for an attempt that has the run to itself."""
        self._clear("*.removed")
        self._clear("*.partial")

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Keep `path` from being removed as long as it is read; CheckpointError if it just was."""
        try:
            with (path / MANIFEST).open("rb") as stream:
                _lock(stream.fileno(), fcntl.LOCK_SH)
                if os.fstat(stream.fileno()).st_ino != (path / MANIFEST).stat().st_ino:
                    raise FileNotFoundError(path)
                yield
        except FileNotFoundError as error:
            if path.exists():
                raise
            raise CheckpointError(f"{path} was removed while it was being read", hint="try again") from error

    def _set_aside(self, path: Path) -> None:
        gone = path.with_name(f".{path.name}.removed")
        if gone.exists():
            shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)

    def _clear(self, pattern: str) -> None:
        """A writer of a killed attempt may still be in its last system call: what it leaves is cleared the next time."""
        for path in self.path.glob(f".step-{pattern}"):
            shutil.rmtree(path, ignore_errors=True)


def _lock(handle: int, kind: int) -> bool:
    """Lock an open file; False if somebody else has it. A file system without locks lets everybody through."""
    try:
        fcntl.flock(handle, kind)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
