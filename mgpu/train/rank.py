"""One rank's process: its surroundings, its stop signal, its end and the record of its error.

Imported by the spawner before it forks, so it runs no torch op itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

import torch

from mgpu.files import write_json
from mgpu.parallel.base import StopVote
from mgpu.plan import Plan
from mgpu.runs import Run
from mgpu.spec import RunSpec, load_spec
from mgpu.train.assembly import Seat, assemble

PR_SET_PDEATHSIG = 1


def run_rank(rank: int, path: str, attempt: int, port: int) -> None:
    """The body of the rank's process. Every error is written to failures/<attempt>/rank-<r>.json, then exit 1."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    run = Run(Path(path))
    plan = Plan.from_json(json.loads(run.plan_path.read_text()))
    _redirect(run.log_path(attempt, rank))
    os.environ.update(plan.env(rank), MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(TORCHELASTIC_RUN_ID=run.id, TORCHELASTIC_RESTART_COUNT="0", MGPU_RUN=path)
    stop = StopVote()
    _listen_for_stop(stop)
    try:
        spec = load_spec(run.spec_path).spec
        if spec.script is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _run_script(spec.script.path, spec.script.args)
        else:
            _train(spec, Seat(run, plan, rank, attempt, port, stop))
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        _leave(code)
    except BaseException as error:  # the rank ends here, and the record is how its end is explained
        write_failure(run.failure_path(attempt, rank), error, rank)
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    """End at once: a peer that died would otherwise hold up the teardown of the process group."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - open for the life of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _listen_for_stop(stop: StopVote) -> None:
    def ask(signum: int, frame: FrameType | None) -> None:
        stop.asked = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def write_failure(path: Path, error: BaseException, rank: int) -> None:
    """Record `error` for the judge: type, text, place in user code, traceback, monotonic stamp."""
    frames = traceback.extract_tb(error.__traceback__)
    library = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    own = [frame for frame in frames if not frame.filename.startswith((*library, "<"))]
    place = (own or list(frames))[-1] if frames else None
    path.parent.mkdir(parents=True, exist_ok=True)
    in_torch = bool(frames) and frames[-1].filename.startswith(library[0])
    record = {
        "rank": rank,
        "type": type(error).__name__,
        "message": str(error),
        "place": f"{place.filename}:{place.lineno} in {place.name}" if place else "",
        "victim": in_torch and isinstance(error, RuntimeError),
        "monotonic_ns": time.monotonic_ns(),
        "traceback": "".join(traceback.format_exception(error)),
    }
    write_json(path, record)


def _run_script(path: str, args: tuple[str | int | float, ...]) -> None:
    sys.argv = [path, *map(str, args)]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _train(spec: RunSpec, seat: Seat) -> None:
    """Assemble the training, run it, and say how it ended."""
    torch.set_num_threads(seat.plan.threads)
    if spec.precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    training = assemble(spec, seat)
    completed = training.run_to_end()
    text = training.closing() if completed else None
    if training.logger is None:
        return
    if text:
        seat.run.record("note", text=text)
    outcome = "completed" if completed else "stopped"
    seat.run.record(outcome, attempt=seat.attempt, step=training.position.step)
    training.logger.close(outcome)
