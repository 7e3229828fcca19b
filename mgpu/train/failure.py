"""A rank's error as the judge reads it: failures/<attempt>/rank-<r>.json.

The judge must know whether an error is a rank's own or only the echo of a peer's end. That is told by where it was
raised, never by its text: a collective that fails raises from torch.distributed, from DDP, or from the backward pass that
runs DDP's hooks.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mgpu import frames
from mgpu.errors import MgpuError
from mgpu.files import write_json
from mgpu.frames import Frame

_RERAISED = f"{Path(torch.__file__).parent}/_utils.py"
_DEATH_OF_A_LOADER = f"{Path(torch.__file__).parent}/utils/data/_utils/signal_handling.py"
_LONGEST = 20_000


def write_failure(
    path: Path, error: BaseException, *, rank: int, step: int, phase: str, monotonic_ns: int, code: int = 1
) -> bool:
    """Record `error`, which reached the rank's end at `monotonic_ns` while it worked on `step`; whether it is an echo."""
    first = _origin(error)
    echo = _is_of_collective(first)
    told = first if _is_of_collective(error) and not echo else error
    kind, message, place = _described(told)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "rank": rank,
            "type": kind,
            "message": message[:_LONGEST],
            "causes": [text[:_LONGEST] for text in _causes(told)],
            "place": place,
            "echo": echo,
            "exit_code": code,
            "deterministic": isinstance(told, ImportError | SyntaxError | MgpuError),
            "loader": frames.is_in_loader(_stack(told)),
            "step": step,
            "phase": phase,
            "monotonic_ns": monotonic_ns,
            "last_collective": last_collective(),
            "traceback": "".join(traceback.format_exception(error)),
        },
    )
    return echo


def last_collective() -> dict[str, Any] | None:
    """The newest entry of torch's flight recorder: number, name, sizes. None where nothing is recorded."""
    entries = collectives()
    if not entries:
        return None
    last = entries[-1]
    return {
        "number": last.get("collective_seq_id"),
        "name": last.get("profiling_name"),
        "sizes": last.get("input_sizes"),
    }


def collectives() -> list[dict[str, Any]]:
    """All entries of the flight recorder, oldest first."""
    if not dist.is_available():
        return []
    from torch._C import _distributed_c10d as c10d

    recorded = getattr(c10d, "_dump_fr_trace_json", None)
    if recorded is None:
        return []
    found: list[dict[str, Any]] = json.loads(recorded(True, False)).get("entries", [])
    return found


def _origin(error: BaseException) -> BaseException:
    """The error that the chain of `raise … from` and of errors during handling began with."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None:
            return error
        error = before
    return error


def _causes(error: BaseException) -> list[str]:
    """The errors that `error` was raised from, the first one last, and those that it is a group of."""
    found, seen = [], set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        if inner is not error:
            found.append(_text(inner))
        if isinstance(inner, BaseExceptionGroup):
            found += [_text(part) for part in inner.exceptions]
        inner = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
    return found


def _text(error: BaseException) -> str:
    kind, message, place = _described(error)
    told = f"{kind}: {message}" if message else kind
    return f"{told}, at {place}" if place else told


def _is_of_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and frames.is_in_collective(_stack(error))


def _described(error: BaseException) -> tuple[str, str, str]:
    """Type, text and place (empty where it says nothing). An error of a loader process arrives with its traceback as text:
    its own end counts."""
    kind, message = type(error).__name__, str(traceback.TracebackException.from_exception(error))
    if isinstance(error, MgpuError):
        message = "; ".join(error.lines())
    stack = _stack(error)
    if stack and stack[-1].file == _RERAISED:
        stack = frames.parse(message) or stack
        message = message.rstrip().rpartition("\n")[2].removeprefix(f"{kind}: ")
    if stack and stack[-1].file == _DEATH_OF_A_LOADER:  # raised by a signal handler, wherever Python just was
        return kind, message, ""
    return kind, message, frames.place(stack)


def _stack(error: BaseException) -> list[Frame]:
    found = traceback.extract_tb(error.__traceback__)
    return [Frame(frame.filename, frame.lineno or 0, frame.name) for frame in found]
