"""Kill a training at random instants around its saves, and see that nothing is lost.

    python scripts/soak/kill_matrix.py --kills 200 --seed 0

Two ranks (the very function that `mgpu node` starts, forked from a process that has imported torch) train a small model
that saves after every step. All ranks get SIGKILL at a random instant; then the run is resumed, and killed again, until
it is complete; then the next run begins. For every kill: the resume starts no earlier than the newest checkpoint that was
published before the kill. For every run: its last checkpoint has the same bits as that of a run nobody killed, each
step is logged once with the same loss, and no process or partial folder is left (memory goes with the processes: it has
no name).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from mgpu.checkpoint import CheckpointFolder, Manifest
from mgpu.launch.spawner import _store
from mgpu.plan import listen, make_plan
from mgpu.runs import Run, RunStore
from mgpu.runs.heartbeat import Board
from mgpu.spec import load_spec
from mgpu.topology import Topology
from mgpu.train.rank import Start, run_rank

WORLD = 2
PR_SET_CHILD_SUBREAPER = 36
DEADLINE_SECONDS = 120
USER_CODE = """
import torch
from torch import nn

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        x = torch.randn(8)
        return x, x.sum().reshape(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))
    def forward(self, x):
        return self.layers(x)
"""
SPEC = """
model: user_code.py:Net
data: {train: user_code.py:Data}
task: {target: mgpu.train:Supervised, args: {loss: {target: torch.nn:MSELoss}}}
optimizer: {target: torch.optim:AdamW, args: {lr: 1e-2}}
batch: {size: 8, micro: 2}
duration: 24 steps
devices: cpu:2
checkpoint: {every: 1 steps, keep: 2}
"""


@dataclass
class Bench:
    """Runs of one spec in one folder, and the store that their ranks meet in."""

    folder: Path
    port: int
    store: int
    runs: int = 0
    kills: int = 0
    resumed_from: list[int] = field(default_factory=list)

    def new_run(self) -> Run:
        loaded = load_spec(self.folder / "spec.yaml")
        plan = make_plan(loaded.spec, Topology.detect())
        assert plan.world == WORLD
        self.runs += 1
        return RunStore(self.folder / "runs").create(f"kill{self.runs}", loaded.dump(), plan.to_json(), sys.argv)

    def attempt(self, run: Run, number: int, kill_after: float | None) -> bool:
        """One attempt; killed `kill_after` seconds after its training began. True if it came to its end."""
        run.record("attempt_started", attempt=number)
        board, (requests, asking) = Board.create(WORLD), os.pipe()
        start = Start(str(run.path), self.runs * 1000 + number, self.port, board.descriptor, requests)
        ranks = mp.start_processes(run_rank, args=(start,), nprocs=WORLD, join=False, start_method="fork")
        try:
            if kill_after is not None:
                wait_for(lambda: any(e["event"] == "training" for e in after_last(run, "attempt_started")))
                time.sleep(kill_after)
                for pid in ranks.pids():
                    os.kill(pid, signal.SIGKILL)
            for process in ranks.processes:
                process.join(DEADLINE_SECONDS)
            codes = [process.exitcode for process in ranks.processes]
        finally:
            for process in ranks.processes:
                process.kill()
            for descriptor in (board.descriptor, requests, asking):
                os.close(descriptor)
        assert None not in codes, f"a rank hangs: {codes}"
        if kill_after is None or -signal.SIGKILL not in codes:
            assert codes == [0] * WORLD, (codes, log_of(run, start.attempt))
            return True
        return False


def log_of(run: Run, attempt: int) -> str:
    return "\n".join(run.log_path(attempt, rank).read_text()[-2000:] for rank in range(WORLD))


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.002)


def after_last(run: Run, kind: str) -> list[dict[str, Any]]:
    events = run.events()
    last = max(index for index, event in enumerate(events) if event["event"] == kind)
    return events[last:]


def published(run: Run) -> int:
    return max(CheckpointFolder(run.checkpoints).steps(), default=0)


def result(run: Run) -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """Bits of the last checkpoint, and every logged step with its loss."""
    folder = CheckpointFolder(run.checkpoints)
    newest, warnings = folder.newest()
    assert newest is not None and not warnings, warnings
    assert Manifest.read(newest.path).position == newest.data["position"]
    shards = {name: record.sha256 for name, record in newest.manifest.files.items() if name.endswith(".distcp")}
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    return {"position": newest.data["position"], **shards}, [(line["step"], line["loss"]) for line in lines]


def plan_kills(rng: random.Random, seconds: float) -> Iterator[float]:
    """Instants after the beginning of training: evenly over all of it, and a little beyond."""
    while True:
        yield rng.uniform(0, 1.05 * seconds)


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Not `TemporaryDirectory`: a forked rank runs what is registered for the end of its process, which would remove it."""
    folder = tempfile.mkdtemp(prefix="mgpu-kills-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    adopt_orphans()
    listener = listen(0)
    port = int(socket.socket(fileno=os.dup(listener.fileno())).getsockname()[1])
    store = mp.get_context("fork").Process(target=_store, args=(os.dup(listener.fileno()), port), daemon=True)
    store.start()
    listener.close()
    try:
        with temporary_folder() as folder:
            soak(Bench(Path(folder), port, store.pid or 0), options.kills, random.Random(options.seed))
    finally:
        store.kill()


def soak(bench: Bench, kills: int, rng: random.Random) -> None:
    (bench.folder / "user_code.py").write_text(USER_CODE)
    (bench.folder / "spec.yaml").write_text(SPEC)
    reference = bench.new_run()
    assert bench.attempt(reference, 1, None)
    events = {event["event"]: event["unix"] for event in reference.events()}
    seconds = events["completed"] - events["training"]
    expected = result(reference)
    instants = plan_kills(rng, seconds)
    while bench.kills < kills:
        run, number, before = bench.new_run(), 0, 0
        while True:
            number += 1
            done = bench.attempt(run, number, next(instants) if bench.kills < kills else None)
            started = [e["start_step"] for e in after_last(run, "attempt_started") if e["event"] == "training"]
            assert started == [started[0]] and started[0] >= before, (run, started, before)
            if done:
                break
            bench.kills += 1
            bench.resumed_from.append(started[0])
            before = published(run)
        assert result(run) == expected, (run, result(run), expected)
        assert not list(run.checkpoints.glob(".*")), list(run.checkpoints.iterdir())
    wait_for(lambda: not left_behind(bench.store))
    print(
        f"{bench.kills} kills over {bench.runs - 1} runs of {seconds:.2f} s: every resume began at the newest published "
        f"checkpoint or later, every run ended with the bits of the one that was not killed"
    )


def left_behind(store: int) -> list[str]:
    """Living children of this process but the store; orphans of killed ranks are among them, as `adopt_orphans` was called."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == store:
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == os.getpid() and state not in "ZX":
            found.append(entry.name)
    return found


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


if __name__ == "__main__":
    main()
