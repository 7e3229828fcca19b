"""What gradient compression buys on a thin link: a step of ddp on 2 ranks with each `compress`, the link shaped by tc.

Usage: python scripts/bench/compression.py [--mbit 1000] [--rounds 5] [--steps 3] [--width 512]     (as root, on Linux)

Each rank runs in a network namespace of its own; a veth pair joins the two, each end shaped to `--mbit` by a token bucket.
All variants run in the same two processes, in turns. The namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from strategies import Step, seconds_of
from torch import nn

from mgpu.data.seeding import seed_everything
from mgpu.parallel.base import Context, MicroBatch, Window
from mgpu.plan.plan import make_strategy
from mgpu.spec.models import RunSpec
from mgpu.train import Supervised

VARIANTS = ("none", "fp16", "bf16", "powersgd")
ADDRESSES = ("10.123.0.1", "10.123.0.2")
PORT = 29400
DEPTH = 4


def model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(DEPTH)))


def step_with(compress: str, width: int) -> Step:
    """A step as the loop of mgpu takes it."""
    options: dict[str, Any] = {} if compress == "none" else {"compress": compress}
    if compress == "powersgd":
        options["powersgd_start"] = 2
    spec = RunSpec.model_validate({
        "model": "torch.nn:Identity", "data": {"train": "mgpu.zoo:PythonSource"}, "optimizer": "torch.optim:SGD",
        "batch": {"size": 16}, "duration": "1 steps", "parallel": {"strategy": "ddp", **options},
    })  # fmt: skip
    strategy = make_strategy(spec)
    rank, device = dist.get_rank(), torch.device("cpu")
    context = Context(
        rank=rank, world=2, replica=rank, replicas=2, device=device, loss_scale=2.0**-4, reseed=seed_everything,
        devices=(device,),
    )  # fmt: skip
    task = Supervised(nn.MSELoss())
    trainable = strategy.build(strategy.materialize(lambda: model(width), context), task, context)
    optimizer = torch.optim.SGD(trainable.parameters, lr=1e-3)
    draw = torch.Generator().manual_seed(rank)
    batch = tuple(torch.randn(8, width, generator=draw) for _ in range(2))

    def step() -> None:
        strategy.forward_backward(trainable, Window([MicroBatch(0, batch)], (1, 1)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(rank: int, rounds: int, steps: int, width: int) -> None:
    """One rank, in its namespace."""
    torch.set_num_threads(1)
    store = dist.TCPStore(ADDRESSES[0], PORT, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    candidates = {compress: step_with(compress, width) for compress in VARIANTS}
    times: dict[str, list[float]] = {compress: [] for compress in VARIANTS}
    for turn in range(rounds + 1):
        for compress, step in candidates.items():
            seconds = seconds_of(step, steps)
            if turn:  # PowerSGD starts late, and buffers are made in the first turn
                times[compress].append(seconds)
    if rank == 0:
        medians = {compress: statistics.median(found) for compress, found in times.items()}
        for compress, seconds in medians.items():
            print(f"{compress:<10}{seconds * 1e3:9.1f} ms a step  {medians['none'] / seconds:6.2f} x none", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.rank, options.rounds, options.steps, options.width)
        return
    names = [f"mgpu-bench-{os.getpid()}-{rank}" for rank in range(2)]
    megabytes = DEPTH * (options.width + 1) * options.width * 4 / 1e6
    print(f"ddp on 2 ranks, {megabytes:.0f} MB of gradients, {options.mbit} Mbit/s each way")
    ranks = []
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            shape = ["root", "tbf", "rate", f"{options.mbit}mbit", "burst", "256kb", "latency", "100ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape], check=True)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
        for rank, name in enumerate(names):
            command = ["ip", "netns", "exec", name, sys.executable, *sys.argv, "--rank", str(rank)]
            ranks.append(subprocess.Popen(command, env=environment))
        codes = [process.wait() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
