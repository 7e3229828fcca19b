"""Real processes, their descendants, and their end."""

import os
import signal
import subprocess
import sys

import pytest

from mgpu.launch.processes import children_of, descendants_of, end_all, end_groups, end_tree, is_alive, state_of
from mgpu.launch.reaping import reap_leftovers
from mgpu.launch.stacks import collect
from mgpu.runs import Run
from mgpu.runs.heartbeat import Board
from mgpu.runs.requests import STACKS_SIGNAL, catches

FAMILY = "sh -c 'sleep 1000 & setsid sleep 1000 & echo up; wait'"


@pytest.fixture
def family():
    """A shell with two sleeping children, one of them in a session of its own."""
    process = subprocess.Popen(["sh", "-c", FAMILY], stdout=subprocess.PIPE, start_new_session=True, text=True)
    assert process.stdout.readline() == "up\n"
    yield process
    end_all([*descendants_of(process.pid), process.pid], 5)
    process.communicate()


def test_descendants_are_found_whatever_session_they_are_in(family):
    found = descendants_of(os.getpid())
    assert family.pid in children_of(os.getpid())
    assert {family.pid, *descendants_of(family.pid)} <= set(found)
    end_tree(family.pid)
    assert [pid for pid in descendants_of(family.pid) if is_alive(pid)] == []


def test_a_group_ends_without_its_leader(family):
    members = [pid for pid in descendants_of(family.pid) if os.getpgid(pid) == family.pid]
    assert members
    family.kill()
    family.wait()
    end_groups([family.pid])
    assert end_all(members, 5) == []
    end_groups([family.pid, 2**30])


def test_states(family):
    assert state_of(os.getpid()) == "R"
    family.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, family.pid, os.WSTOPPED | os.WNOWAIT)
    assert state_of(family.pid) == "T"
    assert state_of(2**30) == "" and not is_alive(2**30)


def test_leftovers_of_a_run_are_ended_and_those_of_another_that_runs_are_not(tmp_path):
    mine, other = Run(tmp_path / "a"), Run(tmp_path / "b")
    for run in (mine, other):
        run.path.mkdir()
    sleepers = [
        subprocess.Popen(["sleep", "1000"], env={**os.environ, "MGPU_RUN": str(run.path)}) for run in (mine, other)
    ]
    assert reap_leftovers(mine) == ["ended 1 processes that an earlier start of a had left"]
    assert [sleeper.poll() for sleeper in sleepers] == [-9, None]
    sleepers[1].kill()
    sleepers[1].wait()


STUCK = """
import faulthandler, sys, threading, time
sys.path[:0] = {path!r}
from mgpu.runs.heartbeat import Board, Phase
from mgpu.runs.requests import STACKS_SIGNAL
import os
board = Board({board}, 1)
heart = board.heart(0)
stacks = os.memfd_create("stacks")
faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
heart.set("stacks", stacks)
heart.set("pid", os.getpid())
heart.beat(3, Phase.TRAINING)
def helper():
    time.sleep(1000)
def stuck_here():
    print("up", flush=True)
    time.sleep(1000)
threading.Thread(target=helper, daemon=True).start()
stuck_here()
"""


def test_a_stuck_process_tells_where_it_is_as_often_as_it_is_asked():
    board = Board.create(1)
    os.set_inheritable(board.descriptor, True)
    code = STUCK.format(path=sys.path, board=board.descriptor)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, pass_fds=[board.descriptor], text=True
    )
    try:
        assert process.stdout.readline() == "up\n"
        assert catches(process.pid, STACKS_SIGNAL) and not catches(os.getpid(), STACKS_SIGNAL)
        for _ in range(2):
            stack = collect(board.all())[0]
            assert stack.main[-1].function == "stuck_here"
            assert stack.text.count("in helper") == 1
            assert not stack.in_collective
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        halted = collect(board.all(), seconds=0.2)[0]
        assert (halted.state, halted.main) == ("T", ())
        assert "SIGSTOP" in halted.whole_text()
    finally:
        process.kill()
        process.communicate()
