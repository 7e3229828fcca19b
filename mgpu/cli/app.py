"""The `mgpu` command. Errors are printed here, and nowhere else."""

from __future__ import annotations

import sys

import typer

from mgpu.cli import checkpoints, inspect_runs, logs, run_control, topology, training, verification
from mgpu.errors import MgpuError

app = typer.Typer(
    name="mgpu",
    help="Run one training on any number of GPUs. The layout is never part of the result.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
training.register(app)
inspect_runs.register(app)
verification.register(app)
topology.register(app)
checkpoints.register(app)
logs.register(app)
run_control.register(app)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except MgpuError as error:
        for line in error.lines():
            print(line, file=sys.stderr)
        sys.exit(error.exit_code)
