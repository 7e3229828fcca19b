"""A step of each strategy against plain torch code for the same thing: the same model, micro batches, clipping, optimizer.

Usage: python scripts/bench/strategies.py [--ranks 2] [--strategies ddp fsdp tensor pipeline] [--rounds 7] [--steps 5]

Both run in the same processes, in turns, so that other load on the machine meets both; the ratio is of the medians of a
step. Gloo and one thread a rank. Peak memory is that of a rank's process that ran mgpu's step alone.
"""

from __future__ import annotations

import argparse
import resource
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgpu.data.seeding import seed_everything
from mgpu.parallel.base import Context, MicroBatch, Window
from mgpu.plan.plan import make_strategy
from mgpu.spec.models import RunSpec
from mgpu.train import Supervised
from mgpu.zoo import GPT

STRATEGIES = ("ddp", "fsdp", "tensor", "pipeline")
MICRO, COUNT, LENGTH = 4, 4, 64
Step = Callable[[], None]


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=4, width=192, context=LENGTH, tie=False)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    tokens = torch.randint(0, 256, (COUNT, MICRO, LENGTH + 1), generator=draw)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens]


def mgpu_step(name: str) -> Step:
    """A step as the loop of mgpu takes it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = {"train": "mgpu.zoo:PythonSource"}
    spec = RunSpec.model_validate({
        "model": "mgpu.zoo:GPT", "data": data, "optimizer": "torch.optim:AdamW", "batch": {"size": 16},
        "duration": "1 steps", "parallel": {"strategy": name},
    })  # fmt: skip
    strategy = make_strategy(spec)
    replicas = strategy.replicas(world)
    scale = 2.0 ** -(COUNT * MICRO * replicas - 1).bit_length()
    device = torch.device("cpu")
    context = Context(
        rank=rank, world=world, replica=rank * replicas // world, replicas=replicas, device=device, loss_scale=scale,
        reseed=seed_everything, devices=(device,),
    )  # fmt: skip
    task = Supervised(nn.CrossEntropyLoss(), unit="token")
    trainable = strategy.build(strategy.materialize(model, context), task, context)
    optimizer = torch.optim.AdamW(trainable.parameters, lr=1e-3)
    parts = batches()

    def step() -> None:
        micro_batches = [MicroBatch(index, part) for index, part in enumerate(parts)]
        strategy.forward_backward(trainable, Window(micro_batches, (COUNT,) * replicas))
        strategy.clip(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def loss_of(module: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(module(part[0]).flatten(0, 1), part[1].flatten()) / COUNT


def finish(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def plain_ddp() -> Step:
    """As torch's tutorial writes it."""
    import contextlib

    ddp = nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    parts = batches()

    def step() -> None:
        for index, part in enumerate(parts):
            with contextlib.nullcontext() if index == COUNT - 1 else ddp.no_sync():
                loss_of(ddp, part).backward()
        finish(list(ddp.parameters()), optimizer)

    return step


def plain_fsdp() -> Step:
    """Each layer and the rest sharded, gradients reduced with the last micro batch."""
    from torch.distributed.fsdp import fully_shard

    sharded: Any = model()
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    parts = batches()

    def step() -> None:
        for index, part in enumerate(parts):
            sharded.set_requires_gradient_sync(index == COUNT - 1)
            loss_of(sharded, part).backward()
        finish(list(sharded.parameters()), optimizer)

    return step


def plain_tensor() -> Step:
    """The same plan, by hand; clipping group by group, as torch does not mix DTensors with plain tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    split = model()
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate()),
    }  # fmt: skip
    for layer in range(4):
        plan |= {f"layers.{layer}.attention.{part}": ColwiseParallel() for part in "qkv"}
        plan |= {f"layers.{layer}.attention.o": RowwiseParallel(), f"layers.{layer}.mlp.up": ColwiseParallel()}
        plan |= {f"layers.{layer}.mlp.down": RowwiseParallel()}
    parallelize_module(split, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    kinds: list[list[nn.Parameter]] = [[], []]
    for parameter in split.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds], lr=1e-3)
    parts = batches()

    def step() -> None:
        for part in parts:
            loss_of(split, part).backward()
        for kind in kinds:
            nn.utils.clip_grad_norm_(kind, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class Part(nn.Module):
    """One stage of the model, cut by hand."""

    def __init__(self, whole: GPT, rank: int, world: int) -> None:
        super().__init__()
        each = 4 // world
        self.first, self.last = rank == 0, rank == world - 1
        self.layers = whole.layers[rank * each : (rank + 1) * each]
        self.tokens, self.positions = (whole.tokens, whole.positions) if self.first else (None, None)
        self.norm, self.head = (whole.norm, whole.head) if self.last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def plain_pipeline() -> Step:
    """1F1B over the same stages; clipping by the norm of the whole gradient, as in one process."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    part = Part(model(), rank, world)
    stage = PipelineStage(part, rank, world, torch.device("cpu"))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten()) / COUNT

    schedule = Schedule1F1B(stage, COUNT, loss_fn=loss, scale_grads=False)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches(), strict=True))

    def step() -> None:
        schedule.step(*((inputs,) if rank == 0 else ()), target=targets if rank == world - 1 else None)
        gradients = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
        square = nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(part.parameters(), 1.0, square.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


PLAIN = {"ddp": plain_ddp, "fsdp": plain_fsdp, "tensor": plain_tensor, "pipeline": plain_pipeline}


def seconds_of(step: Step, steps: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - begin) / steps


def measure(rank: int, world: int, port: int, name: str, rounds: int, steps: int, answers: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    candidates = {"mgpu": mgpu_step(name), "plain": PLAIN[name]()} if rounds else {"mgpu": mgpu_step(name)}
    times: dict[str, list[float]] = {key: [] for key in candidates}
    for turn in range(rounds + 1):
        for key, step in candidates.items():
            seconds = seconds_of(step, steps)
            if turn:  # the first turn warms up
                times[key].append(seconds)
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        answers.put(({key: statistics.median(values) for key, values in times.items() if values}, float(peak)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'strategy':10} {'ranks':>5} {'mgpu ms':>9} {'plain ms':>9} {'throughput':>11} {'peak MB':>8}")
    for world in arguments.ranks:
        for name in arguments.strategies:
            times, _ = in_processes(world, name, arguments.rounds, arguments.steps)
            _, alone = in_processes(world, name, 0, arguments.steps)
            ratio = times["plain"] / times["mgpu"]
            print(
                f"{name:10} {world:5} {times['mgpu'] * 1e3:9.1f} {times['plain'] * 1e3:9.1f} {ratio:11.3f} {alone:8.0f}",
                flush=True,
            )


def in_processes(world: int, name: str, rounds: int, steps: int) -> tuple[dict[str, float], float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers: Any = mp.get_context("spawn").Queue()
    started = mp.spawn(measure, (world, port, name, rounds, steps, answers), world, join=False)
    assert started is not None
    found: tuple[dict[str, float], float] = answers.get(timeout=600)
    while not started.join():
        pass
    return found


if __name__ == "__main__":
    main()
