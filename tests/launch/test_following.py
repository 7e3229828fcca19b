"""Following a run: what is shown to whoever comes late, and when it is over."""

import io
import os
import re
import signal
import sys
import time

import pytest
from rich.console import Console

from mgpu.files import append_line
from mgpu.launch import following
from mgpu.launch.following import FollowedLog, LogPrinter, Pauses, follow_run, is_over
from mgpu.launch.output import older
from mgpu.launch.screen import Screen
from mgpu.runs import RunStore
from mgpu.runs.liveness import this_process


@pytest.fixture
def run(tmp_path):
    return RunStore(tmp_path).create("gpt", "name: gpt\n", {"size": 4, "steps": 20}, ["mgpu"])


def gone():
    return {**this_process(), "process_start": 1}


def write_log(run, attempt, text):
    log = run.log_path(attempt, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(text)
    return log


@pytest.fixture
def followed(monkeypatch):
    """Makes logs that are followed; stdout and stderr are taken for one terminal where `shared`."""
    made = []

    def make(run, attempt=1, skip=0, shared=False):
        monkeypatch.setattr(following, "_is_one_file", lambda: shared)
        made.append(FollowedLog(run, 0, attempt, skip, None))
        return made[-1]

    yield make
    for log in made:
        log.close()


class Silent:
    """A rank that prints nothing; notes which attempt it is asked for."""

    attempt = 0

    def show(self, display, *, at_end): ...

    def follow(self, attempt):
        self.attempt = attempt

    def finish_line(self): ...

    def mute(self): ...


def test_between_two_attempts_a_run_is_not_over(run):
    assert is_over(run)  # created, never started
    run.record("attempt_started", attempt=1, **this_process())
    assert not is_over(run)
    run.record("attempt_ended", attempt=1, state="failed", exit_code=1)
    assert not is_over(run)  # its node lives: it may go on
    run.record("restarting", wait=0, number=1, max=1, from_step=0, **this_process())
    assert not is_over(run)
    run.record("attempt_started", attempt=2, **gone())
    assert is_over(run)  # lost
    run.record("attempt_ended", attempt=2, state="failed", exit_code=1)
    assert is_over(run)


def test_an_end_of_long_ago_needs_no_proof_that_its_node_is_gone(run):
    run.record("attempt_started", attempt=1, **{**this_process(), "host": "elsewhere"})
    ended = {"event": "attempt_ended", "attempt": 1, "state": "completed", "exit_code": 0}
    append_line(run.events_path, {**ended, "unix": time.time()})
    assert not is_over(run)
    append_line(run.events_path, {**ended, "unix": time.time() - 3600})
    assert is_over(run)


def test_who_comes_late_sees_the_notes_of_this_attempt_and_its_newest_step(run):
    run.record("starting", **this_process())
    run.record("attempt_started", attempt=1, **this_process())
    run.record("note", text="of the first attempt")
    run.record("attempt_ended", attempt=1, state="failed", exit_code=1, step=6)
    run.record("restarting", wait=0, number=1, max=1, from_step=4, **this_process())
    run.record("note", text="a rank was quicker than the node")
    run.record("attempt_started", attempt=2, **this_process())
    run.record("training", attempt=2, start_step=4, total_steps=20)
    run.record("note", text="the checkpoint of step 6 was not saved")
    for step in range(1, 8):
        append_line(run.metrics_path, {"step": step, "loss": step / 2})
    output = Silent()
    screen = Screen(run, 1, output)
    screen.console = Console(file=io.StringIO(), width=200)
    screen.display.open(run, resume_step=7)
    screen.catch_up()
    append_line(run.metrics_path, {"step": 8, "loss": 4.0})
    screen.show()
    assert screen.console.file.getvalue().splitlines() == [
        "a rank was quicker than the node",
        "the checkpoint of step 6 was not saved",
        "step 7/20  loss 3.5000",
        "step 8/20  loss 4.0000",
    ]
    assert (screen.attempt, output.attempt) == (2, 2)


def test_a_step_of_an_earlier_attempt_is_not_the_newest_of_this_one(run):
    run.record("attempt_started", attempt=1, **this_process())
    run.record("training", attempt=1, start_step=7, total_steps=20)
    append_line(run.metrics_path, {"step": 7, "loss": 3.5})
    screen = Screen(run, 1, Silent())
    screen.console = Console(file=io.StringIO(), width=200)
    screen.catch_up()
    assert screen.console.file.getvalue() == ""


def test_whole_lines_matches_and_bytes_as_they_come(monkeypatch):
    def printed(printer, *blocks):
        stdout = io.TextIOWrapper(io.BytesIO())
        monkeypatch.setattr(sys, "stdout", stdout)
        shown = []
        for block in blocks:
            printer.write(block)
            shown.append(stdout.buffer.getvalue())
        printer.close()
        return [*shown, stdout.buffer.getvalue()]

    assert printed(LogPrinter(None), b"a\rb", b"c\nd") == [b"a\rb", b"a\rbc\nd", b"a\rbc\nd"]
    assert printed(LogPrinter(None, whole_lines=True), b"a\rb", b"c\nd") == [b"", b"a\rbc\n", b"a\rbc\nd"]
    loss = LogPrinter(re.compile(b"loss"))
    assert printed(loss, b"x\r", b"loss 1\ny\nlo", b"ss 2") == [
        b"",
        b"x\rloss 1\n",
        b"x\rloss 1\n",
        b"x\rloss 1\nloss 2\n",
    ]


def test_an_ended_run_shows_its_log_its_newest_step_and_its_end(run, followed, capfdbinary):
    run.record("attempt_started", attempt=1, **gone())
    run.record("training", attempt=1, start_step=0, total_steps=20)
    append_line(run.metrics_path, {"step": 3, "loss": 1.5})
    older(write_log(run, 1, b"moved\n")).write_bytes(b"first, ")
    cause = {"kind": "error", "rank": 1, "host": "a", "what": "ValueError: bad", "place": "", "log": "", "victims": []}
    run.record("attempt_ended", attempt=1, state="failed", exit_code=1, step=3, cause=cause)
    follow_run(run, followed(run, skip=2), time.sleep)
    out, err = capfdbinary.readouterr()
    assert out == b"rst, moved\n"
    lines = err.decode().splitlines()
    assert lines[0].startswith(f"{run.id}  attempt 1: ")
    assert lines[1] == "step 3/20  loss 1.5000"
    assert lines[2:] == [
        f"failed  {run.id}  after step 3, exit 1",
        "cause  rank 1 on a: ValueError: bad",
        f"next   mend it, then: mgpu resume {run.path}  (from the beginning: no checkpoint was written yet)",
    ]


def test_the_log_is_followed_into_the_next_attempt(run, followed, capfdbinary):
    write_log(run, 1, b"one\n")
    log = followed(run)
    log.show(None, at_end=False)
    with run.log_path(1, 0).open("ab") as stream:
        stream.write(b"late\n")
    write_log(run, 2, b"two\n")
    log.follow(2)
    log.show(None, at_end=True)
    assert capfdbinary.readouterr().out == b"one\nlate\ntwo\n"


def test_people_text_never_begins_in_the_middle_of_a_bar(tmp_path, followed, capfdbinary):
    """stdout and stderr are one terminal, and a script leaves its line open."""
    run = RunStore(tmp_path).create("job", "name: job\n", {}, ["mgpu"])
    write_log(run, 1, b"\rbar 1\rbar 2")
    log = followed(run, shared=True)
    log.show(None, at_end=False)
    assert capfdbinary.readouterr() == (b"\rbar 1\rbar 2", b"")
    log.finish_line()
    log.finish_line()
    assert capfdbinary.readouterr() == (b"", b"\n")


def test_an_interrupt_while_an_object_is_cleared_up_is_not_lost(monkeypatch):
    class Last:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.exc_type))
    before = signal.getsignal(signal.SIGINT)
    try:
        pause = Pauses()
        pause(0.0)
        Last()
        assert dropped == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            pause(0.0)
    finally:
        signal.signal(signal.SIGINT, before)
