"""metrics.jsonl: the record of a run that every curve, comparison and report is drawn from."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from mgpu.files import FULL, json_text, write_atomic
from mgpu.loggers.base import Logger, Value
from mgpu.runs import Run


class JsonlLogger(Logger):
    """One line a logged step, with every digit of each number.

    A line is handed to the system as soon as it is told, so a kill of the process loses none; it is on disk after
    `close`. Lines that a full disk did not take are kept, and written as soon as it does. NaN and infinities, which JSON
    lacks, are the texts `nan`, `inf` and `-inf`. Evaluations are events of the run and are not repeated here.
    """

    where: ClassVar[Literal["rank0", "front"]] = "rank0"

    def __init__(self) -> None:
        self._handle: int | None = None
        self._unwritten = b""

    def open(self, run: Run, *, resume_step: int) -> None:
        _drop_steps_after(run.metrics_path, resume_step)
        self._handle = os.open(run.metrics_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        if self._handle is None:
            raise ValueError("log of a metrics file that is not open")
        self._unwritten += f"{json_text({'step': step, **values})}\n".encode()
        self._write()

    def _write(self) -> None:
        """As much as can be. What was told is not lost by a full disk, nor is the training."""
        assert self._handle is not None
        try:
            while self._unwritten:
                written = os.write(self._handle, self._unwritten)
                self._unwritten = self._unwritten[written:]
        except OSError as error:
            if error.errno not in FULL:
                raise

    def close(self, outcome: str) -> None:
        if self._handle is None:
            return
        self._write()
        handle, self._handle = self._handle, None
        try:
            if self._unwritten:
                lines = self._unwritten.count(b"\n")
                raise OSError(
                    errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: the last {lines} lines of the metrics are lost"
                )
            os.fsync(handle)
        finally:
            os.close(handle)


def _drop_steps_after(path: Path, step: int) -> None:
    """Leave only whole lines of steps up to `step`; the file is replaced at once or left as it is."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    kept = "".join(f"{line}\n" for line in text.split("\n") if _is_upto(line, step))
    if kept != text:
        write_atomic(path, kept)


def _is_upto(line: str, step: int) -> bool:
    try:
        found = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return False
    return isinstance(found, int) and found <= step
