"""`mgpu train`, `mgpu resume`, `mgpu node`: parse, call, render."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mgpu.runs.reference import DEFAULT_FOLDER

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a field of the spec; repeatable.")
]
DevicesOption = Annotated[str | None, typer.Option(help="In place of the spec's devices: auto, 4, [0,3], cpu:2.")]
RunsDirOption = Annotated[Path, typer.Option(help="Where runs are kept.")]
DetachOption = Annotated[bool, typer.Option("--detach", help="Return once it runs; it goes on by itself.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="On stdout, the outcome as JSON in place of the id (with --dry-run: the plan).")
]
RUNS_DIR = DEFAULT_FOLDER


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command(epilog="Example:  mgpu train configs/quickstart.yaml --set batch.size=64 --devices cpu:2")(train)
    app.command(epilog="Example:  mgpu resume latest --devices cpu:4")(resume)
    app.command(hidden=True)(node)


def train(
    spec: Annotated[Path, typer.Argument(help="The spec, a YAML file.")],
    set_: SetOption = None,
    devices: DevicesOption = None,
    name: Annotated[str | None, typer.Option(help="In place of the spec's name.")] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    detach: DetachOption = False,
    json_: JsonOption = False,
) -> None:
    """Train what SPEC says. Prints the run's id on stdout."""
    from mgpu.launch import starting

    overrides = [*(set_ or []), *([f"devices={devices}"] if devices else []), *([f"name={name}"] if name else [])]
    if dry_run:
        starting.show_plan(spec, overrides, as_json=json_)
        return
    raise typer.Exit(starting.train(spec, overrides, runs_dir, detach=detach, as_json=json_))


def resume(
    run: Annotated[str, typer.Argument(help="An id, a unique prefix of one, a path, or latest.")],
    set_: SetOption = None,
    devices: DevicesOption = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    detach: DetachOption = False,
    json_: JsonOption = False,
) -> None:
    """Continue RUN from its newest good checkpoint, also on other devices."""
    from mgpu.launch import starting

    overrides = [*(set_ or []), *([f"devices={devices}"] if devices else [])]
    raise typer.Exit(starting.resume(run, overrides, runs_dir, detach=detach, as_json=json_))


def node(path: str, attempt: int, listener: int) -> None:
    """What each host runs."""
    from mgpu.launch.node import main

    raise typer.Exit(main(path, attempt, listener))
