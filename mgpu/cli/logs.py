"""`mgpu logs`: parse, call, render."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from typing import Annotated

import typer

from mgpu.cli.inspect_runs import RunArgument
from mgpu.cli.training import RUNS_DIR, RunsDirOption

_FOLLOW = "Go on until the run ends. Without --rank, --attempt, --grep, --since its progress is shown too, on stderr."
_SINCE = re.compile(r"(\d+)\s*([smhd])[a-z]*")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def register(app: typer.Typer) -> None:
    """Add the command of this file to `app`."""
    app.command(epilog="Example:  mgpu logs latest -f --rank 1 --grep loss --since 10m")(logs)


def logs(
    run: RunArgument,
    rank: Annotated[int | None, typer.Option(help="Whose output; default: rank 0's.")] = None,
    attempt: Annotated[int | None, typer.Option(help="Of which attempt; default: the newest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help=_FOLLOW)] = False,
    grep: Annotated[str | None, typer.Option(help="Only lines that this regular expression is found in.")] = None,
    since: Annotated[str | None, typer.Option(help="Only what was written in this time: 30s, 10m, 2h, 1d.")] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Print what a rank wrote, byte for byte. With -f also, on stderr, the run's steps, notes, failures and end."""
    from mgpu.errors import Refusal
    from mgpu.launch.following import FollowedLog, LogPrinter, Pauses, follow_log, follow_run
    from mgpu.launch.output import offset_at, older, written
    from mgpu.runs import RunStore, State

    found = RunStore(runs_dir).find(run)
    number, whose = attempt or found.attempts, rank or 0
    path = found.log_path(number, whose)
    if not path.exists() and not older(path).exists() and not (follow and found.state is State.RUNNING):
        raise Refusal(f"{found.id} has no log of rank {whose}, attempt {number}", hint=f"see {path.parents[1]}")
    pattern = _pattern(grep)
    start = 0 if since is None else offset_at(found, number, whose, time.time() - _seconds(since))
    try:
        if not follow:
            printer = LogPrinter(pattern)
            for block in written(path, start):
                printer.write(block)
            printer.close()
            return
        with contextlib.closing(FollowedLog(found, whose, number, start, pattern)) as log:
            if rank is None and attempt is None and grep is None and since is None:
                follow_run(found, log, Pauses())
            else:
                follow_log(found, log, attempt, Pauses())
    except BrokenPipeError:
        sys.stderr.close()  # the reader has what it wanted
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _pattern(text: str | None) -> re.Pattern[bytes] | None:
    from mgpu.errors import Refusal

    try:
        return None if text is None else re.compile(text.encode())
    except re.error as error:
        raise Refusal(f"--grep {text!r}: {error}", hint="a backslash takes a character for itself") from None


def _seconds(text: str) -> int:
    from mgpu.errors import Refusal

    match = _SINCE.fullmatch(text.strip())
    if match is None:
        raise Refusal(f"--since {text!r}", hint="write a number and s, m, h or d: 30s, 10m, 2h, 1d")
    return int(match[1]) * _UNITS[match[2]]
