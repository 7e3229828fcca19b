"""The processes beside the ranks, killed or stopped: who it was is told, and the run does not wait for the watchdog."""

import os
import signal

import psutil
import pytest
from conftest import weights_of
from test_fault_table import assert_nothing_left, processes_of
from test_supervision import SLOW, begun, events_of, wait_until

from mgpu.runs import State

pytestmark = pytest.mark.slow

LONG = (SLOW, "--set=duration=300 steps", "--set=checkpoint.every=2 steps")


def named(run, name):
    return [pid for pid, _ in processes_of(run) if psutil.Process(pid).name() == name]


@pytest.mark.parametrize("signum, code", [(signal.SIGKILL, 137), (signal.SIGSEGV, 139)])
def test_a_dead_store_ends_the_attempt_at_once_and_is_named(bench, signum, code):
    process = bench.start("train", "toy.yaml", *LONG)
    run = begun(bench, process, step=3)
    (store,) = named(run, "mgpu-store")
    os.kill(store, signum)
    _, text = process.communicate(timeout=30)
    cause = events_of(run, "attempt_ended")[0]["cause"]
    assert (process.returncode, run.state, run.exit_code) == (code, State.FAILED, code), text
    assert cause["what"] == f"the process that holds the run's store ({store}) was killed by {signum.name}"
    assert cause["rank"] is None and "cause  the run on" in text
    assert_nothing_left(run)


def test_after_the_death_of_the_store_a_restart_has_a_new_one(bench):
    process = bench.start("train", "toy.yaml", *LONG, "--set=duration=40 steps", "--set=restart.max=1")
    run = begun(bench, process, step=4)
    wait_until(run.checkpoint_steps)
    (store,) = named(run, "mgpu-store")
    os.kill(store, signal.SIGKILL)
    _, text = process.communicate(timeout=60)
    assert (process.returncode, run.state, run.attempts) == (0, State.COMPLETED, 2), text
    assert events_of(run, "attempt_started")[0]["master_port"] != events_of(run, "attempt_started")[1]["master_port"]
    mine, theirs = weights_of(run), weights_of(bench.train(duration="40 steps"))
    assert all(mine[name].equal(theirs[name]) for name in theirs)


def test_a_stopped_checkpoint_writer_is_named_and_so_in_the_stacks(bench):
    limits = ("--set=watchdog.start=3 seconds", "--set=watchdog.hang=3 seconds")
    process = bench.start("train", "toy.yaml", *LONG, *limits)
    run = begun(bench, process, step=3)
    ranks = events_of(run, "attempt_started")[0]["pids"]
    (writer,) = [pid for pid in named(run, "mgpu-writer") if psutil.Process(pid).ppid() == ranks[1]]
    told = bench.mgpu("stacks", run.id)
    assert f"checkpoint writer {writer}" in told.stdout and "loader process" not in told.stdout, told
    os.kill(writer, signal.SIGSTOP)
    _, text = process.communicate(timeout=60)
    cause = events_of(run, "attempt_ended")[0]["cause"]
    assert process.returncode == 3, text
    assert cause["rank"] == 1
    assert f"waits for its checkpoint writer {writer}, which is stopped by a signal" in cause["what"]
    assert_nothing_left(run)


def test_a_stopped_store_is_named(bench):
    """All ranks of a script wait for a key that never comes."""
    (bench.folder / "waits.py").write_text(
        "import torch.distributed as dist\nfrom mgpu.train import beat\nbeat(1)\ndist.init_process_group('gloo')\n"
        "beat(2)\nprint('together', flush=True)\nimport time; time.sleep(2)\nbeat(3)\n"
        "dist.distributed_c10d._get_default_store().get('never')\n"
    )
    spec = "script: {path: waits.py}\ndevices: cpu:2\nwatchdog: {hang: 4 seconds}\n"
    (bench.folder / "job.yaml").write_text(spec)
    process = bench.start("train", "job.yaml")
    wait_until(bench.store.list)
    run = bench.latest
    wait_until(lambda: run.log_path(1, 0).exists() and "together" in run.log_path(1, 0).read_text())
    (store,) = named(run, "mgpu-store")
    os.kill(store, signal.SIGSTOP)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 3, text
    assert f"the process that holds the run's store ({store}) is stopped by a signal" in text
    assert_nothing_left(run)


def test_a_loader_that_crashes_is_placed_where_it_crashed(bench):
    (bench.folder / "crashing.py").write_text(
        "import ctypes\nfrom toy import Data\n\n\nclass Crashing(Data):\n    def __getitem__(self, index):\n"
        "        if index == 7:\n            self.break_down()\n        return super().__getitem__(index)\n\n"
        "    def break_down(self):\n        ctypes.string_at(0)\n"
    )
    run = bench.train("--set=data.train=crashing.py:Crashing", "--set=data.workers=1", expect=1)
    cause = events_of(run, "attempt_ended")[0]["cause"]
    assert "in its data loader: RuntimeError: DataLoader worker" in cause["what"], cause
    assert cause["place"].endswith("crashing.py:12 in break_down"), cause
    assert "ERROR: Unexpected segmentation fault encountered in worker" in run.log_path(1, cause["rank"]).read_text()
