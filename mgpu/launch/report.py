"""The last thing a run prints: its result and what to do next, or the cause of its end. For people, and as JSON."""

from __future__ import annotations

import errno
import os
from typing import Any

from rich.console import Console

from mgpu.files import has_room
from mgpu.runs import Run, State, shell_reference
from mgpu.runs.reference import folder_option

_LONGEST, _TALLEST, _WIDEST = 2000, 20, 500


def print_report(run: Run, attempt: int, code: int | None, console: Console) -> None:
    """The result of the newest attempt, from `attempt` on. `code` is None where nobody could tell one."""
    if not run.events_path.exists():
        gone = f"{run.path} was removed"
        if code is not None:
            gone = f"failed  {run.id}  exit {code}\ncause  {gone} while the run was under way"
        console.print(gone, style="red", markup=False, soft_wrap=True)
        return
    ended = _ended(run)
    state, step = ended.get("state", str(run.state)), run.last_step
    if state == State.COMPLETED:
        when = f"  at step {step}" if step else ""
        console.print(f"completed  {run.id}{when}", style="green", markup=False, soft_wrap=True)
        named = shell_reference(run, may_be_latest=True)
        commands = (f"mgpu show {named}", f"mgpu logs {named}", f"mgpu ls{folder_option(run)}")
        console.print("next:  " + "\n       ".join(commands), markup=False, soft_wrap=True)
        return
    facts = ([f"after step {step}"] if step else []) + ([f"exit {code}"] if code is not None else [])
    lines = [f"{state}  {run.id}  {', '.join(facts)}".rstrip()]
    if not ended and not has_room(run.path):
        lines[0] += f": how it ended could not be written down ({os.strerror(errno.ENOSPC)})"
        lines.append(f"help   make room where {run.path} lies, then resume")
    elif not ended:
        lines[0] += ": its supervisor ended without a word"
        lines.append(f"log    {run.node_log_path(attempt, 0)}")
    cause = ended.get("cause")
    if cause is not None and cause["kind"] != "unfinished" and state in (State.FAILED, State.LOST):
        lines += cause_lines(cause)
        if ended.get("not_restarted"):
            lines.append(f"not restarted: {ended['not_restarted']}")
        from_where = "" if run.last_saved() is not None else "  (from the beginning: no checkpoint was written yet)"
        lines.append(f"next   {_mend(cause)}mgpu resume {shell_reference(run)}{from_where}")
        console.print("\n".join(lines), style="red", markup=False, soft_wrap=True)
        return
    saved = run.last_saved()
    lines.append(f"saved  step {saved}" if saved is not None else "saved  nothing: no checkpoint was written yet")
    lines.append(f"continue:  mgpu resume {shell_reference(run)}")
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def attempt_lines(run: Run, attempt: int) -> list[str]:
    """How an attempt failed that is followed by another."""
    ended = _ended(run, attempt)
    cause = ended.get("cause")
    head = f"attempt {attempt} failed  {_when(ended.get('step', 0))}exit {ended.get('exit_code')}"
    return [head, *(cause_lines(cause) if cause else [])]


def cause_lines(cause: dict[str, Any]) -> list[str]:
    """Rank, host, error, place, who followed, and where to read on. As much of the error as fits a screen."""
    who = "the run" if cause["rank"] is None else f"rank {cause['rank']}"
    host = f" on {cause['host']}" if cause.get("host") else ""
    lines = [f"cause  {who}{host}: {_shown(cause['what'])}"]
    lines += [f"place  {cause['place']}"] if cause["place"] else []
    lines += [f"       {_shown(detail)}" for detail in cause.get("details", ())]
    if cause["victims"]:
        several = len(cause["victims"]) > 1
        who = (
            f"ranks {', '.join(map(str, cause['victims']))}: victims"
            if several
            else f"rank {cause['victims'][0]}: a victim"
        )
        lines.append(f"followed by {who} of the above")
    lines += [f"log    {cause['log']}"] if cause["log"] else []
    lines += [f"help   {cause['advice']}"] if cause.get("advice") else []
    return lines


def as_json(run: Run, code: int) -> dict[str, Any]:
    """The same for scripts."""
    ended = _ended(run)
    return {
        "id": run.id,
        "path": str(run.path),
        "state": ended.get("state", str(run.state)),
        "exit_code": code,
        "attempts": run.attempts,
        "step": run.last_step,
        "checkpoint": run.last_saved(),
        "cause": ended.get("cause"),
        "not_restarted": ended.get("not_restarted"),
    }


def _ended(run: Run, attempt: int | None = None) -> dict[str, Any]:
    """The newest `attempt_ended` event, unless another attempt began after it."""
    for event in reversed(run.events()):
        if event.get("event") == "attempt_started" and attempt is None:
            return {}
        if event.get("event") == "attempt_ended" and attempt in (None, event.get("attempt")):
            return dict(event)
    return {}


def _shown(text: str) -> str:
    """Its beginning, without what a terminal would take for commands."""
    plain = "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)
    lines = plain.splitlines()
    short = "\n".join(line[:_WIDEST] for line in lines[:_TALLEST])[:_LONGEST]
    return f"{short} ... ({len(plain):,} characters; the log has all)" if len(short) < len(plain.rstrip()) else short


def _when(step: int) -> str:
    return f"after step {step}, " if step else ""


def _mend(cause: dict[str, Any]) -> str:
    return "mend it, then: " if cause["kind"] in ("error", "exit", "left early") else ""
