"""What a start costs: from the command to the end of the first all-reduce, against the launchers people use.

Usage: python scripts/bench/launch.py [--ranks 2 4 8] [--repeats 3] [--only start restart heartbeat memory]

`start` runs one script (join the group, one all-reduce, leave) under each launcher in turn, A and B in one run, and takes
the least time to the first all-reduce; beside it the whole command's, and the processor seconds of the whole tree.
`restart` kills a rank of a training on 4 CPU ranks and reads the time from the death to the first step after it.
`heartbeat` is the cost of one beat. `memory` is the unique memory of a rank that has joined its group and done nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """\
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == dist.get_world_size()
if dist.get_rank() == 0:
    with open("reduced", "w") as stream:
        stream.write(str(time.time()))
if len(sys.argv) > 1:
    fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    own = sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as stream:
        stream.write(str(own))
    dist.barrier()
dist.destroy_process_group()
"""
SPAWN = """\
import os, sys, runpy
import torch.multiprocessing as mp
def one(rank, world, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    sys.argv = ["job.py"]
    runpy.run_path("job.py", run_name="__main__")
if __name__ == "__main__":
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    mp.spawn(one, (int(sys.argv[1]), port), nprocs=int(sys.argv[1]))
"""
TASK = """\
import os, signal
from torch import nn
from mgpu.train import Supervised
class Data:
    def __len__(self): return 64
    def __getitem__(self, index):
        import torch
        return torch.full((8,), float(index)), torch.ones(1)
def net(): return nn.Linear(8, 1)
class Task(Supervised):
    def __init__(self):
        super().__init__(nn.MSELoss())
        self.passes = 0
    def loss(self, model, batch):
        self.passes += 1
        if self.passes == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""
SPEC = """\
model: task.py:net
data: {train: task.py:Data}
task: task.py:Task
optimizer: {target: torch.optim:SGD, args: {lr: 0.1}}
batch: {size: 4, micro: 1}
duration: 8 steps
checkpoint: {every: 2 steps, async: false}
restart: {max: 1}
devices: cpu:4
"""


def launchers(ranks: int) -> dict[str, list[str]]:
    """The command of each launcher that is installed."""
    python = sys.executable
    found = {
        "mgpu train": [python, "-m", "mgpu", "train", "job.yaml"],
        "torchrun": [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "job.py"],
        "mp.spawn": [python, "spawn.py", str(ranks)],
    }
    if shutil.which("accelerate"):
        found["accelerate"] = [
            "accelerate", "launch", "--cpu", "--multi_cpu", "--num_processes", str(ranks), "--main_process_port", "0",
            "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "job.py",
        ]  # fmt: skip
    return found


def timed(command: list[str], folder: Path) -> tuple[float, float, float]:
    """Seconds from a command to its first all-reduce (0 where there is none) and to its end, and processor seconds of all."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    reduced = folder / "reduced"
    reduced.unlink(missing_ok=True)
    began_at, began = time.time(), time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment(), check=False)
    wall = time.perf_counter() - began
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    first = float(reduced.read_text()) - began_at if reduced.exists() else 0.0
    return first, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def write_job(folder: Path, ranks: int, argument: str = "") -> None:
    (folder / "job.py").write_text(SCRIPT)
    (folder / "spawn.py").write_text(SPAWN)
    args = f", args: [{argument}]" if argument else ""
    (folder / "job.yaml").write_text(f"script: {{path: job.py{args}}}\ndevices: cpu:{ranks}\n")


def bench_start(folder: Path, all_ranks: list[int], repeats: int) -> None:
    print(f"{'ranks':>5} {'launcher':12} {'first s':>8} {'median':>8} {'of torchrun':>12} {'whole s':>8} {'cpu s':>8}")
    for ranks in all_ranks:
        write_job(folder, ranks)
        seen: dict[str, list[tuple[float, float, float]]] = {}
        for _ in range(repeats):
            for name, command in launchers(ranks).items():
                seen.setdefault(name, []).append(timed(command, folder))
        reference = min(first for first, _, _ in seen["torchrun"])
        for name, found in seen.items():
            first, wall, cpu = (min(values) for values in zip(*found, strict=True))
            middle = statistics.median(one for one, _, _ in found)
            print(
                f"{ranks:5} {name:12} {first:8.2f} {middle:8.2f} {first / reference:12.2f} {wall:8.2f} {cpu:8.2f}",
                flush=True,
            )


def bench_restart(folder: Path, repeats: int) -> None:
    (folder / "task.py").write_text(TASK)
    (folder / "restart.yaml").write_text(SPEC)
    for _ in range(repeats):
        timed([sys.executable, "-m", "mgpu", "train", "restart.yaml"], folder)
        run = max((folder / "runs").glob("restart-*"), key=lambda path: path.stat().st_mtime)
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        ended = next(event["unix"] for event in events if event["event"] == "attempt_ended")
        training = [event for event in events if event["event"] == "training"][1]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        first = next(row["seconds"] for row in rows if row["step"] == training["start_step"] + 1)
        died = max(path.stat().st_mtime for path in (run / "failures" / "1").glob("rank-?.json"))
        print(
            f"restart: from the death (its peers' records) to the verdict {ended - died:.3f} s, "
            f"to the end of the first step {training['unix'] + first - died:.3f} s",
            flush=True,
        )


def bench_heartbeat() -> None:
    from mgpu.runs.heartbeat import Board, Phase
    from mgpu.train import heart

    heart.attach(Board.create(8).heart(3))
    count = 200_000
    began = time.perf_counter()
    for step in range(count):
        heart.beat(step, Phase.TRAINING)
    print(f"heartbeat: {(time.perf_counter() - began) / count * 1e6:.2f} us a step")


def bench_memory(folder: Path, ranks: int) -> None:
    own = folder / "own"
    own.mkdir()
    write_job(folder, ranks, str(own))
    for name, command in launchers(ranks).items():
        if name == "mp.spawn":
            continue
        timed([*command, str(own)] if name == "torchrun" else command, folder)
        sizes = [int(path.read_text()) / 1024 for path in own.iterdir()]
        print(f"memory: {name}: {statistics.mean(sizes):.0f} MB of its own a rank, of {len(sizes)}", flush=True)
        for path in own.iterdir():
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["start", "restart", "heartbeat", "memory"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder = Path(name)
        if "heartbeat" in arguments.only:
            bench_heartbeat()
        if "start" in arguments.only:
            bench_start(folder, arguments.ranks, arguments.repeats)
        if "restart" in arguments.only:
            bench_restart(folder, arguments.repeats)
        if "memory" in arguments.only:
            bench_memory(folder, 4)


if __name__ == "__main__":
    main()
