"""The supervisor through the real command: killed at every level, stopped in every way, hung, restarted, followed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import metrics_of
from test_fault_table import assert_nothing_left, processes_of

from mgpu.cli.inspect_runs import _row
from mgpu.errors import Refusal
from mgpu.launch import control
from mgpu.runs import State

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

TASK = '''
import os, signal, sys, time
import torch
from torch import nn
from mgpu.train import Supervised


def stuck_here():
    time.sleep(10_000)


class Task(Supervised):
    """In step `at`, rank `who` does `what`: at every attempt, or only at the first."""

    def __init__(self, what="nothing", who=1, at=3, delay=0.0, always=False):
        super().__init__(nn.MSELoss())
        self.what, self.who, self.at, self.delay, self.always = what, who, at, delay, always
        self.passes = 0

    def loss(self, model, batch):
        x, y, _ = batch
        self.passes += 1
        time.sleep(self.delay)
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if self.passes == self.at and int(os.environ["RANK"]) == self.who and (first or self.always):
            {"raise": self.fail, "leave": sys.exit, "stuck": stuck_here, "kill": self.kill, "nothing": int}[self.what]()
        return super().loss(model, (x, y))

    def fail(self):
        raise ValueError("bad sample 17")

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)
'''
SLOW = "--set=task.args.delay=0.1"


@pytest.fixture
def supervised(bench):
    """A bench whose task is the one above; micro 2 on 2 ranks, so that a pass is a step."""
    (bench.folder / "task.py").write_text(TASK)
    text = (bench.folder / "toy.yaml").read_text().replace("task: toy.py:Task", "task: {target: task.py:Task}")
    (bench.folder / "toy.yaml").write_text(text.replace("micro: 1", "micro: 2"))
    return bench


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begun(bench, process, step=1):
    """The run that `process` has started, once it has finished `step`."""

    def is_begun():
        assert process.poll() is None, process.communicate()
        return bench.store.list() and bench.latest.last_step >= step

    wait_until(is_begun)
    return bench.latest


def events_of(run, kind):
    return [event for event in run.events() if event["event"] == kind]


def report_of(text):
    return text[text.rindex("\nfailed ") :].strip().splitlines()


def test_one_error_on_four_ranks_ends_the_output_with_its_cause(bench):
    """Case B1."""
    done = bench.mgpu(
        "train", "toy.yaml", "--devices=cpu:4", "--set=task.args.fail=raise", "--set=task.args.fail_rank=2"
    )
    report = report_of(done.stderr)
    assert done.returncode == 1
    assert report[1].startswith("cause  rank 2 on ")
    assert report[1].endswith("ValueError: bad sample 17")
    assert "toy.py:" in report[2] and report[2].endswith("in misbehave")
    assert report[3] == "followed by ranks 0, 1, 3: victims of the above"
    assert report[4] == f"log    {bench.latest.log_path(1, 2)}"
    assert "Traceback" not in done.stderr
    assert "bad sample 17" in bench.latest.log_path(1, 2).read_text()


def test_a_rank_that_leaves_early_with_code_0_is_named_with_its_step(supervised):
    """Case B2."""
    done = supervised.mgpu("train", "toy.yaml", "--set=task.args.what=leave")
    report = report_of(done.stderr)
    assert done.returncode == 1
    assert report[1].endswith("left early with code 0 in step 3 (last finished: 2)")
    assert report[2].strip() == "rank 0 was in step 3"
    assert report[3] == "followed by rank 0: a victim of the above"


def test_a_stuck_rank_is_named_with_function_and_line(supervised):
    """Case B3, and Must show 4: the stacks and the collectives of all ranks are on disk."""
    done = supervised.mgpu("train", "toy.yaml", "--set=task.args.what=stuck", "--set=watchdog.hang=2 seconds")
    run = supervised.latest
    report = report_of(done.stderr)
    assert done.returncode == run.exit_code == 3
    assert "rank 1 on " in report[1]
    assert report[1].endswith("is stuck, in step 3 (last finished: 2)")
    assert "task.py:" in report[2] and report[2].endswith("in stuck_here")
    assert any(line.strip().startswith("rank 0: step 3: wait in a collective") for line in report)
    assert "in stuck_here" in run.stacks_path(1, 1).read_text()
    assert "in stuck_here" not in run.stacks_path(1, 0).read_text()
    numbers = [json.loads(run.collectives_path(1, rank).read_text())[-1]["collective_seq_id"] for rank in (0, 1)]
    assert numbers[0] > numbers[1]
    assert_nothing_left(run)


@pytest.mark.parametrize("others_delay", [None, 0.3])
def test_a_term_to_one_rank_stops_all_at_the_same_step(bench, others_delay):
    """Case F17: to rank 0 alone; to both, 0.3 s apart."""
    process = bench.start("train", "toy.yaml", "--set=task.args.delay=0.1", "--set=duration=20 steps")
    run = begun(bench, process, step=3)
    pids = events_of(run, "attempt_started")[0]["pids"]
    os.kill(pids[0], signal.SIGTERM)
    if others_delay is not None:
        signal.sigtimedwait([], others_delay)
        with contextlib.suppress(ProcessLookupError):  # the ranks may have agreed and ended by then
            os.kill(pids[1], signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert (process.returncode, run.exit_code, run.state) == (143, 143, State.INTERRUPTED), text
    assert run.checkpoint_steps() == [run.last_step]
    assert 3 <= run.last_step < 20
    done = bench.mgpu("resume", "latest", "--set=task.args.delay=0")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics_of(run)] == list(range(1, 21))


@pytest.mark.parametrize("victim", ["front", "node", "spawner"])
def test_a_kill_at_any_level_leaves_nothing_and_the_run_can_be_resumed(bench, victim):
    """Must show 3 and case A2, with loader workers."""
    settings = ["--set=task.args.delay=0.03", "--set=data.workers=1", "--set=checkpoint.every=2 steps"]
    process = bench.start("train", "toy.yaml", *settings)
    run = begun(bench, process, step=2)
    wait_until(run.checkpoint_steps)
    assert len(processes_of(run)) == 9  # node, spawner, store, two ranks, their writers and loaders
    node = events_of(run, "attempt_started")[0]["pid"]
    spawner = next(pid for pid, command in processes_of(run) if "mgpu.launch.spawner" in command)
    os.kill({"front": process.pid, "node": node, "spawner": spawner}[victim], signal.SIGKILL)
    assert_nothing_left(run)
    process.communicate(timeout=20)
    assert process.returncode == (-9 if victim == "front" else 137)
    wait_until(lambda: run.state is State.LOST)
    done = bench.mgpu("resume", "latest", "--set=task.args.delay=0")
    assert done.returncode == 0, done.stderr
    assert run.state is State.COMPLETED
    assert [row["step"] for row in metrics_of(run)] == list(range(1, 13))


def test_what_only_a_kill_of_all_supervisors_leaves_is_reaped_by_the_next_start(bench):
    """A process of the run that has left every group and session, as a user's daemon would."""
    (bench.folder / "job.py").write_text(
        "import subprocess, time\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print('up', flush=True)\n"
        "time.sleep(1000)\n"
    )
    (bench.folder / "job.yaml").write_text("script: job.py\ndevices: cpu:1\n".replace("job.py", "{path: job.py}"))
    process = bench.start("train", "job.yaml")
    wait_until(lambda: bench.store.list() and bench.latest.newest_start())
    run = bench.latest
    wait_until(lambda: run.log_path(1, 0).exists() and "up" in run.log_path(1, 0).read_text())
    supervisors = [pid for pid, command in processes_of(run) if "mgpu.launch" in " ".join(command)]
    for pid in (*supervisors, process.pid):
        os.kill(pid, signal.SIGSTOP)
    for pid in (*supervisors, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=20)
    wait_until(lambda: [command for _, command in processes_of(run)] == [["sleep", "1000"]])
    wait_until(lambda: run.state is State.LOST)
    (bench.folder / "next.yaml").write_text("script: {path: next.py}\ndevices: cpu:1\n")
    (bench.folder / "next.py").write_text("pass\n")
    done = bench.mgpu("train", "next.yaml")
    assert f"ended 1 processes that an earlier start of {run.id} had left" in done.stderr
    assert processes_of(run) == []


def test_a_failed_run_is_started_again_from_its_checkpoint(supervised):
    done = supervised.mgpu(
        "train", "toy.yaml", "--set=task.args.what=kill", "--set=task.args.at=6", "--set=restart.max=2",
        "--set=checkpoint={every: 2 steps, async: false}",
    )  # fmt: skip
    run = supervised.latest
    assert done.returncode == 0, done.stderr
    assert run.attempts == 2
    assert [row["step"] for row in metrics_of(run)] == list(range(1, 13))
    assert [event["from_step"] for event in events_of(run, "restarting")] == [4]
    assert "attempt 1 failed" in done.stderr and "was killed by SIGKILL" in done.stderr
    assert "restart 1 of 2, from the checkpoint of step 4" in done.stderr
    assert done.stdout == f"{run.id}\n"
    pids = [event["pid"] for event in events_of(run, "attempt_started")]
    assert pids[0] == pids[1]


def test_between_two_attempts_a_run_waits_and_has_no_ranks(supervised):
    """Killed at its third pass each time; the second restart waits a second."""
    process = supervised.start(
        "train", "toy.yaml", "--set=task.args.what=kill", "--set=task.args.at=3", "--set=task.args.always=true",
        "--set=restart.max=3", "--set=checkpoint={every: 1 steps, async: false}",
    )  # fmt: skip
    run = begun(supervised, process)
    wait_until(lambda: len(events_of(run, "restarting")) == 2)
    row = _row(run)
    with pytest.raises(Refusal, match="is between two attempts: it has no ranks"):
        control.stacks(run)
    process.communicate(timeout=60)
    assert (row["state"], row["now"]) == ("running", "waits 1 s before restart 2 of 3")
    assert process.returncode == 137 and run.attempts == 4


@pytest.mark.parametrize(
    "settings, attempts, why",
    [
        (["at=4"], 1, "no new checkpoint since the start"),
        (["at=6", "always=true"], 2, "the same error came at step"),
    ],
)
def test_an_error_that_would_come_again_ends_the_restarts(supervised, settings, attempts, why):
    every = "2 steps" if attempts > 1 else "10 steps"
    # Resumed at step 4, the second attempt reaches its sixth pass in step 10; in step 6 of both it is its second.
    if attempts > 1:
        text = (supervised.folder / "task.py").read_text()
        text = text.replace("self.passes == self.at", "EVERY_ATTEMPT(self, model)")
        text += "\n\ndef EVERY_ATTEMPT(task, model):\n    return step_of(task) == task.at\n"
        text += "\n\ndef step_of(task):\n    from mgpu.train import heart\n    return heart._heart.get('step')\n"
        (supervised.folder / "task.py").write_text(text)
    done = supervised.mgpu(
        "train", "toy.yaml", "--set=task.args.what=raise", *(f"--set=task.args.{text}" for text in settings),
        f"--set=checkpoint={{every: {every}, async: false}}", "--set=restart.max=5",
    )  # fmt: skip
    run = supervised.latest
    assert done.returncode == 1
    assert run.attempts == attempts, done.stderr
    assert f"not restarted: {why}" in done.stderr
    assert run.state is State.FAILED


def test_stacks_of_a_healthy_run_and_a_stop_from_elsewhere(bench):
    """Must show 4: asking does no harm. `stop` saves; a run that was detached ends like any other."""
    started = bench.mgpu("train", "toy.yaml", "--detach", SLOW, "--set=duration=500 steps", "--set=data.workers=1")
    assert started.returncode == 0, started.stderr
    run = bench.latest
    assert started.stdout == f"{run.id}\n"
    wait_until(lambda: run.last_step >= 1)
    before = run.last_step
    shown = bench.mgpu("stacks", "latest")
    assert shown.returncode == 0, shown.stderr
    for rank in (0, 1):
        assert f"== rank {rank}  process {events_of(run, 'attempt_started')[0]['pids'][rank]}" in shown.stdout
    assert "in run_to_end" in shown.stdout and "loader process" in shown.stdout
    wait_until(lambda: run.last_step > before)
    row = json.loads(bench.mgpu("ls", "--json").stdout)[0]
    assert (row["state"], row["id"]) == ("running", run.id)
    assert row["now"].startswith("training")
    refused = bench.mgpu("rm", "latest", "--yes")
    assert refused.returncode == 2 and "is running" in refused.stderr
    assert bench.mgpu("resume", "latest").returncode == 2
    stopped = bench.mgpu("stop", "latest")
    assert stopped.returncode == 0, stopped.stderr
    assert (run.state, run.exit_code) == (State.INTERRUPTED, 143)
    assert run.checkpoint_steps() == [run.last_step]
    assert_nothing_left(run)
    again = bench.mgpu("stop", "latest")
    assert again.returncode == 2 and "not running" in again.stderr
    assert bench.mgpu("rm", "latest").returncode == 2
    assert bench.mgpu("rm", "latest", "--yes").stdout == f"{run.id}\n"
    assert bench.store.list() == []


SCRIPT = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], flush=True)
for i in range(3):
    sys.stdout.write(f"\\rbar {i}")
    sys.stdout.flush()
print(end="no newline, no flush")
import atexit
atexit.register(print, "\\nregistered for the end")
"""


def test_output_is_kept_byte_for_byte_and_the_shell_is_overridden_with_one_warning(bench):
    (bench.folder / "job.py").write_text(SCRIPT)
    (bench.folder / "job.yaml").write_text("script: {path: job.py}\ndevices: cpu:2\n")
    done = bench.mgpu("train", "job.yaml", "--json", RANK="7", WORLD_SIZE="9", MASTER_ADDR="nowhere.invalid")
    assert done.returncode == 0, done.stderr
    assert "warning: RANK, WORLD_SIZE, MASTER_ADDR are set in the shell" in done.stderr
    expected = "rank {} of 2 127.0.0.1\n\rbar 0\rbar 1\rbar 2no newline, no flush\nregistered for the end\n"
    for rank in (0, 1):
        assert bench.latest.log_path(1, rank).read_bytes().decode() == expected.format(rank)
    assert expected.format(0).replace("\r", "\n") in done.stderr.replace("\r", "\n")
    told = json.loads(done.stdout)
    assert (told["state"], told["exit_code"], told["cause"]) == ("completed", 0, None)


def test_output_that_no_newline_ended_survives_a_kill(bench):
    (bench.folder / "job.py").write_text(
        "import os, signal\nprint(end='last words')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (bench.folder / "job.yaml").write_text("script: {path: job.py}\ndevices: cpu:1\n")
    done = bench.mgpu("train", "job.yaml", "--json")
    assert done.returncode == 137
    assert bench.latest.log_path(1, 0).read_text() == "last words"
    assert json.loads(done.stdout)["cause"]["details"][-1] == "| last words"
    assert report_of(done.stderr)[0].startswith("failed ")


def test_a_large_log_is_set_aside_and_nothing_of_its_end_is_lost(bench):
    """Rotation: 2.5 MB of numbered lines under a limit of 1 MB, followed by `logs -f` meanwhile."""
    (bench.folder / "job.py").write_text(
        "import time\n"
        "for i in range(50):\n"
        "    for j in range(500):\n"
        "        print(f'{i * 500 + j:099d}')\n"
        "    time.sleep(0.06)\n"
    )
    (bench.folder / "job.yaml").write_text("script: {path: job.py}\ndevices: cpu:1\nlog: {output_mb: 1}\n")
    process = bench.start("train", "job.yaml")
    wait_until(lambda: bench.store.list() and bench.latest.newest_start())
    run = bench.latest
    followed = bench.mgpu("logs", "latest", "-f")
    process.communicate(timeout=60)
    assert process.returncode == 0
    numbers = [int(line) for line in followed.stdout.splitlines()]
    assert numbers == list(range(25_000))
    kept = bench.mgpu("logs", "latest").stdout.splitlines()
    assert run.log_path(1, 0).with_name("rank-0.log.1").stat().st_size > 1 << 20
    assert [int(line) for line in kept] == list(range(25_000 - len(kept), 25_000))
    found = bench.mgpu("logs", "latest", "--grep", "24[0-9]99$").stdout.split()
    assert [int(line) for line in found] == [24_000 + 100 * k + 99 for k in range(10)]
    assert bench.mgpu("logs", "latest", "--since", "1d").stdout.splitlines() == kept
    wrong = bench.mgpu("logs", "latest", "--since", "soon")
    assert wrong.returncode == 2 and "10m" in wrong.stderr


def test_a_script_that_handles_the_notice_itself_gets_it(bench):
    """USR1 to a script that catches it; TERM to one that does not. Both are preempted, 75."""
    (bench.folder / "job.py").write_text(
        "import signal, sys, time\n"
        "def save(signum, frame):\n"
        "    print('saving on', signal.Signals(signum).name)\n"
        "    sys.exit(0)\n"
        "signal.signal(getattr(signal, sys.argv[1]), save)\n"
        "print('up')\n"
        "time.sleep(1000)\n"
    )
    for caught in ("SIGUSR1", "SIGTERM"):
        (bench.folder / "job.yaml").write_text(f"script: {{path: job.py, args: [{caught}]}}\ndevices: cpu:2\n")
        known = len(bench.store.list())
        process = bench.start("train", "job.yaml")
        wait_until(lambda known=known: len(bench.store.list()) > known)
        run = bench.latest
        logs = [run.log_path(1, rank) for rank in (0, 1)]
        wait_until(lambda logs=logs: all(log.exists() and "up" in log.read_text() for log in logs))
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=60)
        assert (process.returncode, run.state) == (75, State.PREEMPTED)
        assert [log.read_text() for log in logs] == [f"up\nsaving on {caught}\n"] * 2


def test_a_signal_right_after_the_start_stops_the_run_in_any_phase(bench):
    """USR1 has no default but death: wherever it lands, the run ends as preempted, or was not begun."""
    for delay in (0.0, 0.4, 1.5):
        process = bench.start("train", "toy.yaml", "--set=duration=500 steps", SLOW)
        wait_until(bench.store.list)
        signal.sigtimedwait([], delay)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=60)
        run = bench.latest
        assert (process.returncode, run.state, run.exit_code) == (75, State.PREEMPTED, 75)
        assert_nothing_left(run)
        bench.store.remove(run)


def test_a_hangup_is_ignored_under_nohup_and_stops_otherwise(bench):
    arguments = [sys.executable, "-m", "mgpu", "train", "toy.yaml", SLOW]
    ignored = subprocess.Popen(
        ["nohup", *arguments], cwd=bench.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    run = begun(bench, ignored, step=1)
    ignored.send_signal(signal.SIGHUP)
    ignored.communicate(timeout=60)
    assert (ignored.returncode, run.state) == (0, State.COMPLETED)
    heard = bench.start("train", "toy.yaml", SLOW)
    wait_until(lambda: len(bench.store.list()) == 2)
    run = begun(bench, heard, step=1)
    heard.send_signal(signal.SIGHUP)
    heard.communicate(timeout=60)
    assert (heard.returncode, run.state) == (129, State.INTERRUPTED)


def test_a_reader_that_leaves_does_not_end_the_run(bench):
    command = f"{sys.executable} -m mgpu train toy.yaml {SLOW} 2>&1 | head -n 1"
    subprocess.run(["bash", "-c", command], cwd=bench.folder, check=True, capture_output=True, timeout=60)
    wait_until(lambda: bench.latest.state is not State.RUNNING)
    assert bench.latest.state is State.COMPLETED


@pytest.mark.slow
def test_starts_and_ends_leave_nothing_behind(bench):
    """Must show 5, a few of them; scripts/soak/cycles.py does a thousand."""
    sys.path.insert(0, str(ROOT / "scripts" / "soak"))
    try:
        from cycles import left_behind, snapshot
    finally:
        sys.path.pop(0)
    (bench.folder / "job.py").write_text("pass\n")
    (bench.folder / "job.yaml").write_text("script: {path: job.py}\ndevices: cpu:2\n")
    before = snapshot()
    for _ in range(5):
        assert bench.mgpu("train", "job.yaml", TMPDIR=str(bench.folder)).returncode == 0
    assert left_behind(before, bench.store) == []
    assert {path.name for path in bench.folder.iterdir()} == {"job.py", "job.yaml", "runs", "toy.py", "toy.yaml"}
