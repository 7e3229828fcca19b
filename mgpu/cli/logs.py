"""`mgpu logs`: parse, call, render."""

from __future__ import annotations

import re
import sys
import time
from typing import Annotated

import typer

from mgpu.cli.inspect_runs import RunArgument
from mgpu.cli.training import RUNS_DIR, RunsDirOption

_FOLLOW_SECONDS = 0.2
_SINCE = re.compile(r"(\d+)\s*([smhd])[a-z]*")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def register(app: typer.Typer) -> None:
    """Add the command of this file to `app`."""
    app.command(epilog="Example:  mgpu logs latest -f --rank 1 --grep loss --since 10m")(logs)


def logs(
    run: RunArgument,
    rank: Annotated[int, typer.Option(help="Whose output.")] = 0,
    attempt: Annotated[int | None, typer.Option(help="Of which attempt; default: the newest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    grep: Annotated[str | None, typer.Option(help="Only lines that this regular expression is found in.")] = None,
    since: Annotated[str | None, typer.Option(help="Only what was written in this time: 30s, 10m, 2h, 1d.")] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Print what a rank wrote, byte for byte."""
    from mgpu.errors import Refusal
    from mgpu.launch.output import LogTail, offset_at, older, written
    from mgpu.runs import RunStore, State

    found = RunStore(runs_dir).find(run)
    number = attempt or found.attempts
    path = found.log_path(number, rank)
    if not path.exists() and not older(path).exists() and not (follow and found.state is State.RUNNING):
        raise Refusal(f"{found.id} has no log of rank {rank}, attempt {number}", hint=f"see {path.parents[1]}")
    show = _Printer(_pattern(grep))
    start = 0 if since is None else offset_at(found, number, rank, time.time() - _seconds(since))
    try:
        if not follow:
            for block in written(path, start):
                show.write(block)
            show.close()
            return
        tail = LogTail(path)
        first = b"".join(written(path, start))
        tail.skip_to_end()
        show.write(first)
        while True:
            ended = found.state is not State.RUNNING or found.attempts != number
            show.write(tail.read())
            if ended:
                show.close()
                return
            time.sleep(_FOLLOW_SECONDS)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has what it wanted
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


class _Printer:
    """Bytes to stdout: all as they come, or only the whole lines that match."""

    def __init__(self, pattern: re.Pattern[bytes] | None) -> None:
        self._pattern = pattern
        self._rest = b""

    def write(self, block: bytes) -> None:
        if self._pattern is not None:
            *lines, self._rest = (self._rest + block).split(b"\n")
            block = b"".join(line + b"\n" for line in lines if self._pattern.search(line))
        if block:
            sys.stdout.buffer.write(block)
            sys.stdout.buffer.flush()

    def close(self) -> None:
        """The last line, finished or not."""
        if self._rest:
            self.write(b"\n")


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
