"""A torchrun-compatible script whose rank N misbehaves in step 3: `faulty.py FAULT N`. Every step is one all-reduce."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from mgpu.train import beat


def raise_error():
    raise ValueError("bad sample 17")


def raise_after_leaving_the_group():
    try:
        raise_error()
    finally:
        dist.destroy_process_group()


def import_error():
    import a_module_that_is_not_there  # noqa: F401


def exit_75():
    os._exit(75)


def leave():
    sys.exit(0)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def crash():
    import ctypes

    ctypes.string_at(0)


def stuck_here():
    time.sleep(10_000)


def out_of_memory():
    """In a memory cgroup of its own where one can be made, else under a limit of its address space."""
    limit = 64 << 20
    if folder := memory_cgroup():
        own = folder / f"mgpu-test-{os.getpid()}"
        own.mkdir()
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (own / name).exists():
                (own / name).write_text(str(limit))
        (own / "cgroup.procs").write_text(str(os.getpid()))
    else:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))
    held = bytearray(6 * limit)
    raise AssertionError(f"{len(held)} bytes were there after all")


def memory_cgroup():
    """This process's memory cgroup, if children of it can be made and limited; else None."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        probe = root / inside.strip("/") / f"mgpu-probe-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        able = (probe / "memory.max").exists() or (probe / "memory.limit_in_bytes").exists()
        probe.rmdir()
        if able:
            return probe.parent
    return None


FAULTS = {
    function.__name__: function
    for function in (
        raise_error,
        raise_after_leaving_the_group,
        import_error,
        exit_75,
        leave,
        killed,
        stopped,
        crash,
        stuck_here,
        out_of_memory,
    )
}


def main(fault, culprit):
    batches = iter(DataLoader(list(range(40)), batch_size=4, num_workers=1)) if fault == "dead_loader" else None
    dist.init_process_group("gloo")
    total = torch.ones(4)
    for step in range(1, 6):
        beat(step)
        if step == 3 and dist.get_rank() == culprit:
            if fault == "dead_loader":
                os.kill(batches._workers[0].pid, signal.SIGKILL)
                for _ in range(8):
                    next(batches)
                    time.sleep(0.05)
            FAULTS[fault]()
        dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
