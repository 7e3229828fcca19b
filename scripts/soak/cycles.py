"""Start and end a trivial run many times, and look for anything that it leaves behind.

Usage: python scripts/soak/cycles.py [--cycles 1000] [--ranks 2]

Looked for: processes (and with them their ports, which no socket of a dead process holds), System V shared memory and
semaphores, files in /dev/shm and the temporary folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mgpu.runs import RunStore

SCRIPT = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def snapshot() -> dict[str, set[str]]:
    """What there is now, of each kind that could leak."""
    found = {"file": set[str](), "ipc": set[str]()}
    found["file"] |= {str(path) for path in Path("/dev/shm").iterdir()}
    for kind in ("shm", "sem", "msg"):
        lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
        found["ipc"] |= {f"{kind} {line.split()[1]}" for line in lines}
    return found


def left_behind(before: dict[str, set[str]], store: RunStore) -> list[str]:
    """What is there now and was not before, and belongs to no other program for sure: the runs of `store` only."""
    left = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            left += _of_run(Path(entry.path), store)
    now = snapshot()
    fresh = {kind: now[kind] - before[kind] for kind in now}
    left += [f"ipc {name}" for name in sorted(fresh["ipc"])]
    # What a live process has mapped is in use, by another program: ours have all ended.
    return left + [f"file {path}" for path in sorted(fresh["file"] - _mapped()) if Path(path).exists()]


def _mapped() -> set[str]:
    """The files in shared memory that some live process has mapped."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                lines = Path(entry.path, "maps").read_text().splitlines()
            except OSError:
                continue
            found |= {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    return found


def _of_run(process: Path, store: RunStore) -> list[str]:
    try:
        environment = (process / "environ").read_bytes()
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return []
    ours = f"MGPU_RUN={store.root}/".encode() in environment and state not in "ZX"
    return [f"process {process.name}"] if ours else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cycles-") as name:
        folder = Path(name)
        (folder / "job.py").write_text(SCRIPT)
        (folder / "job.yaml").write_text(f"script: {{path: job.py}}\ndevices: cpu:{arguments.ranks}\n")
        # A folder for temporary files of its own: on a shared machine others come and go in the common one.
        temporary = folder / "temporary"
        temporary.mkdir()
        environment = {**os.environ, "TMPDIR": str(temporary)}
        before, began, store = snapshot(), time.monotonic(), RunStore(folder / "runs")
        for cycle in range(1, arguments.cycles + 1):
            done = subprocess.run(
                [sys.executable, "-m", "mgpu", "train", "job.yaml"],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                sys.exit(f"cycle {cycle} ended with {done.returncode}:\n{done.stderr}")
            if cycle % 50 == 0 or cycle == arguments.cycles:
                left = left_behind(before, store) + [f"file {path}" for path in temporary.iterdir()]
                print(f"{cycle} cycles, {time.monotonic() - began:.0f} s, left behind: {left or 'nothing'}", flush=True)
                if left:
                    sys.exit(1)


if __name__ == "__main__":
    main()
