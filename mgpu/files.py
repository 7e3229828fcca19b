"""Writing files so that a crash at any instant leaves the old content or the new, never a mixture."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a write fails with that may succeed later, once there is room again."""
_TAIL_BYTES = 1 << 16


def has_room(folder: Path) -> bool:
    """Whether its disk takes another block; True where that cannot be known."""
    try:
        return os.statvfs(folder).f_bavail > 0
    except OSError:
        return True


def sync_folder(folder: Path) -> None:
    """Make the names inside `folder` durable (a rename is only on disk after its folder is)."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Make the content of `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, text: str) -> None:
    """Replace the content of `path` durably: temporary file beside it, fsync, rename, fsync of the folder."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
        os.rename(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON, durably."""
    write_atomic(path, json_text(value, indent=2) + "\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """`value` as JSON that any reader takes: NaN and infinities, which JSON lacks, become the texts `nan`, `inf`, `-inf`;
    half of a surrogate pair (a file name that is no UTF-8) stays an escape."""
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def write_all(handle: int, block: bytes) -> None:
    """Write the whole of `block`: on a disk that fills up the first write may end early, and the next one raises."""
    written = os.write(handle, block)
    while written < len(block):
        written += os.write(handle, block[written:])


def append_line(path: Path, value: dict[str, Any], *, durable: bool = False, create: bool = True) -> None:
    """Append `value` as one JSON line; without `create`, FileNotFoundError where there is no file.

    One `write` on an O_APPEND file: lines of several writers never mix.

    A torn last line (a crash in mid-write) is closed off first, so that the new line stays readable.
    """
    line = (json_text(value) + "\n").encode()
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line
        write_all(handle, line)
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a JSONL file; a torn line (crash in mid-write) is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(value, dict):
                yield value


class LineTail:
    """Follows a JSONL file that somebody else appends to: each `read` gives the lines that are new and whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def skip_to_end(self) -> None:
        """Leave out what is there already."""
        if self._path.exists():
            status = self._path.stat()
            self._offset, self._inode = status.st_size, status.st_ino

    def skip_to_last(self) -> None:
        """Leave out what is there already but for the newest line."""
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            self._inode = status.st_ino
            stream.seek(max(0, status.st_size - _TAIL_BYTES))
            begin = stream.tell()
            whole = stream.read().rpartition(b"\n")[0]
            self._offset = begin + whole.rfind(b"\n") + 1

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as stream:
            self._follow(os.fstat(stream.fileno()))
            stream.seek(self._offset)
            block = stream.read()
        whole, newline, _ = block.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        found = []
        for line in whole.split(b"\n"):
            try:
                value = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError):
                continue
            if isinstance(value, dict):
                found.append(value)
        return found

    def _follow(self, status: os.stat_result) -> None:
        """A file that was replaced (a resume drops the lines of steps it trains again) goes on from its end."""
        if self._inode and status.st_ino != self._inode:
            self._offset = status.st_size
        self._inode = status.st_ino
