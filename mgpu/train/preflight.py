"""What only Python with torch can tell before the ranks start: do the targets exist, do they take their arguments, is the
data there. Runs in a process of its own, which ends before any rank begins."""

from __future__ import annotations

from typing import Any

import torch

from mgpu.errors import Refusal
from mgpu.parallel.base import Layout, Strategy
from mgpu.plan import Plan, make_strategy
from mgpu.spec import RunSpec, Target
from mgpu.train.targets import TargetError, build, check

Fault = dict[str, Any]


def preflight(spec: RunSpec, plan: Plan) -> list[Fault]:
    """Every fault found: `key` in the spec, `message`, `hint`. Nothing is trained, no device is touched."""
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
    for target, key in ((spec.data.train, ("data", "train")), (spec.data.eval, ("data", "eval"))):
        if target is not None:
            faults += _attempt(lambda t=target, k=key: _open(t, k), key)
    return faults or _attempt(lambda: _lay_out(spec, plan), ("parallel",))


def _lay_out(spec: RunSpec, plan: Plan) -> None:
    """Ask the strategy whether it can split this model, built without memory."""
    strategy = make_strategy(spec)
    if type(strategy).fits is Strategy.fits:
        return
    assert spec.model
    try:
        with torch.device("meta"):
            model = build(spec.model, key=("model",))
    except Exception as error:  # code that reads values while it builds; the ranks build it with values
        print(f"the model cannot be built without memory, so that its split is not checked: {error}")
        return
    strategy.fits(model, Layout(spec, plan.device, len(plan.devices), plan.counts))


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
    except Refusal as refusal:
        return [{"key": list(getattr(refusal, "key", key)), "message": refusal.message, "hint": refusal.hint}]
    except Exception as error:  # user code may raise anything while it opens its data
        return [{"key": list(key), "message": f"{type(error).__name__}: {error}", "hint": ""}]
    return []
