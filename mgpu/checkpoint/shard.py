"""One rank's part of a checkpoint as a file that stock torch reads: pieces one after another, each as torch.save writes it."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mgpu.checkpoint.layout import Layout
from mgpu.checkpoint.snapshot import SharedMemory

_BLOCK = 1 << 22


@dataclass(frozen=True)
class Part:
    """What a rank has written: the file, and where in it each of its pieces lies (start and length, in bytes).

    `error` says why there is no such file; `file` is empty for a rank that has nothing to write. `plain` are the values for
    data.json that only this rank has.
    """

    rank: int
    step: int
    file: str = ""
    size: int = 0
    sha256: str = ""
    places: tuple[tuple[int, int], ...] = ()
    plain: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class HashedFile:
    """A new file that is hashed while it is written. On disk once `finish` returns."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("xb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, block: bytes | memoryview) -> int:
        view = memoryview(block).cast("B")
        for start in range(0, len(view), _BLOCK):
            part = view[start : start + _BLOCK]
            try:
                self._stream.write(part)
            except OSError as error:
                self.error = error  # torch.save, in between, may put an error of its own in its place
                raise
            self._digest.update(part)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing to do before the end; torch.save asks for it."""

    def finish(self) -> str:
        """Make the file durable and close it; its SHA-256."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._digest.hexdigest()


def write_part(folder: Path, rank: int, step: int, layout: Layout, memory: SharedMemory) -> Part:
    """Write the pieces of `layout` out of `memory`; an error of the system becomes the part's `error`."""
    path = folder / f"__{rank}_0.distcp"
    # Our own hash covers the file; a second checksum inside would only take time.
    torch.serialization.set_crc32_options(False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not layout.pieces:
            return Part(rank, step)
        file = HashedFile(path)
        places = []
        for piece in layout.pieces:
            start = file.size
            torch.save(memory.view(piece), file)  # type: ignore[arg-type]
            places.append((start, file.size - start))
        return Part(rank, step, path.name, file.size, file.finish(), tuple(places))
    except (OSError, RuntimeError) as error:
        return Part(rank, step, error=explain(error, path, layout.bytes))


def explain(error: BaseException, path: Path, needed: int = 0) -> str:
    """An error of writing as one line: what, where, and for a full disk the bytes needed and free."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return f"{type(error).__name__}: {error}: {path}"
    told = f"{cause.strerror or cause}: {path}"
    if cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        told += f" ({needed} bytes needed, {_free(path)} free)"
    return told


def _free(path: Path) -> int:
    for folder in path.parents:
        if folder.exists():
            status = os.statvfs(folder)
            return status.f_bavail * status.f_frsize
    return 0


def first_error(parts: Iterable[Part]) -> str:
    """The error of the lowest rank that has one, with the rank; nothing where all went well."""
    return next((f"rank {part.rank}: {part.error}" for part in parts if part.error), "")
