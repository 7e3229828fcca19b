"""configs/quickstart.yaml as a careful user would write it by hand for torchrun: what `loop.py` measures mgpu against.

Usage: torchrun --standalone --nproc-per-node 2 scripts/bench/handwritten_ddp.py STEPS WARM-UP

Rank 0 prints the samples per second of the steps after the warm-up. Every step is logged as mgpu logs it: loss over all
ranks, learning rate and gradient norm, one JSON line to a file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from mgpu.zoo import GPT, PythonSource

SIZE, MICRO, TOTAL, WARM = 32, 8, 1200, 50


def factor(step: int) -> float:
    if step < WARM:
        return (step + 1) / WARM
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - WARM) / (TOTAL - WARM)))


def main(steps: int, warm_up: int) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(layers=2, width=128, context=64).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    data = PythonSource(split="train", context=64)
    sampler = DistributedSampler(data, seed=0)
    batches = iter(DataLoader(data, MICRO, sampler=sampler, pin_memory=cuda))
    accumulation = SIZE // MICRO // world
    criterion = torch.nn.CrossEntropyLoss()
    begin = 0.0
    with tempfile.TemporaryFile("w") as log:
        for step in range(steps):
            if step == warm_up:
                begin = time.perf_counter()
            total = torch.zeros((), device=device)
            for index in range(accumulation):
                tokens, targets = (part.to(device, non_blocking=True) for part in next(batches))
                with model.no_sync() if index < accumulation - 1 else contextlib.nullcontext():
                    loss = criterion(model(tokens).flatten(0, 1), targets.flatten()) / accumulation
                    loss.backward()
                total += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            dist.all_reduce(total)
            if rank == 0:
                rate = schedule.get_last_lr()[0]
                line = {"step": step + 1, "loss": float(total) / world, "lr": rate, "grad_norm": float(norm)}
                log.write(json.dumps(line) + "\n")
                log.flush()
    if rank == 0:
        print(SIZE * (steps - warm_up) / (time.perf_counter() - begin))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
