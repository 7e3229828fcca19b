"""The first steps of one training in one layout, recorded by a run of its own and read back."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgpu.errors import MgpuError, Refusal
from mgpu.files import read_lines
from mgpu.inspect.layouts import Layout
from mgpu.runs import RunStore


@dataclass(frozen=True)
class Step:
    """One step, put together from all ranks.

    `micro`: index → (sample ids, hash of the content); `losses`: index → (sum, units) as the task gave them, where each
    rank was asked once a micro batch. `lr`: name → rate. `gradients` and `parameters`: name → digest. `torn`: names that
    ranks held differently.
    """

    number: int
    micro: dict[int, tuple[tuple[int, ...], str]]
    losses: dict[int, tuple[float, float]]
    twice: tuple[int, ...]
    loss: float
    units: float
    grad_norm: float
    lr: dict[str, float]
    gradients: dict[str, list[float]]
    parameters: dict[str, list[float]]
    torn: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """The steps of one layout, or why there are none: `failure`."""

    layout: Layout
    steps: tuple[Step, ...]
    failure: str = ""


def record(spec: Path, overrides: Sequence[str], layout: Layout, steps: int, samples: int, folder: Path) -> Recording:
    """Train the first `steps` in `layout` as a run under `folder`. Refusal where the spec or the layout is refused."""
    changes = [
        *overrides,
        *layout.overrides,
        f"trace={{steps: {steps}, samples: {samples}}}",
        "checkpoint={at_exit: false}",
        "evaluate={}",
        "log={}",
    ]
    command = [sys.executable, "-m", "mgpu", "train", str(spec), "--runs-dir", str(folder)]
    done = subprocess.run(
        [*command, *(f"--set={change}" for change in changes)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == Refusal.exit_code:
        raise Refusal(f"layout {layout}: {done.stderr.strip()}")
    run = RunStore(folder).find("latest")
    found = _read(run.path / "trace")
    if done.returncode:
        ended = [event for event in run.events() if event.get("event") == "attempt_ended"]
        cause = (ended[-1].get("cause") or {}) if ended else {}
        return Recording(layout, found, cause.get("what") or done.stderr.strip().splitlines()[-1])
    if not found:
        raise MgpuError(f"layout {layout}: the run recorded nothing", hint=f"see {run.path}")
    return Recording(layout, found)


def _read(folder: Path) -> tuple[Step, ...]:
    ranks = [list(read_lines(path)) for path in sorted(folder.glob("rank-*.jsonl"), key=_number)]
    whole = min(map(len, ranks), default=0)  # a run that failed may have stopped in the middle of a step
    return tuple(_merge([lines[index] for lines in ranks]) for index in range(whole))


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _merge(lines: list[dict[str, Any]]) -> Step:
    micro: dict[int, tuple[tuple[int, ...], str]] = {}
    losses: dict[int, tuple[float, float]] = {}
    twice = []
    for line in lines:
        for index, ids, content in line["micro"]:
            if micro.setdefault(index, (tuple(ids), content)) != (tuple(ids), content):
                twice.append(index)
        if len(line["losses"]) == len(line["micro"]):
            pairs = zip(line["micro"], line["losses"], strict=True)
            losses.update({index: tuple(answer) for (index, _, _), answer in pairs})
    gradients, _ = _held(lines, "gradients")
    parameters, torn = _held(lines, "parameters")
    first = lines[0]
    return Step(
        number=first["step"], micro=micro, losses=losses, twice=tuple(twice), loss=_float(first["loss"]),
        units=first["units"], grad_norm=_float(first["grad_norm"]), lr=_rates(lines), gradients=gradients,
        parameters=parameters, torn=torn,
    )  # fmt: skip


def _rates(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The learning rate of each parameter; one that ranks see differently has a name more."""
    found: dict[str, float] = {}
    for rank, line in enumerate(lines):
        for name, rate in line["lr"].items():
            if found.setdefault(name, rate) != rate:
                found[f"{name} on rank {rank}"] = rate
    return found


def _held(lines: list[dict[str, Any]], kind: str) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """The digest of each name, and the ranks whose digest is another than that of the first rank that holds it."""
    values: dict[str, list[float]] = {}
    torn: dict[str, list[int]] = {}
    for rank, line in enumerate(lines):
        for name, digest in line[kind].items():
            numbers = [_float(number) for number in digest]
            if values.setdefault(name, numbers) != numbers:
                torn.setdefault(name, []).append(rank)
    return values, torn


def _float(value: float | str) -> float:
    """JSON has no NaN: they were written as text."""
    return float(value)


def distance(first: list[float], second: list[float]) -> float:
    """About the norm of the difference of two tensors, from their digests; infinite where either is not finite."""
    if first == second:
        return 0.0
    squares = [(a - b) ** 2 for a, b in zip(first[1:], second[1:], strict=True)]
    apart = max(abs(first[0] - second[0]), math.sqrt(sum(squares) / len(squares)))
    return apart if math.isfinite(apart) else math.inf
