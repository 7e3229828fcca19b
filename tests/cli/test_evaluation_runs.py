"""Evaluations that are broken off, fail or lie: the training is saved before, and what was missed is made up for."""

import json
import os
import signal

import pytest
from conftest import weights_of
from test_supervision import begun, events_of, wait_until

from mgpu.runs import State

pytestmark = pytest.mark.slow

TASK = '''
import os, subprocess, time
import psutil
from pathlib import Path
from toy import Task


class Slow(Task):
    """Every pass of an evaluation takes `pause` seconds, and leaves a mark first."""

    def __init__(self, pause=0.0):
        super().__init__()
        self.pause = pause

    def evaluate(self, model, batch):
        if self.pause and not model.training:
            Path("evaluating-" + os.environ["RANK"]).touch()
            time.sleep(self.pause)
        return super().evaluate(model, batch)


class Failing(Task):
    """As long as there is a file `bad`, the evaluation of rank 1 fails."""

    def evaluate(self, model, batch):
        if Path("bad").exists() and os.environ["RANK"] == "1":
            raise ValueError("bad metric")
        return super().evaluate(model, batch)


class Holding(Task):
    """Rank 0's evaluation stops its checkpoint writer, which goes on 6 seconds later."""

    def evaluate(self, model, batch):
        if os.environ["RANK"] == "0" and not Path("held").exists():
            Path("held").touch()
            (writer,) = [child for child in psutil.Process().children() if child.name() == "mgpu-writer"]
            subprocess.Popen(["sh", "-c", f"kill -STOP {writer.pid}; sleep 6; kill -CONT {writer.pid}"])
            time.sleep(0.5)
        return super().evaluate(model, batch)


class Short(Task):
    def evaluate(self, model, batch):
        return super().evaluate(model, batch)[:2]
'''
EVALUATED = {
    "data__eval": {"target": "toy.py:Data", "args": {"n": 41}},
    "evaluate__every": "3 steps",
    "checkpoint__every": "3 steps",
    "checkpoint__keep": 9,
    "duration": "6 steps",
}


@pytest.fixture
def judged(bench):
    """A bench with the tasks above: 41 samples are 21 passes on rank 0 and 20 on rank 1."""
    (bench.folder / "tasks.py").write_text(TASK)
    return bench


def evaluations_of(run):
    return {event["step"]: event["loss"] for event in events_of(run, "evaluated")}


def metrics_of_checkpoints(bench, run):
    rows = json.loads(bench.mgpu("checkpoints", run.id, "--json").stdout)
    return {row["step"]: (row["metrics"] or {}).get("loss") for row in rows}


def assert_the_same(run, other):
    mine, theirs = weights_of(run), weights_of(other)
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
    assert evaluations_of(run) == evaluations_of(other)


def started(bench, task, **settings):
    sets = [f"--set={key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
    return bench.start("train", "toy.yaml", *sets, f"--set=task={json.dumps(task)}")


@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_stop_breaks_an_evaluation_off_and_it_is_made_up_for(judged, strategy, at):
    """TERM to one rank: every pass is 0.3 s, so that the whole would outlast the grace. Also at the last step."""
    settings = {**EVALUATED, "parallel__strategy": strategy, "watchdog__grace": "4 seconds"}
    if at == 6:
        settings["evaluate__every"] = "100 steps"
    whole = judged.train("--set=task=tasks.py:Slow", **settings)
    process = started(judged, {"target": "tasks.py:Slow", "args": {"pause": 0.3}}, **settings)
    wait_until((judged.folder / "evaluating-1").exists)
    run = judged.latest
    os.kill(events_of(run, "attempt_started")[0]["pids"][1], signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert (process.returncode, run.state, run.checkpoint_steps()[0]) == (143, State.INTERRUPTED, at), text
    assert evaluations_of(run) == {}
    assert judged.mgpu("resume", run.id, "--set=task.args.pause=0").returncode == 0
    assert_the_same(run, whole)
    assert metrics_of_checkpoints(judged, run) == metrics_of_checkpoints(judged, whole)
    assert metrics_of_checkpoints(judged, run)[6] == evaluations_of(whole)[6]


def test_the_checkpoint_of_a_step_whose_evaluation_fails_is_there(judged):
    (judged.folder / "bad").touch()
    run = judged.train("--set=task=tasks.py:Failing", expect=1, **EVALUATED)
    cause = events_of(run, "attempt_ended")[-1]["cause"]
    assert (cause["rank"], cause["what"]) == (1, "ValueError: bad metric")
    assert metrics_of_checkpoints(judged, run) == {3: None}
    (judged.folder / "bad").unlink()
    assert judged.mgpu("resume", run.id).returncode == 0
    whole = judged.train("--set=task=tasks.py:Failing", **EVALUATED)
    assert_the_same(run, whole)
    assert metrics_of_checkpoints(judged, run) == evaluations_of(whole)


def test_a_slow_last_save_has_the_time_of_a_save_also_after_the_evaluation(judged):
    """The watchdog allows 3 seconds for a step or an evaluation, and a minute for a save."""
    settings = {**EVALUATED, "evaluate__every": "100 steps"}
    limits = {"watchdog__hang": "3 seconds", "watchdog__start": "60 seconds"}
    run = judged.train("--set=task=tasks.py:Holding", **settings, **limits)
    assert run.checkpoint_steps() == [6, 3]
    assert metrics_of_checkpoints(judged, run)[6] == evaluations_of(run)[6]


def test_an_evaluation_that_was_done_is_not_done_again(judged):
    run = judged.train(**EVALUATED)
    assert judged.mgpu("resume", run.id, "--set=duration=9 steps").returncode == 0
    assert [event["step"] for event in events_of(run, "evaluated")] == [3, 6, 9]


def test_a_task_whose_evaluate_gives_two_values_is_named(judged):
    run = judged.train("--set=task=tasks.py:Short", expect=1, **EVALUATED)
    cause = events_of(run, "attempt_ended")[-1]["cause"]
    told = "Short.evaluate gives 2 values, and must give four: loss_sum, units, predictions, targets"
    assert told in cause["what"] and "tasks.py:44" in cause["what"]


def test_a_stopped_training_is_not_kept_by_an_evaluation_that_is_due(judged):
    """The stop comes before the evaluation of the same step, which is left to the next attempt."""
    settings = {**EVALUATED, "evaluate__every": "1 steps", "duration": "400 steps"}
    process = started(judged, {"target": "tasks.py:Slow"}, **settings)
    run = begun(judged, process, step=4)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    last = run.last_step
    assert process.returncode == 143 and run.checkpoint_steps()[0] == last, text
    assert judged.mgpu("resume", run.id, f"--set=duration={last + 1} steps").returncode == 0
    assert sorted(evaluations_of(run)) == list(range(1, last + 2))
