"""What only Python with torch can tell before the ranks start: do the targets exist, do they take their arguments, is the
data there. Runs in a process of its own, which ends before any rank begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mgpu.checkpoint.weights import find_weights
from mgpu.errors import MgpuError
from mgpu.spec import RunSpec, Target
from mgpu.train.targets import TargetError, build, check

Fault = dict[str, Any]


def preflight(spec: RunSpec, runs_dir: Path | None = None) -> list[Fault]:
    """Every fault found: `key` in the spec, `message`, `hint`. Nothing is trained, no device is touched.

    `runs_dir` is where `init_from` finds runs by their id; without it only paths are looked at.
    """
    if spec.script is not None or spec.data is None:
        return []
    parts: list[tuple[Target | None, tuple[str | int, ...], int]] = [
        (spec.model, ("model",), 0),
        (spec.task, ("task",), 0),
        (spec.optimizer, ("optimizer",), 1),
        (spec.data.collate, ("data", "collate"), 0),
        (spec.data.train, ("data", "train"), 0),
        (spec.data.eval, ("data", "eval"), 0),
        *((target, ("metrics", name), 0) for name, target in spec.metrics.items()),
    ]
    faults = [
        fault
        for target, key, given in parts
        if target
        for fault in _attempt(lambda t=target, k=key, g=given: check(t, k, g), key)
    ]
    if faults:
        return faults
    if spec.init_from is not None and (runs_dir is not None or Path(spec.init_from).exists()):
        init_from = spec.init_from
        faults += _attempt(lambda: find_weights(init_from, runs_dir or Path()), ("init_from",))
    for target, key in ((spec.data.train, ("data", "train")), (spec.data.eval, ("data", "eval"))):
        if target is not None:
            faults += _attempt(lambda t=target, k=key: _open(t, k), key)
    return faults


def _open(target: Target, key: tuple[str | int, ...]) -> None:
    samples = build(target, key=key)
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        raise TargetError(
            key, f"{target.target} has no __len__ and __getitem__: data sets of that kind are not available yet"
        )
    if len(samples) == 0:
        raise TargetError(key, f"{target.target} is empty")


def _attempt(action: Any, key: tuple[str | int, ...]) -> list[Fault]:
    try:
        action()
    except MgpuError as refusal:
        return [{"key": list(getattr(refusal, "key", key)), "message": refusal.message, "hint": refusal.hint}]
    except Exception as error:  # user code may raise anything while it opens its data
        return [{"key": list(key), "message": f"{type(error).__name__}: {error}", "hint": ""}]
    return []
