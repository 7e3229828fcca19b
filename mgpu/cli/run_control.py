"""`mgpu stop`, `mgpu rm`, `mgpu stacks`: parse, call, render."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mgpu.cli.inspect_runs import RunArgument
from mgpu.cli.training import RUNS_DIR, RunsDirOption


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command(epilog="Example:  mgpu stop latest")(stop)
    app.command(epilog="Example:  mgpu rm gpt-20260131-101530-1a2b --yes")(rm)
    app.command(epilog="Example:  mgpu stacks latest --rank 1")(stacks)


def stop(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="End it at once: nothing is saved.")] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Ask a run to save a checkpoint and stop, and wait for it."""
    from mgpu.launch import control
    from mgpu.runs import RunStore, shell_reference

    found = RunStore(runs_dir).find(run)
    state = control.stop(found, now=now)
    saved = found.last_saved()
    kept = "no checkpoint was written yet" if saved is None else f"saved step {saved}"
    print(f"{state}  {found.id}: {kept}\ncontinue:  mgpu resume {shell_reference(found)}", file=sys.stderr)


def rm(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids, unique prefixes, paths, or latest.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Delete runs, their checkpoints too."""
    from mgpu.errors import Refusal
    from mgpu.launch.memory import size_text
    from mgpu.runs import RunStore

    store = RunStore(runs_dir)
    found = list(dict.fromkeys(store.find(run) for run in runs))
    for run in found:
        size = sum(path.lstat().st_size for path in run.path.rglob("*") if path.is_file())
        steps = run.checkpoint_steps()
        print(f"{run.id}  {run.state}  {len(steps)} checkpoints  {size_text(size)}", file=sys.stderr)
    if not yes:
        if not sys.stdin.isatty():
            raise Refusal("nobody can be asked here", hint="write --yes to delete them")
        typer.confirm("delete?", abort=True, err=True)
    for run in found:
        store.remove(run)
        print(run.id)


def stacks(
    run: RunArgument,
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Print where every thread of every rank is right now. The run goes on unharmed."""
    from mgpu.errors import Refusal
    from mgpu.launch import control
    from mgpu.runs import RunStore

    found = RunStore(runs_dir).find(run)
    beats, collected = control.live_beats(found), control.stacks(found)
    if rank is not None and rank not in collected:
        raise Refusal(f"{found.id} has no live rank {rank}", hint=f"ranks: {', '.join(map(str, sorted(collected)))}")
    for number, stack in sorted(collected.items()):
        if rank in (None, number):
            beat = beats.get(number)
            where = f"step {beat.step}, {beat.phase.words}" if beat else ""
            print(f"== rank {number}  process {stack.pid}  {where}  at {stack.place or '?'}\n{stack.whole_text()}")
