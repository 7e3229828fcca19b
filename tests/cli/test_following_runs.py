"""`mgpu logs -f` of real runs, and that what the hints say works when it is pasted into the shell they are read in."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from test_fault_table import assert_nothing_left
from test_supervision import SLOW, TASK, events_of, wait_until

from mgpu.runs import RunStore, State

pytestmark = pytest.mark.slow


@pytest.fixture
def chatty(bench):
    """A bench whose task prints each pass, a step each, and fails as asked; a kill waits for the file `go`."""
    text = TASK.replace("self.passes += 1", "self.passes += 1; print('pass', self.passes)")
    text = text.replace("    def kill(self):", "    def kill(self):\n        wait_for_go()")
    text += "\n    def evaluate(self, model, batch):\n        return super().evaluate(model, batch[:2])\n"
    go = str(bench.folder / "go")
    text += f"\n\ndef wait_for_go():\n    while not os.path.exists({go!r}):\n        time.sleep(0.02)\n"
    (bench.folder / "task.py").write_text(text)
    spec = (bench.folder / "toy.yaml").read_text().replace("task: toy.py:Task", "task: {target: task.py:Task}")
    (bench.folder / "toy.yaml").write_text(spec.replace("micro: 1", "micro: 2"))
    return bench


@pytest.fixture
def paste(bench):
    """Runs a line in a shell in the folder of the bench, with `mgpu` on the path."""
    command = bench.folder / "bin" / "mgpu"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mgpu "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}

    def run(line, while_it_runs=lambda process: None):
        process = subprocess.Popen(
            ["sh", "-c", line],
            cwd=bench.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        with process:
            while_it_runs(process)
            out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(line, process.returncode, out, err)

    return run


def hints(text):
    """The commands that the people text names: what follows `mgpu` up to the end of the line, or to a dot in the middle."""
    found = []
    for line in text.splitlines():
        for part in line.split(" · "):
            if "mgpu " in part:
                found.append("mgpu " + part.partition("mgpu ")[2].partition("  (")[0])
    return found


def test_a_detached_run_is_followed_as_its_front_would_show_it(chatty, paste):
    """Killed in its sixth pass, started again from step 4, complete; in a folder of its own with a blank in its name."""
    started = paste(
        f"mgpu train toy.yaml --detach --runs-dir 'my runs' {SLOW} --set=task.args.what=kill --set=task.args.at=6"
        " --set=restart.max=2 --set='checkpoint={every: 2 steps, async: false}'"
        " --set=data.eval=toy.py:Data --set='evaluate.every=4 steps'"
    )
    assert started.returncode == 0, started.stderr
    (run,) = RunStore(chatty.folder / "my runs").list()
    follow, stop = hints(started.stderr)
    assert (follow, stop) == (f"mgpu logs -f 'my runs/{run.id}'", f"mgpu stop 'my runs/{run.id}'")
    seen = []

    def go_on_when_step_5_is_shown(follower):
        while not (seen and seen[-1].startswith("step 5/")):
            seen.append(follower.stderr.readline().rstrip("\n"))
            assert follower.poll() is None, seen
        (chatty.folder / "go").touch()

    done = paste(follow, go_on_when_step_5_is_shown)
    assert done.returncode == 0, done.stderr
    assert (run.state, run.attempts) == (State.COMPLETED, 2)
    assert done.stdout == "".join(run.log_path(attempt, 0).read_text() for attempt in (1, 2))
    assert done.stdout.count("pass ") == 6 + 8  # rank 1 dies in its pass 6, rank 0 waits for it in its own
    lines = seen + done.stderr.splitlines()
    assert lines[0] == f"{run.id}  attempt 1: ddp on 2 x cpu"
    steps = [int(line.split()[1].partition("/")[0]) for line in lines if line.startswith("step ")]
    before = steps.index(5) + 1
    assert steps[:before] == list(range(steps[0], 6)) and steps[before:] == list(range(steps[before], 13))
    assert steps[before] in (5, 6)  # whoever looks once too late misses the first line of a resume
    assert {8, 12} <= {int(line.split()[3]) for line in lines if line.startswith("eval at step ")}
    failed = next(number for number, line in enumerate(lines) if line.startswith("attempt 1 failed  after step 5"))
    assert "rank 1 on " in lines[failed + 1] and "was killed by SIGKILL" in lines[failed + 1]
    assert "restart 1 of 2, from the checkpoint of step 4" in lines[failed:]
    assert f"completed  {run.id}  at step 12" in lines
    told = hints(done.stderr)
    assert len(told) == 3
    for command in told:
        again = paste(command)
        assert again.returncode == 0, again.stderr
        assert run.id in again.stdout or command.startswith("mgpu logs")
    assert paste(told[1]).stdout == run.log_path(2, 0).read_text()


def test_a_late_follower_sees_failed_saves_and_the_cause_and_chosen_output_has_no_company(bench, paste):
    """Saves fail from the beginning; asked to stop, the run ends with that as its cause."""
    run = bench.train("--set=task.args.delay=0", duration="4 steps")
    shutil.rmtree(run.checkpoints)
    run.checkpoints.write_text("in the way")
    started = bench.mgpu(
        "resume", run.id, "--detach", SLOW, "--set=duration=500 steps", "--set=checkpoint.every=2 steps"
    )
    assert started.returncode == 0, started.stderr
    wait_until(lambda: events_of(run, "save_failed"))
    first = events_of(run, "save_failed")[0]["step"]
    before = run.last_step
    followers = {
        options: bench.start("logs", run.id, "-f", *options.split())
        for options in ("", "--rank=0", "--grep=.", "--since=1d")
    }
    wait_until(lambda: run.last_step >= before + 3)
    stopped = bench.mgpu("stop", run.id)
    assert stopped.returncode == 0, stopped.stderr
    shown = {options: (*process.communicate(timeout=60), process.returncode) for options, process in followers.items()}
    assert {code for _, _, code in shown.values()} == {0}
    for options in ("--rank=0", "--grep=.", "--since=1d"):
        assert shown[options][1] == "", options
    # The traceback of the save that ended it is all that this task's rank 0 writes.
    assert {out for out, _, _ in shown.values()} == {run.log_path(2, 0).read_text()}
    lines = shown[""][1].splitlines()
    assert any(line.startswith(f"the checkpoint of step {first} was not saved") for line in lines)
    assert [line for line in lines if line.startswith("step ")]
    assert any(line.startswith("SIGTERM: saving a checkpoint") for line in lines)
    (cause,) = [line for line in lines if line.startswith("cause")]
    assert "rank 0" in cause and "CheckpointError" in cause
    assert hints(shown[""][1]) == [f"mgpu resume {run.id}"]
    assert bench.mgpu("logs", run.id).stderr == ""


def test_a_follower_leaves_the_run_alone_and_outlives_its_folder(bench):
    started = bench.mgpu("train", "toy.yaml", "--detach", SLOW, "--set=duration=500 steps")
    assert started.returncode == 0, started.stderr
    run = bench.latest
    for signum, code in ((signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)):
        follower = bench.start("logs", "-f", "latest")
        while not follower.stderr.readline().startswith("step "):
            assert follower.poll() is None
        follower.send_signal(signum)
        _, text = follower.communicate(timeout=20)
        assert follower.returncode == code and "Traceback" not in text
        before = run.last_step
        wait_until(lambda before=before: run.last_step > before + 1)
    follower = bench.start("logs", "-f", "latest")
    while not follower.stderr.readline().startswith("step "):
        assert follower.poll() is None
    aside = run.path.with_name(".aside")
    run.path.rename(aside)
    _, text = follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert text.splitlines()[-1] == f"{run.path} was removed"
    assert_nothing_left(run, seconds=30)
    shutil.rmtree(aside)


def test_every_hint_about_a_run_elsewhere_works_when_pasted(chatty, paste):
    """A stop, a refusal and a failure, each with its next command. In the default folder lies another run."""
    assert chatty.train(duration="1 steps").state is State.COMPLETED
    where = "--runs-dir r1"
    started = paste(f"mgpu train toy.yaml --detach --json {where} {SLOW} --set='duration=500 steps'")
    assert started.returncode == 0, started.stderr
    path = f"r1/{json.loads(started.stdout)['id']}"
    refused = paste(f"mgpu resume {path}")
    assert refused.returncode == 2 and hints(refused.stderr) == [f"mgpu stop {path}"]
    stopped = paste(hints(refused.stderr)[0])
    assert stopped.returncode == 0 and hints(stopped.stderr) == [f"mgpu resume {path}"]
    again = paste(f"mgpu stop {path}")
    assert again.returncode == 2 and hints(again.stderr) == [f"mgpu show {path}"]
    assert paste(hints(again.stderr)[0]).returncode == 0
    failed = paste(f"mgpu train toy.yaml {where} --set=task.args.what=raise --set='checkpoint.every=1 steps'")
    run = RunStore(chatty.folder / "r1").list()[0]
    assert failed.returncode == 1 and hints(failed.stderr) == [f"mgpu resume r1/{run.id}"]
    mended = paste(f"{hints(failed.stderr)[0]} --set=task.args.what=nothing")
    assert mended.returncode == 0 and run.state is State.COMPLETED, mended.stderr
    complete = paste(f"mgpu resume r1/{run.id}")
    (more,) = hints(complete.stderr)
    assert complete.returncode == 2 and more.startswith(f"mgpu resume r1/{run.id} --set duration=")
