"""What reading a machine and choosing GPUs costs.

Usage: python scripts/bench/topology.py [--fuzz N]

Limits: `mgpu topo --file` 0.4 s from nothing to its last line; the choice of 8 of 16 GPUs 0.2 s. The best of several tries
counts, so that a busy machine does not. `--fuzz N` parses N mangled texts besides and reports their rate.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mgpu.topology import Gpu, Topology
from mgpu.topology.placement import pick
from mgpu.topology.presets import preset

TRIES = 7
KINDS = ("SYS", "NODE", "PHB", "PIX", "NV1", "NV2", "NV4")


def best_of(work: Callable[[], object], tries: int = TRIES) -> float:
    """The shortest of several runs, in seconds."""
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def text_of(topology: Topology) -> str:
    """The machine as nvidia-smi would print it."""
    names = [f"GPU{gpu.index}" for gpu in topology.gpus]
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for name, row, gpu in zip(names, topology.links, topology.gpus, strict=True):
        lines.append("\t".join([name, *(cell or "" for cell in row), "0-15", str(gpu.numa or 0), "", "N/A"]))
    return "\n".join(lines) + "\n"


def random_machine(count: int, seed: int) -> Topology:
    """A machine of no order at all, the hardest to choose on."""
    source = random.Random(seed)
    rows = [["X"] * count for _ in range(count)]
    for row in range(count):
        for column in range(row):
            rows[row][column] = rows[column][row] = source.choice(KINDS)
    gpus = tuple(Gpu(index, "", "", 0, numa=index * 2 // count) for index in range(count))
    return Topology(gpus, (), links=tuple(map(tuple, rows)))


def command_seconds(arguments: list[str]) -> float:
    """`mgpu topo` with `arguments`, from its start to its end."""
    return best_of(
        lambda: subprocess.run([sys.executable, "-m", "mgpu", "topo", *arguments], check=True, capture_output=True)
    )


def fuzz(count: int) -> float:
    """Texts a second; anything but a Topology or a TopologyError ends the program."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "topology"))
    from test_fuzz import check

    start = time.perf_counter()
    check(count, seed=int(time.time()))
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fuzz", type=int, default=0, metavar="N")
    options = parser.parse_args()
    rows: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.txt"
        file.write_text(text_of(preset("dgx-2")))
        rows.append(("mgpu topo --file (16 GPUs)", command_seconds(["--file", str(file)]), 0.4))
        rows.append(
            ("mgpu topo --file --pick 8 --json", command_seconds(["--file", str(file), "--pick", "8", "--json"]), 0.4)
        )
        rows.append(("mgpu topo", command_seconds([]), 0.4))
        rows.append(("parse 16 GPUs", best_of(lambda: Topology.parse(file.read_text())), 0.01))
    machines = [random_machine(16, seed) for seed in range(8)]
    slowest = max(best_of(lambda machine=machine: pick(machine, 8), 3) for machine in machines)  # type: ignore[misc]
    rows.append(("choose 8 of 16 GPUs, the slowest of 8 random machines", slowest, 0.2))
    rows.append(("choose 8 of 16 GPUs, DGX-2", best_of(lambda: pick(preset("dgx-2"), 8)), 0.2))
    rows.append(("choose 8 of 8 GPUs, DGX-1V", best_of(lambda: pick(preset("dgx-1v"), 8)), 0.2))
    for name, seconds, limit in rows:
        print(f"{name:<56}{seconds * 1000:8.1f} ms   {'ok' if seconds < limit else f'over {limit * 1000:.0f} ms'}")
    if options.fuzz:
        print(f"mangled texts{fuzz(options.fuzz):52.0f} a second")
    sys.exit(any(seconds >= limit for _, seconds, limit in rows))


if __name__ == "__main__":
    main()
