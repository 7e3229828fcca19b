"""One rank's process: its surroundings, its stop signal, its end and the record of its error.

Imported by the spawner before it forks, so it runs no torch op itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from mgpu.files import FULL, write_json
from mgpu.parallel.base import StopVote
from mgpu.plan import Plan
from mgpu.runs import Run
from mgpu.runs.heartbeat import Board, Ended, Heart, Phase
from mgpu.runs.requests import REOPEN_SIGNAL, STACKS_SIGNAL, STOP_SIGNALS
from mgpu.spec import RunSpec, load_spec
from mgpu.topology.binding import bind_process
from mgpu.train import heart as heartbeat
from mgpu.train.failure import collectives, write_failure

if TYPE_CHECKING:
    from mgpu.checkpoint.checkpointer import Checkpointer

_LINE_BUFFERED = 1
_STALE = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Start:
    """What a rank is told by the spawner it is forked from. `requests` is a pipe: a byte in it asks for the collectives."""

    path: str
    attempt: int
    port: int
    board: int
    requests: int


def run_rank(rank: int, start: Start) -> None:
    """The body of the rank's process; never returns. Every error is recorded for the judge."""
    run = Run(Path(start.path))
    plan = Plan.from_json(json.loads(run.plan_path.read_text()))
    heart = Board(start.board, plan.world).heart(rank)
    spec = load_spec(run.spec_path).spec
    is_script = spec.script is not None
    heart.beat(0, Phase.SCRIPT if is_script else Phase.STARTING)
    heartbeat.attach(heart)
    _write_to(run.log_path(start.attempt, rank))
    if plan.cpus:
        print(f"rank {rank}: {bind_process(plan.cpus[rank])}")
    _answer_requests(heart, run, start, rank)
    _set_environment(run, plan, rank, start)
    torch.set_num_threads(plan.threads)
    linger, code = contextlib.ExitStack(), 1
    try:
        if spec.script is not None:
            _run_script(spec.script.path, spec.script.args)
        else:
            _train(spec, run, plan, rank, start, heart, linger)
        code = 0
    except SystemExit as leaving:
        code = leaving.code & 0xFF if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        if code and not _record(leaving, heart, run, start, rank, code):
            linger.close()
    except BaseException as error:  # the rank ends here, and the record is how its end is explained
        echo = _record(error, heart, run, start, rank, code)
        _show(error)
        if not echo:
            linger.close()
    _leave(code, tidy=is_script or code == 0)


def _record(error: BaseException, heart: Heart, run: Run, start: Start, rank: int, code: int) -> bool:
    """Write the error down, also where torch breaks in: its handler of SIGCHLD raises, wherever Python just is, when a
    loader process has died. Returns whether it is only the echo of a peer's end."""

    def write() -> bool:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stamp = time.monotonic_ns()
        heart.set("failed_ns", stamp)
        step, phase = heart.get("step"), Phase(heart.get("phase")).words
        path = run.failure_path(start.attempt, rank)
        return write_failure(path, error, rank=rank, step=step, phase=phase, monotonic_ns=stamp, code=code)

    try:
        try:
            return write()
        except RuntimeError:  # a signal that was on its way
            return write()
    except OSError as fault:  # a full disk must not hide the error that the log is about to show
        heart.set("unrecorded", fault.errno or errno.EIO)
        print(f"mgpu: the record of this error could not be written: {fault}", file=sys.stderr)
        return True


def _show(error: BaseException) -> None:
    """By the hook that a script has set, if it has; torch's would put the rank before every line of a rank's own log."""
    of_torch = (sys.excepthook.__module__ or "").startswith("torch.")
    hook = sys.__excepthook__ if of_torch else sys.excepthook
    hook(type(error), error, error.__traceback__)


def _leave(code: int, *, tidy: bool) -> None:
    """End at once: a peer that died would otherwise hold up the teardown of the process group.

    `tidy` runs what the user's code has registered for its end (loggers that still hold lines) first.
    """
    try:
        if tidy:
            if code == 0:
                threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
    except BaseException:  # the exit code is settled; what fails now is only shown
        traceback.print_exc()
    finally:
        os._exit(code & 0xFF)


def _write_to(log: Path) -> None:
    """All output, native code's too, goes to `log` unbuffered: a crash loses nothing."""
    log.parent.mkdir(parents=True, exist_ok=True)

    def reopen(signum: int = 0, frame: FrameType | None = None) -> None:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)

    reopen()
    sys.stdout = _unbuffered(1, "replace")
    sys.stderr = _unbuffered(2, "backslashreplace")
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, 0)
    signal.signal(REOPEN_SIGNAL, reopen)
    signal.siginterrupt(REOPEN_SIGNAL, False)
    faulthandler.enable(file=2)


class _Log(io.FileIO):
    """A file that takes nothing while its disk is full: that a line is lost must not end the training."""

    def write(self, block: Any) -> int:
        try:
            return super().write(block)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return len(block)


def _unbuffered(descriptor: int, errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(_Log(descriptor, "wb", closefd=False), encoding="utf-8", errors=errors, write_through=True)


def _answer_requests(heart: Heart, run: Run, start: Start, rank: int) -> None:
    """Stacks are written by a handler in C; the flight recorder by a thread, which sleeps until it is asked."""
    stacks = os.memfd_create("mgpu-stacks")
    os.set_inheritable(stacks, False)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
    heart.set("stacks", stacks)
    heart.set("pid", os.getpid())

    def answer() -> None:
        while os.read(start.requests, 1):
            path = run.collectives_path(start.attempt, rank)
            with contextlib.suppress(OSError):  # a full disk
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, collectives())

    threading.Thread(target=answer, name="mgpu-requests", daemon=True).start()


def _set_environment(run: Run, plan: Plan, rank: int, start: Start) -> None:
    """What torchrun would set, over whatever the shell had left."""
    for name in _STALE:
        os.environ.pop(name, None)
    os.environ.update(plan.env(rank), MASTER_PORT=str(start.port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(TORCHELASTIC_RUN_ID=run.id, TORCHELASTIC_RESTART_COUNT=str(start.attempt - 1))
    os.environ.update(TORCHELASTIC_MAX_RESTARTS="0", MGPU_RUN=start.path)


def _listen_for_stop(stop: StopVote, heart: Heart, preempt: signal.Signals) -> None:
    def ask(signum: int, frame: FrameType | None) -> None:
        stop.asked = True
        heart.set("asked", signum)

    for signum in (signal.SIGTERM, signal.SIGHUP, preempt):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, ask)
    _keep_to_this_process(ask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _hear_stop_signals()


def _keep_to_this_process(handler: Callable[[int, FrameType | None], None]) -> None:
    """A signal to a process that user code forks, and ends, is none of the run's business, from its first moment on."""
    before: list[set[int]] = []

    def hold() -> None:
        before.append(signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS))

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.pop())

    def forget() -> None:
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is handler:
                signal.signal(signum, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=forget)


def _hear_stop_signals() -> None:
    """The spawner has forked this process with them held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _run_script(path: str, args: tuple[str | int | float, ...]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _hear_stop_signals()
    sys.argv = [path, *map(str, args)]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _stop_vote(board: int, plan: Plan) -> StopVote:
    seen = Board(board, plan.world)
    return StopVote(of_peers=lambda: any(beat.asked for beat in seen.all().values()))


def _train(
    spec: RunSpec, run: Run, plan: Plan, rank: int, start: Start, heart: Heart, linger: contextlib.ExitStack
) -> None:
    """Assemble the training, run it, and say how it ended. `linger` is closed by a rank that fails of itself."""
    from mgpu.train.assembly import Seat, assemble

    stop = _stop_vote(start.board, plan)
    _listen_for_stop(stop, heart, spec.watchdog.preempt)
    if spec.precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    training = assemble(spec, Seat(run, plan, rank, start.attempt, start.port, stop))
    linger.callback(_linger, training.saving.checkpointer, heart, spec.watchdog.grace.seconds)
    completed = training.run_to_end()
    heart.beat(training.position.step, Phase.ENDING)
    heart.set("ended", Ended.COMPLETED if completed else Ended.STOPPED)
    text = training.closing() if completed and spec.trace is None else None
    if training.logger is None:
        return
    if text:
        run.tell("note", text=text)
    outcome = "completed" if completed else "stopped"
    run.tell(outcome, attempt=start.attempt, step=training.position.step)
    training.logger.close(outcome)


def _linger(checkpointer: Checkpointer, heart: Heart, seconds: float) -> None:
    """What was saved before the failure is still being written, by a process that ends with this one."""
    if checkpointer.is_saving:
        heart.set("lingers", 1)
        checkpointer.linger(seconds)
        heart.set("lingers", 0)
