"""`mgpu ls`, `mgpu show`, `mgpu schema`: parse, call, render."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgpu.cli.training import RUNS_DIR, RunsDirOption

if TYPE_CHECKING:
    from mgpu.runs import Run

RunArgument = Annotated[str, typer.Argument(help="An id, a unique prefix of one, a path, or latest.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command("ls", epilog="Example:  mgpu ls --json")(list_runs)
    app.command(epilog="Example:  mgpu show latest")(show)
    app.command(epilog="Example:  mgpu schema > mgpu.schema.json")(schema)


def list_runs(runs_dir: RunsDirOption = RUNS_DIR, json_: JsonOption = False) -> None:
    """List the runs, newest first. Of one that is running, what it does right now."""
    from mgpu.runs import RunStore

    rows = [_row(run) for run in RunStore(runs_dir).list()]
    if json_:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        now = f"  {row['now']}" if row["now"] else ""
        print(f"{row['id']:<48}  {row['state']:<12}  step {row['step']}{now}")


def _row(run: Run) -> dict[str, Any]:
    from mgpu.runs import State

    state = run.state
    row = {"id": run.id, "state": str(state), "step": run.last_step, "path": str(run.path), "now": None}
    if state is State.RUNNING:
        from mgpu.launch.control import live_beats

        beats, restarting = live_beats(run), run.history().supervisor
        if restarting is not None and restarting["event"] == "restarting":
            row["now"] = (
                f"waits {restarting['wait']:.0f} s before restart {restarting['number']} of {restarting['max']}"
            )
        elif beats:
            slowest = min(beats.values(), key=lambda beat: (beat.step, beat.beat_ns))
            age = (time.monotonic_ns() - slowest.beat_ns) / 1e9
            row["now"] = f"{slowest.phase.words}, {age:.0f} s ago"
            row["step"] = max(run.last_step, slowest.step - 1)
    return row


def show(run: RunArgument, runs_dir: RunsDirOption = RUNS_DIR, json_: JsonOption = False) -> None:
    """Show one run: state, plan, newest metrics, checkpoints, failures."""
    from mgpu.runs import RunStore

    found = RunStore(runs_dir).find(run)
    facts: dict[str, Any] = {
        "id": found.id,
        "path": str(found.path),
        "state": str(found.state),
        "attempts": found.attempts,
        "step": found.last_step,
        "exit_code": found.exit_code,
        "strategy": found.plan().get("strategy"),
        "world": found.plan().get("world"),
        "device": found.plan().get("device"),
        "evaluation": _last(found.events(), "evaluated"),
        "checkpoints": sorted(path.name for path in found.checkpoints.glob("step-*")),
        "cause": (_last(found.events(), "attempt_ended") or {}).get("cause"),
    }
    if json_:
        print(json.dumps(facts, indent=2))
        return
    from mgpu.launch.report import cause_lines

    cause = facts.pop("cause")
    for label, value in facts.items():
        if value not in (None, []):
            print(f"{label:<14}{_text(value)}")
    if cause is not None and cause["kind"] != "unfinished":
        print("\n".join(cause_lines(cause)))


def schema() -> None:
    """Print the spec's JSON Schema, for editors."""
    from mgpu.spec import json_schema

    print(json.dumps(json_schema(), indent=2))


def _last(events: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((event for event in reversed(events) if event.get("event") == kind), None)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return "  ".join(f"{key} {item}" for key, item in value.items() if key not in ("event", "time", "unix"))
    return str(value)
