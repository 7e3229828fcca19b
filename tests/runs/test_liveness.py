"""A run is lost when its supervisor is certainly gone, and only then."""

import os
import socket
import subprocess
import sys

import pytest

from mgpu.runs import Run, State
from mgpu.runs.liveness import is_gone, this_process

REPORTS_ITSELF = (
    "import json; from mgpu.runs.liveness import this_process; print(json.dumps(this_process()), flush=True)"
)


@pytest.fixture
def child():
    """A live process that has told who it is, and waits to be killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{REPORTS_ITSELF}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        yield process
        process.kill()


def started_by(child, folder, **changes):
    import json

    run = Run(folder)
    run.events_path.touch()
    run.record("attempt_started", attempt=1, **{**json.loads(child.stdout.readline()), **changes})
    return run


def test_this_process_is_who_it_says():
    me = this_process()
    assert (me["pid"], me["host"]) == (os.getpid(), socket.gethostname())
    # Field 22, counted here from the front: this process's name has no blanks to confuse that.
    with open("/proc/self/stat") as stat:
        assert me["process_start"] == int(stat.read().split()[21])
    assert not is_gone(me)


def test_a_run_is_lost_once_its_supervisor_is_killed_and_reaped(child, tmp_path):
    run = started_by(child, tmp_path)
    assert run.state is State.RUNNING
    child.kill()
    child.wait()
    assert run.state is State.LOST


def test_a_zombie_supervises_nothing(child, tmp_path):
    run = started_by(child, tmp_path)
    child.kill()
    # Returns once the child has died, and leaves it unreaped.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert os.path.exists(f"/proc/{child.pid}/stat")
    assert run.state is State.LOST


def test_a_process_number_given_out_again_is_not_the_supervisor(child, tmp_path):
    assert started_by(child, tmp_path, process_start=1).state is State.LOST


def test_another_boot_of_this_host_ended_every_process(child, tmp_path):
    assert started_by(child, tmp_path, boot_id="0-0-0").state is State.LOST


def test_another_host_cannot_be_looked_into(child, tmp_path):
    run = started_by(child, tmp_path, host="elsewhere", boot_id="0-0-0", pid=2**22 + 1)
    assert run.state is State.RUNNING


def test_without_a_start_time_the_number_alone_decides(child, tmp_path):
    run = started_by(child, tmp_path, process_start=None, boot_id=None)
    assert run.state is State.RUNNING
    child.kill()
    child.wait()
    assert run.state is State.LOST


@pytest.mark.parametrize("pid", [None, "7", True, 0, -1, 1.5])
def test_an_event_without_a_process_number_proves_nothing(pid):
    assert not is_gone({**this_process(), "pid": pid})


def test_a_process_number_no_system_has_is_gone():
    assert is_gone({**this_process(), "pid": 10**30})


def test_an_attempt_that_ended_is_never_lost(child, tmp_path):
    run = started_by(child, tmp_path)
    run.record("attempt_ended", attempt=1, state="completed", exit_code=0, step=3, cause=None)
    child.kill()
    child.wait()
    assert run.state is State.COMPLETED
