"""What the loop costs: samples per second of configs/quickstart.yaml, by mgpu and by hand, `fast` and `exact`.

Usage: python scripts/bench/loop.py [--ranks 1,2,4] [--repeats 3] [--steps 250]

The variants take turns, each in processes of its own; the table has the best of the repeats (the least disturbed one) and
the ratios. Start-up and the first steps are left out of the time. All have as many CPU threads a rank as there are CPUs for
it (by itself `exact` takes one, as its bits depend on their number, which the spec's `threads` sets).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SPEC = FOLDER.parents[1] / "configs" / "quickstart.yaml"
WARM_UP = 50


def by_hand(ranks: int, steps: int) -> float:
    """Samples per second of handwritten_ddp.py under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(FOLDER / "handwritten_ddp.py"), str(steps), str(WARM_UP)],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return float(done.stdout)


def by_mgpu(ranks: int, steps: int, numerics: str) -> float:
    """The same of `mgpu train`, from its own metrics."""
    with tempfile.TemporaryDirectory() as runs:
        changes = [f"duration={steps} steps", "evaluate={}", "checkpoint={}", f"numerics={numerics}"]
        changes.append("task={target: mgpu.zoo:NextByte, args: {length: 1}}")
        changes.append(f"threads={max(1, len(os.sched_getaffinity(0)) // ranks)}")
        command = [sys.executable, "-m", "mgpu", "train", str(SPEC), "--runs-dir", runs, f"--devices=auto:{ranks}"]
        subprocess.run(
            [*command, *(f"--set={change}" for change in changes)],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        (path,) = Path(runs).glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    first, last = rows[WARM_UP - 1], rows[-1]
    return (last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    arguments = parser.parse_args()
    print(f"{'ranks':>5} {'by hand':>9} {'fast':>9} {'exact':>9}   {'fast / by hand':>14} {'exact step / fast':>17}")
    for ranks in map(int, arguments.ranks.split(",")):
        hand = fast = exact = 0.0
        for _ in range(arguments.repeats):
            hand = max(hand, by_hand(ranks, arguments.steps))
            fast = max(fast, by_mgpu(ranks, arguments.steps, "fast"))
            exact = max(exact, by_mgpu(ranks, arguments.steps, "exact"))
        ratios = f"{fast / hand:14.3f} {fast / exact:17.3f}"
        print(f"{ranks:5} {hand:9.1f} {fast:9.1f} {exact:9.1f}   {ratios}   samples/s", flush=True)


if __name__ == "__main__":
    main()
