"""Checks and measures on one GPU what tests on CPUs cannot, and prints one table; exit code 1 if a row failed.

Usage: scripts/gpu_check.sh [--devices 1] [--only NAME...] [--seconds 460]

Every row is a run of the command as a user would type it, or one of scripts/bench/, and says what it compared or measured.
A row that begins after `--seconds` is not run and counts as failed. `--devices cpu:1` runs what a machine without a GPU can,
which keeps the script itself in order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
QUICKSTART = FOLDER.parent / "configs" / "quickstart.yaml"
MGPU = [sys.executable, "-m", "mgpu"]
SMALL = (
    "schedule.warmup=5 steps",
    "evaluate={}",
    "checkpoint={}",
    "task={target: mgpu.zoo:NextByte, args: {length: 1}}",
)
STRATEGIES = ("ddp", "dp", "fsdp", "model", "pipeline", "tensor", "hybrid")
SCRIPT = """\
import ctypes, sys, time
import torch, torch.distributed as dist
what = sys.argv[1]
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
value = torch.ones(1 << 20, device="cuda" if cuda else "cpu")
dist.all_reduce(value)
print("sum", float(value.sum()), flush=True)
if what == "assert":
    torch.ones(4, device=value.device)[torch.tensor([9], device=value.device)].sum().item()
if what == "crash":
    ctypes.string_at(0)
if what == "stuck":
    from mgpu.train import beat
    beat(1)
    if cuda:
        torch.cuda._sleep(1 << 62)
        torch.cuda.synchronize()
    time.sleep(1000)
dist.destroy_process_group()
"""


class Failed(AssertionError):
    """What a row found, in one line."""


@dataclass
class Bench:
    """Where runs go, and on what they run."""

    folder: Path
    devices: str
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return not self.devices.startswith("cpu")

    def command(self, *arguments: str, code: int = 0, timeout: float = 120, stdin: str | None = None) -> str:
        """Standard output of `mgpu`; Failed where its exit code is another."""
        done = subprocess.run(
            [*MGPU, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.folder,
            check=False,
        )
        if done.returncode != code:
            last = " | ".join(done.stderr.strip().splitlines()[-6:])
            raise Failed(f"mgpu {arguments[0]} ended with {done.returncode}, not {code}: {last}")
        return done.stdout

    def train(self, *settings: str, spec: Path = QUICKSTART, code: int = 0, timeout: float = 120) -> Path:
        """The folder of a new run of `spec`."""
        before = {path.name for path in (self.folder / "runs").glob("*")}
        arguments = [f"--set={setting}" for setting in settings]
        self.command("train", str(spec), f"--devices={self.devices}", *arguments, code=code, timeout=timeout)
        (path,) = (path for path in (self.folder / "runs").iterdir() if path.name not in before)
        return path

    def small(self, *settings: str, steps: int = 20) -> Path:
        """A short run of the quickstart: no evaluation, a save at the end."""
        return self.train(f"duration={steps} steps", *SMALL, *settings)

    def plain(self) -> list[float]:
        """The losses of the short run under `single`, which others are compared with."""
        if "plain" not in self.kept:
            self.kept["plain"] = losses(self.small("parallel={strategy: single}"))
        return self.kept["plain"]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows_of(run)]


def speed(run: Path) -> float:
    """Samples per second of the second half of a run."""
    rows = rows_of(run)
    first, last = rows[len(rows) // 2], rows[-1]
    return (last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"])


def cause(run: Path) -> dict[str, Any]:
    """The cause in the last event of a failed run."""
    found: dict[str, Any] = json.loads((run / "events.jsonl").read_text().splitlines()[-1])["cause"]
    return found


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference; Failed where the lengths differ."""
    if len(ours) != len(theirs):
        raise Failed(f"{len(ours)} steps, not {len(theirs)}")
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))


def within(found: float, limit: float, what: str) -> str:
    if not found <= limit:
        raise Failed(f"{what}: {found:.2e}, more than {limit:.0e}")
    return f"{what} {found:.1e}"


def weights(bench: Bench, run: Path) -> str:
    """Digest of a run's exported weights."""
    path = bench.folder / f"{run.name}.safetensors"
    bench.command("export", run.name, f"--output={path}")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def machine(bench: Bench) -> str:
    import torch

    if not bench.on_gpu:
        return f"torch {torch.__version__}, no GPU asked for"
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, NCCL {major}.{minor}.{patch}"


def topology(bench: Bench) -> str:
    """NVML and the text of nvidia-smi give the same matrix."""
    own = json.loads(bench.command("topo", "--json"))
    if not bench.on_gpu:
        return f"{len(own['gpus'])} GPUs, {len(own.get('numa', []))} NUMA nodes"
    text = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True).stdout
    read = json.loads(bench.command("topo", "--json", "--file", "-", stdin=text))
    if own["links"] != read["links"]:
        raise Failed(f"NVML says {own['links']}, nvidia-smi says {read['links']}")
    return f"{len(own['gpus'])} GPUs, links as nvidia-smi's; {own['gpus'][0].get('name', '')}"


def quickstart(bench: Bench) -> str:
    run = bench.train(*(() if bench.on_gpu else ("duration=60 steps", *SMALL)), timeout=200)
    last = losses(run)[-1]
    if bench.on_gpu and last >= 2.0:
        raise Failed(f"the loss ends at {last:.3f}, not below 2")
    return f"loss {losses(run)[0]:.2f} to {last:.2f}, {speed(run):.0f} samples/s"


def strategy(name: str) -> Callable[[Bench], str]:
    def check(bench: Bench) -> str:
        run = bench.small(f"parallel={{strategy: {name}}}")
        return within(difference(losses(run), bench.plain()), 1e-4, "losses against single:")

    return check


def offload(bench: Bench) -> str:
    if not bench.on_gpu:
        return "needs an accelerator"
    run = bench.small("parallel={strategy: fsdp, offload: true}")
    return within(difference(losses(run), bench.plain()), 1e-4, "losses against single:")


def precision(name: str, limit: float) -> Callable[[Bench], str]:
    def check(bench: Bench) -> str:
        run = bench.small(f"precision={name}", "parallel={strategy: single}")
        found = within(difference(losses(run), bench.plain()), limit, "losses against fp32:")
        return f"{found}, {speed(run):.0f} samples/s"

    return check


def compiled(bench: Bench) -> str:
    run = bench.small("compile=true", "parallel={strategy: single}", steps=60)
    eager = bench.small("parallel={strategy: single}", steps=60)
    found = within(difference(losses(run), losses(eager)), 1e-2, "losses against eager:")
    return f"{found}, {speed(run):.0f} samples/s against {speed(eager):.0f}"


def recomputed(bench: Bench) -> str:
    run = bench.small("activation_checkpointing=full", "parallel={strategy: single}")
    return within(difference(losses(run), bench.plain()), 1e-4, "losses against single:")


def loaders(bench: Bench) -> str:
    run = bench.small("data.workers=2", "parallel={strategy: single}")
    return within(difference(losses(run), bench.plain()), 1e-6, "losses against no workers:")


def exact(bench: Bench) -> str:
    """Two runs, and one that is stopped half way and resumed: the same bits."""
    settings = ("numerics=exact", "clip_norm=0.5")
    first, second = bench.small(*settings), bench.small(*settings)
    half = bench.small(*settings, steps=10)
    bench.command("resume", half.name, "--set=duration=20 steps", f"--devices={bench.devices}")
    digests = {weights(bench, run) for run in (first, second)}
    if len(digests) != 1:
        raise Failed(f"two equal runs gave {' and '.join(sorted(digests))}")
    if losses(half)[:10] != losses(first)[:10]:
        raise Failed("the first ten losses differ")
    return f"sha256 {digests.pop()} twice"


def resumed(bench: Bench) -> str:
    """Saved in the background every few steps, killed, resumed: the same end."""
    settings = ("duration=40 steps", *SMALL, "checkpoint={every: 5 steps}", "numerics=exact")
    whole = bench.train(*settings)
    process = subprocess.Popen(
        [*MGPU, "train", str(QUICKSTART), f"--devices={bench.devices}", "--name=killed"]
        + [f"--set={part}" for part in settings],
        cwd=bench.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 90
    while not list((bench.folder / "runs").glob("killed-*/checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    (killed,) = (bench.folder / "runs").glob("killed-*")
    bench.command("resume", killed.name, f"--devices={bench.devices}")
    if weights(bench, whole) != weights(bench, killed):
        raise Failed("other bits after a kill and a resume")
    return f"same bits; {len(rows_of(killed))} steps logged"


def snapshot(bench: Bench) -> str:
    """The one stall of a save, for 1 GB on the GPU, against a copy into pinned memory by hand."""
    import torch

    from mgpu.checkpoint.layout import make_layout
    from mgpu.checkpoint.snapshot import Snapshot
    from mgpu.checkpoint.state import State

    device = torch.device("cuda" if bench.on_gpu else "cpu")
    tensors = {f"weight.{index}": torch.randn(8 << 20, device=device) for index in range(32 if bench.on_gpu else 2)}
    size = sum(value.numel() * 4 for value in tensors.values())
    state = State({("model", name): value for name, value in tensors.items()})
    held = Snapshot(make_layout(state, 0, 1), device)
    _ = held.memory
    named = {f"model.{name}": value for name, value in tensors.items()}

    def timed(work: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            work()
            if bench.on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    target = torch.empty(8 << 20, pin_memory=bench.on_gpu)
    ours = timed(lambda: held.take(named))
    by_hand = timed(lambda: [target.copy_(value, non_blocking=True) for value in tensors.values()])
    held.close()
    return f"{size / ours / 1e9:.1f} GB/s, {ours / by_hand:.2f} of a pinned copy's time ({size >> 20} MiB)"


def cuts(bench: Bench) -> str:
    """Where a GPT of equal blocks is cut into four, by measured time and by operations; the first and last have more to do."""
    import torch
    from torch import nn

    from mgpu.parallel._division import divide
    from mgpu.parallel.base import Context
    from mgpu.train import Supervised
    from mgpu.zoo import GPT

    device = torch.device("cuda" if bench.on_gpu else "cpu")
    tokens = torch.randint(0, 256, (4, 65), device=device)
    context = Context(
        rank=0, world=1, replica=0, replicas=1, device=device, example=lambda: (tokens[:, :-1], tokens[:, 1:]),
        optimizer=torch.optim.AdamW,
    )  # fmt: skip
    model, task = GPT(layers=12, width=128, context=64, tie=False), Supervised(nn.CrossEntropyLoss(), unit="token")
    found = {how: divide(model, 4, (how,), task, context).cuts for how in ("time", "flops", "memory")}
    for how, names in found.items():
        blocks = [int(name.rpartition(".")[2]) for name in names]
        if any(abs(block - even) > 1 for block, even in zip(blocks, (3, 6, 9), strict=True)):
            raise Failed(f"by {how} twelve equal blocks are cut at {names}")
    return "; ".join(f"{how}: {', '.join(names)}" for how, names in found.items())


def script(bench: Bench, what: str, code: int, *settings: str) -> Path:
    (bench.folder / "script.py").write_text(SCRIPT)
    spec = bench.folder / f"{what}.yaml"
    spec.write_text(f"script: {{path: script.py, args: [{what}]}}\n")
    return bench.train(*settings, spec=spec, code=code)


def collective(bench: Bench) -> str:
    run = script(bench, "none", 0)
    text = (run / "logs" / "1" / "rank-0.log").read_text()
    if f"sum {float(1 << 20)}" not in text:
        raise Failed(text[-200:])
    return "an all-reduce in a script of the user's"


def device_error(bench: Bench) -> str:
    """A kernel's assertion: the rank's own error is the cause."""
    found = cause(script(bench, "assert", 1))
    if found["kind"] != "error":
        raise Failed(str(found))
    return str(found["what"])[:90]


def crash(bench: Bench) -> str:
    found = cause(script(bench, "crash", 139))
    return str(found["what"])[:90]


def stuck(bench: Bench) -> str:
    """A kernel that never ends: told after `hang`, with the line, and the GPU is free again."""
    begin = time.monotonic()
    found = cause(script(bench, "stuck", 3, "watchdog={hang: 3 seconds, start: 60 seconds}"))
    left = ""
    if bench.on_gpu:
        query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        left = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        if str(os.getpid()) in left.split():
            left = ""
    if left:
        raise Failed(f"processes left on the GPU: {left.split()}")
    return f"{found['place'].rpartition('/')[2]}, {time.monotonic() - begin:.1f} s in all"


def bench_script(name: str, *arguments: str, pick: str) -> Callable[[Bench], str]:
    """The last line that matches `pick` of a benchmark's table."""

    def measure(bench: Bench) -> str:
        command = [sys.executable, str(FOLDER / "bench" / f"{name}.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=bench.folder)
        if done.returncode:
            raise Failed(f"{name}.py: {done.stderr.strip().splitlines()[-1]}")
        lines = [line for line in done.stdout.splitlines() if re.search(pick, line)]
        return " ".join(lines[-1].split())

    return measure


CHECKS: dict[str, Callable[[Bench], str]] = {
    "machine": machine,
    "topology": topology,
    "collective": collective,
    "quickstart": quickstart,
    **{f"strategy {name}": strategy(name) for name in STRATEGIES},
    "fsdp offload": offload,
    "precision tf32": precision("tf32", 1e-2),
    "precision bf16": precision("bf16", 5e-2),
    "precision fp16": precision("fp16", 5e-2),
    "recomputation": recomputed,
    "loader processes": loaders,
    "compile": compiled,
    "exact": exact,
    "kill and resume": resumed,
    "snapshot": snapshot,
    "cuts": cuts,
    "device error": device_error,
    "crash": crash,
    "stuck": stuck,
    "loop against by hand": bench_script("loop", "--ranks=1", "--repeats=1", pick=r"samples/s"),
    "start against torchrun": bench_script(
        "launch", "--ranks", "1", "--repeats=1", "--only", "start", pick=r"^\s*1 mgpu"
    ),
}


def main() -> int:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="1", help="of every run, as in a spec; default: one GPU")
    parser.add_argument(
        "--only", nargs="+", default=list(CHECKS), metavar="NAME", choices=CHECKS, help=", ".join(CHECKS)
    )
    parser.add_argument("--seconds", type=float, default=460, help="rows that would begin later are not run")
    asked = parser.parse_args()
    begin, failures = time.monotonic(), 0
    table = Table(title=f"mgpu on {asked.devices}", title_justify="left")
    for column in ("check", "verdict", "seconds", "what was seen"):
        table.add_column(column, overflow="fold")
    with tempfile.TemporaryDirectory(prefix="mgpu-check-") as folder:
        bench = Bench(Path(folder), asked.devices)
        for name in asked.only:
            row_begin = time.monotonic()
            try:
                if row_begin - begin > asked.seconds:
                    raise Failed("not run: the time was over")
                verdict, seen = "ok", CHECKS[name](bench)
            except (Failed, subprocess.SubprocessError, OSError, KeyError, ValueError, RuntimeError) as error:
                verdict, seen, failures = "FAILED", f"{type(error).__name__}: {error}"[:600], failures + 1
            seconds = time.monotonic() - row_begin
            print(f"{name}: {verdict} ({seconds:.1f} s) {seen}", file=sys.stderr, flush=True)
            table.add_row(name, verdict, f"{seconds:.1f}", seen)
    Console(width=160).print(table)
    print(f"{len(asked.only) - failures} of {len(asked.only)} in {time.monotonic() - begin:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
