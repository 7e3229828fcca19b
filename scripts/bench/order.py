"""What the start of an epoch costs: mgpu's computed order against torch's DistributedSampler, and indices per second.

Usage: python scripts/bench/order.py [--skip-torch]

Each row is measured in a process of its own: the time from nothing to the first index, the growth of the peak resident
memory by it, then the rate of all that follow. DistributedSampler makes a list of every index: at 10^8 it needs 5 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

COUNTED = 4_000_000
REPLICAS = 8


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def mgpu_order(n: int, block: int) -> Iterator[int]:
    """One number a block of indices: the number of indices in it."""
    from mgpu.data.order import EpochOrder

    order = EpochOrder(n, seed=0, epoch=0)
    int(order.at(0))
    yield 1
    for start in range(0, n - block + 1, block):
        yield order.at(np.arange(start, start + block)).size


def distributed_sampler(n: int, block: int) -> Iterator[int]:
    """The same of torch's sampler, for one of several replicas."""
    from itertools import islice

    from torch.utils.data import Dataset, DistributedSampler

    class Numbers(Dataset[int]):
        def __len__(self) -> int:
            return n

    sampler: DistributedSampler[int] = DistributedSampler(
        Numbers(), num_replicas=REPLICAS, rank=0, shuffle=True, seed=0
    )
    indices = iter(sampler)
    next(indices)
    yield 1
    while part := list(islice(indices, block)):
        yield len(part)


MEASURED = {"mgpu": mgpu_order, "DistributedSampler": distributed_sampler}


def measure(name: str, n: int, block: int) -> dict[str, float]:
    """Time and memory up to the first index, then indices per second in blocks of `block`."""
    if name == "mgpu":
        import mgpu.data.order  # noqa: F401  importing is no part of an epoch's start
    else:
        import torch.utils.data  # noqa: F401
    before, begin = peak_megabytes(), time.perf_counter()
    counts = MEASURED[name](n, block)
    next(counts)
    seconds, megabytes = time.perf_counter() - begin, peak_megabytes() - before
    begin, done = time.perf_counter(), 0
    for count in counts:
        done += count
        if done >= COUNTED:
            break
    return {"seconds": seconds, "megabytes": megabytes, "rate": done / (time.perf_counter() - begin)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip-torch", action="store_true", help="leave out DistributedSampler, which needs 5 GB")
    parser.add_argument("--one", nargs=3, metavar=("NAME", "N", "BLOCK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, n, block = arguments.one
        print(json.dumps(measure(name, int(n), int(block))))
        return
    rows = [("mgpu", 10**8, 2**20), ("mgpu", 10**9, 2**20), ("mgpu", 10**9, 1024), ("mgpu", 10**9, 16)]
    if not arguments.skip_torch:
        rows.append(("DistributedSampler", 10**8, 2**20))
    print(f"{'order':20} {'samples':>10} {'block':>8} {'first index':>12} {'memory':>10} {'indices/s':>12}")
    for name, n, block in rows:
        command = [sys.executable, __file__, "--one", name, str(n), str(block)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        first, memory = f"{found['seconds'] * 1e3:.1f} ms", f"{found['megabytes']:.1f} MB"
        print(f"{name:20} {n:10.0e} {block:8} {first:>12} {memory:>10} {found['rate'] / 1e6:10.2f} M", flush=True)


if __name__ == "__main__":
    main()
