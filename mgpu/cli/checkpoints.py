"""`mgpu checkpoints`, `mgpu export`: parse, call, render."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from mgpu.cli.inspect_runs import JsonOption, RunArgument
from mgpu.cli.training import RUNS_DIR, RunsDirOption

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command(epilog="Example:  mgpu checkpoints latest --check")(checkpoints)
    app.command(epilog="Example:  mgpu export latest --format safetensors --output model.safetensors")(export)


def checkpoints(
    run: RunArgument,
    check: Annotated[bool, typer.Option("--check", help="Read every file and compare its hash.")] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
    json_: JsonOption = False,
) -> None:
    """List the checkpoints of RUN, newest first. With --check, exit 1 if one is damaged, or none is there."""
    from mgpu.checkpoint import CheckpointFolder
    from mgpu.checkpoint.listing import rows
    from mgpu.runs import RunStore

    found = rows(CheckpointFolder(RunStore(runs_dir).find(run).checkpoints), check=check)
    if json_:
        print(json.dumps([dataclasses.asdict(row) for row in found], indent=2))
    else:
        for row in found:
            age = _age(time.time() - row.created) if row.created else "-"
            metrics = "  ".join(f"{name} {value:.6g}" for name, value in (row.metrics or {}).items())
            health = f"{row.health}: {row.fault}" if row.fault else row.health
            print(f"step {row.step:<10}  {_size(row.bytes):>8}  {age:>8}  {health}  {metrics}".rstrip())
        if not found:
            print("no checkpoints yet", file=sys.stderr)
    if check and (not any(row.health == "verified" for row in found) or any(row.health == "damaged" for row in found)):
        raise typer.Exit(1)


def export(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(help="Of which checkpoint; default: the newest good one.")] = None,
    format_: Annotated[Literal["safetensors", "pt"], typer.Option("--format", help="What to write.")] = "safetensors",
    output: Annotated[Path | None, typer.Option(help="The file; default: RUN-step-N in this folder.")] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Write the weights of RUN to one file. Prints its path on stdout."""
    from mgpu.checkpoint import CheckpointFolder
    from mgpu.errors import Refusal
    from mgpu.runs import RunStore

    found_run = RunStore(runs_dir).find(run)
    if output is not None and not output.absolute().parent.is_dir():
        raise Refusal(f"no folder {output.absolute().parent}", hint="make it first, or write another --output")
    with CheckpointFolder(found_run.checkpoints).kept(step) as found:
        path = output or Path(f"{found_run.id}-step-{found.step}.{format_}")
        from mgpu.checkpoint import weights

        weights.export(found, path.absolute(), format_)
    print(path)
    print(f"step {found.step}, {_size(path.stat().st_size)}; to load it:\n", file=sys.stderr)
    print("\n".join(f"    {line}" for line in weights.snippet(path, format_).splitlines()), file=sys.stderr)


def _size(count: int) -> str:
    """Bytes as people read them: 1.5 GB."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def _age(seconds: float) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
