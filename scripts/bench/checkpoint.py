"""What a save costs training, against torch.save and torch.distributed.checkpoint, on this machine and disk.

    python scripts/bench/checkpoint.py --megabytes 500 --repeats 3 --folder /path/on/the/disk

Two gloo ranks hold the same model and its AdamW state (`--megabytes` together), and train on after every save. Per method,
the median over the repeats (the first save of each is left out: all of them get ready then):

stall      from the call until the next step may begin, on the slowest rank
done       from the call until the checkpoint is durable
slow-down  steps while the write goes on, against steps before, as a factor

A memcpy of the whole state and one plain write of it with fsync are measured beside them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from mgpu.checkpoint import CheckpointFolder, Retention
from mgpu.checkpoint.checkpointer import Checkpointer
from mgpu.checkpoint.publish import Publisher
from mgpu.checkpoint.restore import restore
from mgpu.checkpoint.state import TrainingState

WORLD = 2
WIDTH = 2048
CPU = torch.device("cpu")
Wait = Callable[[], Any]


class Training:
    """Linear layers whose weights and AdamW moments take `megabytes` together."""

    def __init__(self, megabytes: int) -> None:
        torch.manual_seed(0)
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state = TrainingState(self.model, self.optimizer)
        self.batch = torch.randn(4, WIDTH)
        self.steps = 0

    def step(self) -> float:
        began = time.perf_counter()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return time.perf_counter() - began

    def nested(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
        for (home, *rest), tensor in self.state.gather().tensors.items():
            found[home][".".join(rest)] = tensor
        return found


def measure(training: Training, save: Callable[[int], Wait], repeats: int) -> dict[str, float]:
    """Save `repeats` times after a first one, training on until each is done."""
    stalls, dones, during = [], [], []
    for number in range(repeats + 1):
        before = [training.step() for _ in range(5)]
        dist.barrier()
        began = time.perf_counter()
        wait = save(number)
        stall = time.perf_counter() - began
        steps: list[float] = []
        is_done: Callable[[], bool] = getattr(wait, "is_done", lambda: True)
        while slowest(float(not is_done())):
            steps.append(training.step())
        wait()
        finished = time.perf_counter()
        if number:
            stalls.append(slowest(stall))
            dones.append(slowest(finished - began))
            if steps:
                during.append(statistics.median(steps) / statistics.median(before))
        dist.barrier()
    factor = statistics.median(during) if during else float("nan")
    return {"stall": statistics.median(stalls), "done": statistics.median(dones), "slow-down": factor}


def slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


class Waiting:
    """What a method has in flight."""

    def __init__(self, is_done: Callable[[], bool], wait: Callable[[], Any]) -> None:
        self.is_done, self.wait = is_done, wait

    def __call__(self) -> None:
        self.wait()


def methods(
    training: Training, folder: Path, rank: int, checkpointer: Checkpointer
) -> dict[str, Callable[[int], Wait]]:
    nothing = Waiting(lambda: True, lambda: None)
    group = dist.new_group()  # its collectives run beside those of training
    stager = DefaultStager(StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False))

    def torch_save(number: int) -> Wait:
        if rank == 0:
            with (folder / f"torch-{number}.pt").open("wb") as stream:
                torch.save(training.nested(), stream)
                stream.flush()
                os.fsync(stream.fileno())
            (folder / f"torch-{number}.pt").unlink()
        dist.barrier()
        return nothing

    def dcp_save(number: int) -> Wait:
        dcp.save(training.nested(), checkpoint_id=folder / f"dcp-{number}")
        return Waiting(lambda: True, lambda: drop(folder / f"dcp-{number}"))

    def dcp_async(number: int, kind: AsyncCheckpointerType) -> Wait:
        path = folder / f"{kind.value}-{number}"
        response: Any = dcp.async_save(
            training.nested(),
            checkpoint_id=path,
            process_group=group,
            async_checkpointer_type=kind,
            async_stager=stager,
        )
        response.staging_completion.result()
        return Waiting(response.upload_completion.done, lambda: (response.upload_completion.result(), drop(path)))

    def drop(path: Path) -> None:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)

    def ours(number: int) -> Wait:
        checkpointer.save(number, training.state.gather(), device=CPU, data={}, position={}, metrics={})
        return Waiting(
            lambda: checkpointer.poll() is not None or not checkpointer.is_saving,
            lambda: succeed(checkpointer.wait()),
        )

    def succeed(outcome: Any) -> None:
        assert outcome is not None and not outcome.error, outcome

    return {
        "torch.save on rank 0, fsync": torch_save,
        "dcp.save": dcp_save,
        "dcp.async_save thread": lambda number: dcp_async(number, AsyncCheckpointerType.THREAD),
        "dcp.async_save process": lambda number: dcp_async(number, AsyncCheckpointerType.PROCESS),
        "mgpu": ours,
    }


def floor(training: Training, folder: Path, rank: int) -> dict[str, float]:
    """A memcpy of the whole state on both ranks at once, and a plain write of it on one."""
    tensors = list(training.state.gather().tensors.values())
    copies = [tensor.clone() for tensor in tensors]
    times = []
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        times.append(slowest(time.perf_counter() - began))
    seconds = 0.0
    if rank == 0:
        path = folder / "plain"
        began = time.perf_counter()
        with path.open("wb", buffering=0) as stream:
            for copy in copies:
                stream.write(memoryview(copy.reshape(-1).numpy()).cast("B"))
            os.fsync(stream.fileno())
        seconds = time.perf_counter() - began
        path.unlink()
    size = sum(tensor.nbytes for tensor in tensors)
    return {"bytes": size, "memcpy": statistics.median(times), "write": slowest(seconds)}


def work(rank: int, folder: Path, port: int, megabytes: int, repeats: int) -> None:
    warnings.filterwarnings("ignore")

    def store() -> dist.Store:
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(minutes=10))

    checkpoints = CheckpointFolder(folder / "checkpoints")
    publisher = Publisher(checkpoints, Retention(keep=1), lambda kind, **values: None)
    checkpointer = Checkpointer(publisher, rank=rank, world=WORLD, token="1", connect=store)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store()), rank=rank, world_size=WORLD)
    training = Training(megabytes)
    training.step()
    results: dict[str, Any] = {"floor": floor(training, folder, rank)}
    for name, save in methods(training, folder, rank, checkpointer).items():
        results[name] = measure(training, save, repeats)
        if rank == 0:
            print(name, json.dumps(results[name]), flush=True)
    checkpointer.close()
    fresh = Training(megabytes)
    dist.barrier()
    began = time.perf_counter()
    found = checkpoints.find()
    verified = time.perf_counter()
    restore(found, fresh.state)
    restored = time.perf_counter()
    fresh.step()
    results["resume"] = {
        "verify": verified - began,
        "restore": restored - verified,
        "to first step": slowest(time.perf_counter() - began),
    }
    if rank == 0:
        report(results)
    dist.barrier()
    os._exit(0)  # the process that dcp.async_save has started would hold up the end


def report(results: dict[str, Any]) -> None:
    base = results["floor"]
    megabytes = base["bytes"] / 1e6
    print(f"\nstate {megabytes:.0f} MB on each of {WORLD} ranks, {os.cpu_count()} cores")
    print(f"memcpy {base['memcpy']:.3f} s; plain write with fsync {megabytes / base['write']:.0f} MB/s")
    plain = results["torch.save on rank 0, fsync"]["stall"]
    print(f"{'method':<30}{'stall s':>9}{'x memcpy':>10}{'x torch.save':>14}{'done s':>9}{'MB/s':>7}{'slow-down':>11}")
    for name, row in results.items():
        if "stall" in row:
            print(
                f"{name:<30}{row['stall']:>9.3f}{row['stall'] / base['memcpy']:>10.2f}{row['stall'] / plain:>14.3f}"
                f"{row['done']:>9.2f}{megabytes / row['done']:>7.0f}{row['slow-down']:>11.2f}"
            )
    print("resume " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in results["resume"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to write to; default: the temporary folder")
    options = parser.parse_args()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        arguments = (Path(folder), server.port, options.megabytes, options.repeats)
        mp.start_processes(work, arguments, nprocs=WORLD, start_method="fork")


if __name__ == "__main__":
    main()
