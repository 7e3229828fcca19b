"""From a spec, or a run, to a started attempt. What can be refused is refused here, before a process starts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu.errors import MgpuError, PlanError, Problem, Refusal, SpecError
from mgpu.files import write_atomic, write_json
from mgpu.launch.stopping import SignalRelay
from mgpu.plan import Plan, listen, make_plan
from mgpu.runs import Run, RunStore, State, shell_reference
from mgpu.runs.liveness import this_process
from mgpu.spec import LoadedSpec, load_spec
from mgpu.topology import Topology


def lay_out(loaded: LoadedSpec) -> Plan:
    """The plan for this machine; faults carry the spec's line."""
    spec = loaded.spec
    if spec.script is not None and not Path(spec.script.path).is_file():
        raise SpecError([loaded.problem(("script", "path"), f"no file {spec.script.path}")])
    try:
        return make_plan(spec, Topology.detect())
    except PlanError as error:
        raise SpecError([loaded.problem(error.key, error.message, error.hint)]) from error
    except SpecError as error:
        raise SpecError([_placed(loaded, problem) for problem in error.problems]) from error


def _placed(loaded: LoadedSpec, problem: Problem) -> Problem:
    return problem if problem.line else loaded.problem(problem.key, problem.message, problem.hint)


def _hold_port(loaded: LoadedSpec, plan: Plan) -> socket.socket:
    try:
        return listen(plan.port)
    except PlanError as error:
        raise SpecError([loaded.problem(error.key, error.message, error.hint)]) from error


def show_plan(path: Path, overrides: Sequence[str], *, as_json: bool) -> None:
    """Print the plan on stdout."""
    loaded = load_spec(path, overrides)
    plan = lay_out(loaded)
    if as_json:
        print(json.dumps(plan.to_json(), indent=2))
        return
    for label, text in plan.explain():
        print(f"{label:<14}{text}")


def train(path: Path, overrides: Sequence[str], runs_dir: Path, *, detach: bool = False, as_json: bool = False) -> int:
    """Start a new run and follow it to its end; returns the exit code."""
    relay = _listening()
    loaded = load_spec(path, overrides)
    plan = lay_out(loaded)
    listener = _hold_port(loaded, plan)
    with _writing_into(runs_dir):
        run = RunStore(runs_dir).create(
            loaded.spec.name, loaded.dump(), plan.to_json(), sys.argv, spec_source=str(path)
        )
        run.record("starting", **this_process())

    def undo() -> None:
        RunStore(runs_dir).remove(run)

    return _follow(run, 1, loaded, plan, listener, relay, undo, detach, as_json, source=str(path))


def resume(
    reference: str, overrides: Sequence[str], runs_dir: Path, *, detach: bool = False, as_json: bool = False
) -> int:
    """Start a new attempt of a run; returns its exit code."""
    relay = _listening()
    run = RunStore(runs_dir).find(reference)
    with _writing_into(run.path), run.held():
        state = run.state
        if state is State.RUNNING:
            raise Refusal(f"{run.id} is running", hint=f"stop it first: mgpu stop {shell_reference(run)}")
        if state is State.COMPLETED and not overrides:
            more = f"mgpu resume {shell_reference(run)} --set duration='N steps'"
            raise Refusal(f"{run.id} is complete", hint=f"to train on: {more}")
        loaded = load_spec(run.spec_path, overrides)
        plan = lay_out(loaded)
        listener = _hold_port(loaded, plan)
        changed = _changes(run.spec_path, loaded)
        before = {path: path.read_text() for path in (run.spec_path, run.plan_path) if path.exists()}
        write_atomic(run.spec_path, loaded.dump())
        write_json(run.plan_path, plan.to_json())
        run.record("resumed", command=sys.argv, overrides=list(overrides))
        run.record("starting", **this_process())

    def undo() -> None:
        for path, text in before.items():
            write_atomic(path, text)

    attempt = run.attempts + 1
    code = _follow(run, attempt, loaded, plan, listener, relay, undo, detach, as_json, told=changed)
    if code and changed and not detach and _was_unfit(run, attempt):
        undo()
        print(f"{run.id} has its spec of before again", file=sys.stderr)
    return code


def _was_unfit(run: Run, attempt: int) -> bool:
    """Whether `attempt` failed before it trained, of an error that would come again."""
    events = [event for event in run.events() if event.get("attempt") == attempt]
    causes = [event.get("cause") for event in events if event.get("event") == "attempt_ended"]
    is_certain = any(cause and cause.get("deterministic") for cause in causes)
    return is_certain and not any(event.get("event") == "training" for event in events)


def _changes(before: Path, after: LoadedSpec) -> list[str]:
    """What a resume changes in the spec, for people."""
    try:
        old, new = _leaves(load_spec(before).document), _leaves(after.document)
    except MgpuError:  # it cannot be read any more, so that nothing can be compared
        return []
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    texts = [f"{key}: {new.get(key, 'left out')} (was {old.get(key, 'left out')})" for key in keys]
    return [f"changed by this resume: {'; '.join(texts)}"] if texts else []


def _leaves(document: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(document, dict) or not document:
        return {prefix: document}
    found: dict[str, Any] = {}
    for key, value in document.items():
        found |= _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    return found


@contextlib.contextmanager
def _writing_into(folder: Path) -> Iterator[None]:
    """A folder that cannot be written is refused: nothing has been started yet."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename or folder} cannot be written: {error.strerror or error}"
        raise Refusal(text, hint="make room or mend its rights, or name another folder: --runs-dir") from error


def _listening() -> SignalRelay:
    """From the first moment on: USR1 would otherwise kill this process while it still reads the spec."""
    relay = SignalRelay()
    relay.listen()
    return relay


def _follow(
    run: Run,
    attempt: int,
    loaded: LoadedSpec,
    plan: Plan,
    listener: socket.socket,
    relay: SignalRelay,
    undo: Callable[[], None],
    detach: bool,
    as_json: bool,
    source: str | None = None,
    told: Sequence[str] = (),
) -> int:
    """Start the node at once, and prepare the rest while it imports torch. `undo` takes back what a refusal finds done."""
    from mgpu.launch.front import Front, refusals
    from mgpu.launch.reaping import reap_leftovers

    front = Front(run, attempt, relay, detach=detach, say_id=not as_json)
    reaped = reap_leftovers(run)
    front.start(listener)
    try:
        if source is not None:
            from mgpu.runs.provenance import write_provenance

            write_provenance(run, sys.argv, source)
        front.console.print(
            f"{run.id}  attempt {attempt}: {plan.strategy} on {plan.world} x {plan.device}", markup=False
        )
        for note in (*told, *plan.notes, *stale_names(os.environ), *reaped):
            front.console.print(note, markup=False)
    except BaseException:
        front.abandon()
        raise
    code = front.watch(resume_step=run.last_step)
    faults = refusals(run)
    if faults:
        run.record("refused", attempt=attempt)
        undo()
        raise SpecError(loaded.problem(tuple(f["key"]), f["message"], f["hint"]) for f in faults)
    worker = run.history().supervisor
    if not detach and worker is not None and worker["event"] == "starting":
        # The node ended before it could tell.
        run.record("attempt_ended", attempt=attempt, state=State.LOST, exit_code=code, step=run.last_step)
    from mgpu.launch.report import as_json as json_report
    from mgpu.launch.report import print_report

    if as_json:
        print(json.dumps(json_report(run, code), indent=2))
    if detach and code == 0:
        named = shell_reference(run)
        front.console.print(f"runs on by itself; mgpu logs -f {named} · mgpu stop {named}", markup=False)
    else:
        print_report(run, attempt, code, front.console)
    return code


def stale_names(environ: Mapping[str, str]) -> list[str]:
    """One warning of what the shell has set and every rank is about to get anew."""
    found = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in environ]
    if not found:
        return []
    verb = "is" if len(found) == 1 else "are"
    return [f"warning: {', '.join(found)} {verb} set in the shell; each rank gets its own value"]
