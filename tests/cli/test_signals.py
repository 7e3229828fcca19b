"""Signals to whichever processes of a run, and commands while it is only starting."""

import os
import signal

import pytest
from test_fault_table import assert_nothing_left, processes_of
from test_supervision import SLOW, begun, events_of, wait_until

from mgpu.errors import EXIT_REFUSED
from mgpu.runs import State

pytestmark = pytest.mark.slow

LONG = (SLOW, "--set=duration=500 steps", "--set=data.workers=1", "--set=checkpoint.every=400 steps")


def spawner_of(run):
    return next(pid for pid, command in processes_of(run) if "mgpu.launch.spawner" in command)


@pytest.mark.parametrize(
    ("signum", "code", "state"),
    [
        (signal.SIGTERM, 143, State.INTERRUPTED),
        (signal.SIGHUP, 129, State.INTERRUPTED),
        (signal.SIGUSR1, 75, State.PREEMPTED),
    ],
)
def test_a_signal_to_every_process_of_a_run_is_a_stop_with_a_save(bench, signum, code, state):
    """As a scheduler sends it: front, node, spawner, store, ranks, writers and loaders."""
    process = bench.start("train", "toy.yaml", *LONG)
    run = begun(bench, process, step=2)
    everybody = [pid for pid, _ in processes_of(run)]
    assert len(everybody) == 9
    for pid in (process.pid, *everybody):
        os.kill(pid, signum)
    _, text = process.communicate(timeout=60)
    assert (process.returncode, run.state, run.exit_code) == (code, state, code), text
    assert run.checkpoint_steps() == [run.last_step]
    assert_nothing_left(run)


def test_a_term_to_the_spawner_alone_stops_the_run(bench):
    process = bench.start("train", "toy.yaml", *LONG)
    run = begun(bench, process, step=2)
    os.kill(spawner_of(run), signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert (process.returncode, run.state) == (143, State.INTERRUPTED), text
    assert run.checkpoint_steps() == [run.last_step]


def test_a_hangup_of_one_rank_stops_all_with_a_save(bench):
    process = bench.start("train", "toy.yaml", *LONG)
    run = begun(bench, process, step=2)
    os.kill(events_of(run, "attempt_started")[0]["pids"][1], signal.SIGHUP)
    _, text = process.communicate(timeout=60)
    assert (process.returncode, run.state) == (129, State.INTERRUPTED), text
    assert run.checkpoint_steps() == [run.last_step]


def test_a_run_that_is_only_starting_can_be_stopped_but_not_removed(bench):
    process = bench.start("train", "toy.yaml", *LONG)
    wait_until(bench.store.list)
    run = bench.latest
    wait_until(lambda: run.state is State.RUNNING)
    assert run.newest_start() is None
    removed = bench.mgpu("rm", run.id, "--yes")
    stopped = bench.mgpu("stop", run.id)
    process.communicate(timeout=60)
    assert (removed.returncode, stopped.returncode) == (EXIT_REFUSED, 0), (removed.stderr, stopped.stderr)
    assert f"{run.id} is running" in removed.stderr
    assert (process.returncode, run.state) == (143, State.INTERRUPTED)
    assert_nothing_left(run)


def test_two_resumes_at_once_make_one_attempt(bench):
    run = bench.train(duration="4 steps")
    commands = [bench.start("resume", run.id, "--set=duration=8 steps") for _ in range(3)]
    texts = [command.communicate(timeout=60)[1] for command in commands]
    assert sorted(command.returncode for command in commands) == [0, EXIT_REFUSED, EXIT_REFUSED], texts
    assert (run.attempts, run.last_step, run.state) == (2, 8, State.COMPLETED)
    assert [event["attempt"] for event in events_of(run, "attempt_started")] == [1, 2]


def test_a_resume_that_is_refused_after_its_start_leaves_the_run_as_it_was(bench):
    run = bench.train(duration="4 steps")
    before = run.spec_path.read_text(), run.plan_path.read_text()
    done = bench.mgpu("resume", run.id, "--set=duration=8 steps", "--set=task=toy.py:NoSuchTask")
    assert (done.returncode, run.state, run.exit_code) == (EXIT_REFUSED, State.COMPLETED, 0), done.stderr
    assert (run.spec_path.read_text(), run.plan_path.read_text()) == before
    assert bench.mgpu("resume", run.id, "--set=duration=8 steps").returncode == 0


def test_a_run_without_its_plan_can_be_resumed(bench):
    run = bench.train(duration="4 steps")
    run.plan_path.unlink()
    done = bench.mgpu("resume", run.id, "--set=duration=8 steps")
    assert (done.returncode, run.last_step) == (0, 8), done.stderr


POOLS = """\
import multiprocessing
import os
import signal
import time

from toy import Task as Plain


class Task(Plain):
    '''Keeps a helper process of its own, and ends one in every pass, as a pool does.'''

    def __init__(self):
        super().__init__()
        self.context = multiprocessing.get_context("fork")
        self.kept = self.context.Process(target=time.sleep, args=(300,), daemon=True)
        self.kept.start()

    def loss(self, model, batch):
        passing = self.context.Process(target=time.sleep, args=(300,), daemon=True)
        passing.start()
        passing.terminate()
        passing.join()
        assert passing.exitcode == -signal.SIGTERM
        return super().loss(model, batch)
"""


def test_processes_that_user_code_forks_and_ends_are_none_of_the_runs_business(bench):
    (bench.folder / "pools.py").write_text(POOLS)
    run = bench.train(task="pools.py:Task", duration="6 steps", evaluate={"every": "2 steps"}, data__eval="toy.py:Data")
    assert (run.state, run.last_step) == (State.COMPLETED, 6)
    assert events_of(run, "attempt_ended")[0]["exit_code"] == 0
    assert_nothing_left(run)
