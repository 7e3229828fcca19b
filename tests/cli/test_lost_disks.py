"""A run whose disk is full, or whose folder is taken away."""

import contextlib
import shutil
import signal
import subprocess

import pytest
from conftest import metrics_of
from test_fault_table import assert_nothing_left
from test_supervision import SLOW, events_of, wait_until

from mgpu.files import has_room
from mgpu.runs import RunStore, State

pytestmark = pytest.mark.slow


def can_mount():
    """In a mount namespace of its own, so that nothing stays mounted."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


needs_a_disk = pytest.mark.skipif(not can_mount(), reason="no file system of a size of its own can be mounted here")


def fill(folder):
    """Take all the room there is; the file to remove to give it back."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(b"x" * 4096)
    assert not has_room(folder)
    return filler


def started(bench, folder, *settings):
    process = bench.start("train", "toy.yaml", f"--runs-dir={folder / 'runs'}", SLOW, *settings)
    store = RunStore(folder / "runs")
    wait_until(lambda: store.list() and store.list()[0].checkpoint_steps())
    return process, store.list()[0]


@needs_a_disk
def test_training_outlives_a_disk_that_is_full_for_a_while_and_loses_no_line(bench, small_disk):
    process, run = started(bench, small_disk, "--set=duration=60 steps", "--set=checkpoint.every=5 steps")
    filler = fill(small_disk)
    before = run.last_step
    # Nothing of the run can tell that it goes on; the time of 20 steps has to pass.
    signal.sigtimedwait([], 2.0)
    filler.unlink()
    _, text = process.communicate(timeout=60)
    assert (process.returncode, run.state) == (0, State.COMPLETED), text
    assert before < 60
    assert f"no room is left where {run.path} lies (No space left on device)" in text
    assert [row["step"] for row in metrics_of(run)] == list(range(1, 61))
    assert run.checkpoint_steps()[0] == 60


@needs_a_disk
def test_a_run_that_could_not_save_its_end_says_why_and_can_be_resumed(bench, small_disk):
    process, run = started(bench, small_disk, "--set=duration=30 steps", "--set=checkpoint.every=5 steps")
    kept = run.checkpoint_steps()[0]
    filler = fill(small_disk)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 1, text
    assert "how it ended could not be written down (No space left on device)" in text.strip().splitlines()[-4], text
    assert_nothing_left(run)
    filler.unlink()
    done = bench.mgpu("resume", run.path, "--set=task.args.delay=0")
    assert (done.returncode, run.state) == (0, State.COMPLETED), done.stderr
    assert kept < run.last_step == 30
    assert [row["step"] for row in metrics_of(run)] == list(range(1, 31))


def test_a_run_whose_folder_is_removed_ends_and_says_so(bench):
    process = bench.start("train", "toy.yaml", SLOW, "--set=duration=500 steps")
    wait_until(lambda: bench.store.list() and bench.latest.last_step >= 2)
    run = bench.latest
    assert events_of(run, "attempt_started")
    aside = run.path.with_name(".aside")
    run.path.rename(aside)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 1
    assert text.strip().splitlines()[-1] == f"cause  {run.path} was removed while the run was under way"
    assert_nothing_left(run)
    shutil.rmtree(aside)
