"""How a run is called in a command that is to be pasted into the shell it is read in."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from mgpu.runs.run import Run
from mgpu.runs.store import LATEST, RunStore

DEFAULT_FOLDER = Path("runs")
"""Where commands look for runs unless `--runs-dir` names another folder; relative to the current directory."""


def shell_reference(run: Run, *, may_be_latest: bool = False) -> str:
    """What RUN has to be for `run`, quoted for the shell: its id where commands look anyway, elsewhere its path.

    With `may_be_latest` it is `latest` where that means this run now.
    """
    if not _is_default(run.path.parent):
        return shlex.quote(_shortest(run.path, is_run=True))
    if may_be_latest and RunStore(DEFAULT_FOLDER).list()[:1] == [Run(DEFAULT_FOLDER / run.id)]:
        return LATEST
    return shlex.quote(run.id)


def folder_option(run: Run) -> str:
    """What a command about all runs needs to find the folder of `run`: ` --runs-dir FOLDER`, or nothing."""
    return "" if _is_default(run.path.parent) else f" --runs-dir {shlex.quote(_shortest(run.path.parent))}"


def _is_default(folder: Path) -> bool:
    try:
        return os.path.samefile(folder, DEFAULT_FOLDER)
    except OSError:  # one of them is gone, or was never there
        return folder == DEFAULT_FOLDER.absolute()


def _shortest(path: Path, *, is_run: bool = False) -> str:
    """The absolute path, or the one from the current directory where that is shorter and means the same."""
    whole = str(path)
    try:
        near = os.path.relpath(path)
        # Behind a link `..` is another folder than it reads.
        is_same = os.path.samefile(near, path)
    except OSError:
        return whole
    if near.startswith(("-", "~")) or (is_run and "/" not in near):
        near = f"./{near}"  # no option, no home, and no id in the default folder
    return near if is_same and len(near) < len(whole) else whole
