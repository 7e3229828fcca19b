"""What only Python with torch can tell before the ranks start: do the targets exist, do they take their arguments, is the
data there. Runs in a process of its own, which ends before any rank begins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mgpu.checkpoint.weights import find_weights
from mgpu.data.sampling import why_not_layout_free
from mgpu.errors import DataError, MgpuError
from mgpu.parallel._exact import why_not_exact
from mgpu.parallel.base import Layout, Strategy
from mgpu.plan import Plan, make_strategy
from mgpu.spec import RunSpec, Target
from mgpu.train.feeding import is_indexed
from mgpu.train.schedule import learning_rate, total_steps
from mgpu.train.targets import TargetError, build, check

Fault = dict[str, Any]


def preflight(spec: RunSpec, plan: Plan, runs_dir: Path) -> list[Fault]:
    """Every fault found: `key` in the spec, `message`, `hint`. Nothing is trained, no device is touched.

    `runs_dir` is where `init_from` finds runs by their id.
    """
    if spec.script is not None or spec.data is None:
        return []
    parts: list[tuple[Target | None, tuple[str | int, ...], int]] = [
        (spec.model, ("model",), 0),
        (spec.task, ("task",), 0),
        (spec.optimizer, ("optimizer",), 1),
        (spec.data.collate, ("data", "collate"), 0),
        (spec.data.sampler, ("data", "sampler"), 1),
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
    faults = _attempt(lambda: _open_training(spec), ("data", "train"))
    if spec.data.eval is not None:
        target = spec.data.eval
        faults += _attempt(lambda: _open(target, ("data", "eval")), ("data", "eval"))
    if spec.init_from is not None:
        init_from = spec.init_from
        faults += _attempt(lambda: find_weights(init_from, runs_dir), ("init_from",))
    faults += _attempt(lambda: build(spec.task, key=("task",)), ("task",))
    faults += _attempt(lambda: _try_optimizer(spec, plan), ("optimizer",))
    for name, metric in spec.metrics.items():
        faults += _attempt(lambda m=metric, k=("metrics", name): _check_metric(m, k), ("metrics", name))
    return faults or _attempt(lambda: _check_model(spec, plan), ("model",))


def _open_training(spec: RunSpec) -> None:
    assert spec.data
    samples = _open(spec.data.train, ("data", "train"))
    length = len(samples) if hasattr(samples, "__len__") else None
    if spec.data.sharded and is_indexed(samples):
        raise TargetError(("data", "sharded"), "is for iterable data sets; this one is split by mgpu", "leave it out")
    if spec.data.sampler is not None:
        if not is_indexed(samples):
            raise TargetError(("data", "sampler"), "an iterable data set has an order of its own", "leave it out")
        sampler = build(spec.data.sampler, samples, key=("data", "sampler"))
        reason = why_not_layout_free(sampler, spec.seed)
        if reason:
            raise TargetError(("data", "sampler"), reason)
        length = len(sampler)
    try:
        epoch = None if length is None or spec.batch is None else -(-length // spec.batch.size)
        rate = learning_rate(spec, epoch, total_steps(spec, epoch))
    except DataError as error:
        raise TargetError(("schedule",), error.message, error.hint) from error
    if rate.total and rate.warmup > rate.total and spec.trace is None:
        text = f"{spec.schedule.warmup} ({rate.warmup} steps) is longer than the duration, {rate.total} steps"
        raise TargetError(("schedule", "warmup"), text)


def _check_metric(target: Target, key: tuple[str | int, ...]) -> None:
    metric = build(target, key=key)
    if lacking := [name for name in ("update", "compute", "reset") if not callable(getattr(metric, name, None))]:
        raise TargetError(
            key, f"{target.target} has no {', no '.join(lacking)}: a metric has update, compute and reset"
        )


def _try_optimizer(spec: RunSpec, plan: Plan) -> None:
    """Two steps on a small matrix, which is then sharded where the strategy shards: some optimizers want closures or sparse
    gradients, and some have operations that torch's DTensors lack.

    An optimizer of the user's own, or for GPUs only, may be right and yet refuse the matrix: that says nothing.
    """
    assert spec.optimizer
    target, mesh = spec.optimizer, make_strategy(spec).mesh(plan.world)
    if fault := _fault_of(target, torch.nn.Parameter(torch.ones(4, 4))):
        if plan.device == "cpu" and target.target.startswith("torch.optim"):
            raise TargetError(("optimizer",), f"{target.target} cannot make a step: {fault}", "take another optimizer")
        return
    if any(mesh.get(name, 1) > 1 for name in ("shard", "tensor")):
        with _pretended_peer() as peers:
            fault = _fault_of(target, torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), peers, [Shard(0)])))
        if fault:
            text = f"{target.target} cannot make a step on parameters that {plan.strategy} has sharded: {fault}"
            raise TargetError(("optimizer",), text, "take another optimizer, or a strategy that does not shard")


def _fault_of(target: Target, parameter: torch.nn.Parameter) -> str:
    """Why steps on `parameter` fail; empty if they do not."""
    try:
        optimizer = build(target, [parameter], key=("optimizer",))
        for sign in (1.0, -1.0):
            parameter.grad = torch.full_like(parameter, sign)
            optimizer.step()
    except Exception as error:  # code of anybody
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


@contextlib.contextmanager
def _pretended_peer() -> Iterator[DeviceMesh]:
    """A mesh of two ranks, of which the other is only pretended: it answers nothing and is waited for by nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # with it comes the backend `fake`

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        torch.distributed.destroy_process_group()


def _open(target: Target, key: tuple[str | int, ...]) -> Any:
    samples = build(target, key=key)
    if not is_indexed(samples) and not hasattr(samples, "__iter__"):
        raise TargetError(key, f"{target.target} has neither __getitem__ and __len__ nor __iter__")
    if hasattr(samples, "__len__") and len(samples) == 0:
        raise TargetError(key, f"{target.target} is empty")
    return samples


def _check_model(spec: RunSpec, plan: Plan) -> None:
    """Ask whether this model, built without memory, can be laid out as the plan says. The ranks look again."""
    strategy, is_exact = make_strategy(spec), spec.numerics == "exact"
    if spec.model is None or (type(strategy).fits is Strategy.fits and not is_exact):
        return
    try:
        with torch.device("meta"):
            model = build(spec.model, key=("model",))
    except Exception as error:  # code that reads values while it builds; the ranks build it with values
        print(f"the model cannot be built without memory, so that its split is not checked: {error}")
        return
    if is_exact and (reason := why_not_exact(model)):
        raise TargetError(("numerics",), f"the model cannot be exact: {reason}")
    strategy.fits(model, Layout(spec, plan.device, len(plan.devices), plan.counts))


def _attempt(action: Any, key: tuple[str | int, ...]) -> list[Fault]:
    try:
        action()
    except MgpuError as refusal:
        return [{"key": list(getattr(refusal, "key", key)), "message": refusal.message, "hint": refusal.hint}]
    except (Exception, SystemExit) as error:  # user code may raise anything while it opens its data
        return [{"key": list(key), "message": f"{type(error).__name__}: {error}", "hint": ""}]
    return []
