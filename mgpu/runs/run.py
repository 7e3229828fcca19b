"""One training and its directory: the names of its files, its events, and what they say of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mgpu.files import append_line, read_lines
from mgpu.runs.liveness import is_gone
from mgpu.runs.states import History, State, fold, whole

_TAIL_BYTES = 1 << 16


class Run:
    """A run directory that exists. Holds no state of its own: each question reads the files again.

    Reading never raises: a run whose files are damaged or missing still answers, with what can be read.
    """

    def __init__(self, path: Path | str) -> None:
        # Absolute, so that a process that changes its working directory keeps its run.
        self.path = Path(path).absolute()

    @property
    def id(self) -> str:
        return self.path.name

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def spec_path(self) -> Path:
        return self.path / "spec.yaml"

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def provenance_path(self) -> Path:
        return self.path / "provenance.json"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log_path(self, attempt: int, rank: int) -> Path:
        """Where a rank's output goes. The folder may not exist yet."""
        return self.path / "logs" / str(attempt) / f"rank-{rank}.log"

    def node_log_path(self, attempt: int, node: int) -> Path:
        """Where a node's supervisor writes. The folder may not exist yet."""
        return self.path / "logs" / str(attempt) / f"node-{node}.log"

    def failure_path(self, attempt: int, rank: int) -> Path:
        """Where a rank that fails leaves its error. The folder may not exist yet."""
        return self.path / "failures" / str(attempt) / f"rank-{rank}.json"

    def stacks_path(self, attempt: int, rank: int) -> Path:
        """Where the stacks of a rank that hung are written. The folder may not exist yet."""
        return self.failure_path(attempt, rank).with_suffix(".stacks.txt")

    def collectives_path(self, attempt: int, rank: int) -> Path:
        """Where the flight recorder of a rank that hung is written. The folder may not exist yet."""
        return self.failure_path(attempt, rank).with_suffix(".collectives.json")

    def checkpoint_steps(self) -> list[int]:
        """The steps of the published checkpoints, newest first; whether they are whole is not looked at."""
        found = (re.fullmatch(r"step-(\d+)", path.name) for path in self.checkpoints.glob("step-*"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def last_saved(self) -> int | None:
        """The step of the checkpoint that was written last, which a damaged one of a later step may outrank; None without.

        Whether it is whole is not looked at.
        """
        steps = self.checkpoint_steps()
        saved = (event.get("step") for event in reversed(self.events()) if event.get("event") == "saved")
        return next((step for step in saved if step in steps), next(iter(steps), None))

    def newest_start(self) -> dict[str, Any] | None:
        """The `attempt_started` event of the newest attempt."""
        return next((event for event in reversed(self.events()) if event.get("event") == "attempt_started"), None)

    def record(self, kind: str, /, **values: Any) -> None:
        """Append an event. It is on disk when this returns. Raises OSError where the disk is full, or the run is gone."""
        now = time.time()
        stamp = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event = {"event": kind, "time": stamp, "unix": now, **values}
        # The first one makes the file: a run that is being removed does not come back by its next event.
        append_line(self.events_path, event, durable=True, create=kind == "created")

    def tell(self, kind: str, /, **values: Any) -> None:
        """`record`, for what must go on without: an event that cannot be written is said on stderr, if even that can be."""
        try:
            self.record(kind, **values)
        except OSError as error:
            with contextlib.suppress(OSError):
                print(f"{kind} {values} (no event: {error})", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else starts the run, or removes it, meanwhile; whoever wants to waits. Raises OSError if it is gone."""
        with self.events_path.open("ab") as stream:
            with contextlib.suppress(OSError):  # a file system without locks lets everybody through
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first."""
        try:
            return list(read_lines(self.events_path))
        except OSError:
            return []

    def plan(self) -> dict[str, Any]:
        """What plan.json holds; empty if it cannot be read."""
        try:
            value = json.loads(self.plan_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def history(self) -> History:
        """What the events add up to, in one reading. Whoever asks several of the questions below asks this once."""
        return fold(self.events())

    @property
    def state(self) -> State:
        """LOST if the events say running, but the supervisor that wrote so is gone."""
        history = self.history()
        return State.LOST if history.supervisor is not None and is_gone(history.supervisor) else history.state

    @property
    def attempts(self) -> int:
        """How many attempts were started; they are numbered from 1."""
        return self.history().attempts

    @property
    def last_step(self) -> int:
        """The newest optimizer step known of: by the events, or by the end of metrics.jsonl."""
        return max(self.history().last_step, self._last_logged_step())

    @property
    def exit_code(self) -> int | None:
        """What the newest attempt ended with; None before it has."""
        return self.history().exit_code

    @property
    def created_unix(self) -> float:
        """When the run was created, in seconds since 1970; the directory's own time if the events do not tell."""
        try:
            return float(next(read_lines(self.events_path))["unix"])
        except (OSError, StopIteration, KeyError, TypeError, ValueError, OverflowError):
            pass
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    def _last_logged_step(self) -> int:
        for line in _lines_backwards(self.metrics_path):
            try:
                step = whole(json.loads(line).get("step"), None)
            except (ValueError, AttributeError):
                continue
            if step is not None:
                return step
        return 0


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """The last lines of a file, newest first, as many as the tail holds: metrics.jsonl may be of any length."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL_BYTES))
            block = stream.read()
    except OSError:
        return
    yield from reversed(block.split(b"\n"))
