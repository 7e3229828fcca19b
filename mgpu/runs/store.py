"""The folder that holds all runs: making them, finding them by what a person types, removing them."""

from __future__ import annotations

import difflib
import os
import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mgpu.errors import Refusal, RunNotFound
from mgpu.files import sync_folder, write_atomic, write_json
from mgpu.runs.run import Run
from mgpu.runs.states import State

LATEST = "latest"
_SHOWN = 5
_ALIKE = 0.6

# `RunStore.list` hides the built-in name inside its class.
_Runs = list[Run]


class RunStore:
    """The runs under `root`, which is made with the first run. Names that begin with a dot are runs in the making, or
    on their way out."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()

    def create(
        self, name: str, spec_text: str, plan: dict[str, Any], command: list[str], *, spec_source: str | None = None
    ) -> Run:
        """A new run with the id `<name>-<YYYYMMDD-HHMMSS>-<4 hex digits>` (UTC).

        It appears whole or not at all: it is written under a dot name, made durable, and renamed. Any number of
        processes may create runs at once. `spec_source` is the file the spec came from, for the `created` event.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        while True:
            id_ = f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
            making, made = self.root / f".{id_}", self.root / id_
            try:
                making.mkdir()
            except FileExistsError:
                continue
            try:
                _fill(Run(making), spec_text, plan, command, spec_source)
                taken = made.exists() or not _renamed(making, made)
            except BaseException:
                shutil.rmtree(making, ignore_errors=True)
                raise
            if not taken:
                sync_folder(self.root)
                return Run(made)
            shutil.rmtree(making)

    def find(self, reference: str) -> Run:
        """The run that `reference` means: an id, a unique prefix of one, the path of a run or a file in it, `latest`.

        Raises RunNotFound, with the runs that were meant if several are, or the nearest ids if none is.
        """
        if not reference:
            raise RunNotFound("no run is named", hint=f"write an id, the beginning of one, a path, or `{LATEST}`")
        runs = self.list()
        if reference == LATEST:
            if not runs:
                raise RunNotFound(f"there are no runs in {self.root}")
            return runs[0]
        for run in runs:
            if run.id == reference:
                return run
        path = Path(os.path.expanduser(reference))
        for folder in (path, path.parent):
            if _is_run(folder) and (folder == path or path.is_file()):
                return Run(folder.resolve())
        matching = [run for run in runs if run.id.startswith(reference)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise RunNotFound(f"{len(matching)} runs begin with {reference!r}", hint=f"which of {_ids(matching)}?")
        raise RunNotFound(f"no run {reference!r} in {self.root}", hint=_nearest(reference, runs))

    def remove(self, run: Run) -> None:
        """Delete a run and all its files, checkpoints too. Refuses one that is running.

        It is renamed first, so that it is gone at once: nothing finds half a run, however long the deletion takes.
        """
        leaving = run.path.parent / f".removing-{run.id}-{secrets.token_hex(4)}"
        try:
            with run.held():
                if run.state is State.RUNNING:
                    from mgpu.runs.reference import shell_reference

                    raise Refusal(f"{run.id} is running", hint=f"stop it first: mgpu stop {shell_reference(run)}")
                run.path.rename(leaving)
        except FileNotFoundError:
            raise RunNotFound(f"{run.id} is not there any more") from None
        shutil.rmtree(leaving)

    def list(self) -> _Runs:
        """All runs, newest first. Whatever else lies in the folder is passed over."""
        try:
            names = os.listdir(self.root)
        except OSError:
            return []
        runs = [Run(self.root / name) for name in names if not name.startswith(".") and _is_run(self.root / name)]
        return sorted(runs, key=lambda run: (run.created_unix, run.id), reverse=True)


def _fill(run: Run, spec_text: str, plan: dict[str, Any], command: list[str], spec_source: str | None) -> None:
    write_atomic(run.spec_path, spec_text)
    write_json(run.plan_path, plan)
    run.record("created", command=command, spec=spec_source)
    sync_folder(run.path)


def _renamed(old: Path, new: Path) -> bool:
    """False if `new` is a run already: a folder that holds something is never replaced by a rename."""
    try:
        old.rename(new)
    except OSError:
        if new.exists():
            return False
        raise
    return True


def _is_run(folder: Path) -> bool:
    try:
        return (folder / "events.jsonl").is_file() or (folder / "plan.json").is_file()
    except OSError:
        return False


def _ids(runs: _Runs) -> str:
    shown = ", ".join(run.id for run in runs[:_SHOWN])
    return f"{shown}, … ({len(runs) - _SHOWN} more)" if len(runs) > _SHOWN else shown


def _nearest(reference: str, runs: _Runs) -> str:
    """The ids that look most like `reference`, or else the newest ones."""

    def likeness(run: Run) -> float:
        # A mistyped name is much shorter than an id: only as much of the id is compared as was typed.
        return difflib.SequenceMatcher(None, reference, run.id[: len(reference)]).ratio()

    likenesses = {run.id: likeness(run) for run in runs}
    best = max(likenesses.values(), default=0.0)
    if best >= _ALIKE:
        near = [id_ for id_, value in likenesses.items() if value > best - 0.05]
        return f"did you mean {' or '.join(near[:3])}?"
    return f"the newest: {_ids(runs)}" if runs else "there are none yet"
