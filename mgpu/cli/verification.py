"""`mgpu verify`: parse, call, render."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mgpu.cli.training import SetOption

if TYPE_CHECKING:
    from mgpu.inspect.verify import Difference, Verdict


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command(epilog="Example:  mgpu verify configs/digits.yaml --layouts cpu:1,cpu:2,cpu:4 --steps 10")(verify)


def verify(
    spec: Annotated[Path, typer.Argument(help="The spec, a YAML file.")],
    layouts: Annotated[
        str | None,
        typer.Option(
            help="Devices, strategy@devices or strategy:option=value@devices, by commas; the first is the reference. "
            "`all`: every strategy. Default: 1, 2 and 4 ranks."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train in each layout.")] = 10,
    set_: SetOption = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Train the first steps of SPEC in several layouts and compare samples, rates, losses, gradients, parameters.

    Exit code 0 if the layout is no part of the result, 1 if it is: then the first difference is named.
    """
    import dataclasses
    import json

    from rich.console import Console

    from mgpu.inspect.verify import verify as run

    console = Console(stderr=True, highlight=False)
    verdict = run(
        spec, set_ or [], layouts.split(",") if layouts else [], steps, lambda text: console.print(text, style="dim")
    )
    if json_:
        rows = [{**dataclasses.asdict(row), "layout": str(row.layout)} for row in verdict.rows]
        print(json.dumps({"reference": str(verdict.reference), "agrees": verdict.agrees, "layouts": rows}, indent=2))
    else:
        _show(verdict)
    raise typer.Exit(0 if verdict.agrees else 1)


def _show(verdict: Verdict) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=box.SIMPLE, title=f"{verdict.steps} steps against {verdict.reference}: largest relative difference"
    )
    for column in ("layout", "loss", "gradients", "parameters", ""):
        table.add_column(column, overflow="fold")
    for row in verdict.rows:
        numbers = [_number(value) for value in (row.loss, row.gradient, row.parameter)]
        table.add_row(str(row.layout), *numbers, "agrees" if row.first is None else "DIFFERS")
    if not verdict.exact:
        table.add_row("rounding explains", *(_number(value) for value in verdict.allowed), "", style="dim")
    console = Console(highlight=False)
    console.print(table)
    for row in verdict.rows:
        if row.first is not None:
            console.print(f"{row.layout}: {_sentence(row.first)}", markup=False, soft_wrap=True)
    if verdict.agrees:
        console.print("The layout is no part of the result.", style="green")


def _sentence(first: Difference) -> str:
    size = f", {first.size:.3g} relative where rounding explains {first.allowed:.1g}" if first.size is not None else ""
    return f"first difference at step {first.step}: {first.what}{size}\n  likely cause: {first.cause}"


def _number(value: float) -> str:
    return "equal" if value == 0 else f"{value:.1e}"
