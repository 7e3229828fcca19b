"""The judge on invented evidence: who was first, and of itself."""

import dataclasses
import errno
import json
import signal

import pytest

from mgpu.launch.attempt import Evidence, Exit
from mgpu.launch.diagnosis import judge
from mgpu.launch.stacks import Stack
from mgpu.launch.watchdog import Hang
from mgpu.runs import Run
from mgpu.runs.heartbeat import Beat, Ended, Phase

BEAT = Beat(4, Phase.TRAINING, 1, 1, 3, Ended.NO, 0, 0, True)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def recorded(run, rank, at, *, echo=False, kind="ValueError", message="bad", code=1):
    path = run.failure_path(1, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "rank": rank, "type": kind, "message": message, "place": f"train.py:{rank} in loss", "echo": echo, "step": 4,
        "exit_code": code, "deterministic": False, "loader": False, "phase": "training", "monotonic_ns": at,
    }  # fmt: skip
    path.write_text(json.dumps(record))


def evidence(codes, *, script=False, by_us=(), beats=None, **others):
    """One exit a rank: (code, time seen); None for one that still ran at the end."""
    exits = {
        rank: Exit(rank, told[0], told[1], 5 << 20, rank in by_us)
        for rank, told in enumerate(codes)
        if told is not None
    }
    beats = beats or dict.fromkeys(range(len(codes)), BEAT)
    return Evidence(
        1,
        script,
        exits,
        beats,
        dict.fromkeys(range(len(codes)), beats),
        [2**30 + n for n in range(len(codes))],
        **others,
    )


def test_an_error_of_a_ranks_own_beats_echoes_that_were_stamped_before_it(run):
    """Exception, then destroy_process_group in `finally`: the peers feel it before it is recorded."""
    recorded(run, 0, 100, echo=True, kind="RuntimeError")
    recorded(run, 1, 200)
    recorded(run, 2, 150, echo=True, kind="DistBackendError")
    cause = judge(run, evidence([(1, 300), (1, 310), (1, 320)]), {})
    assert (cause.kind, cause.rank, cause.what, cause.victims) == ("error", 1, "ValueError: bad", (0, 2))
    assert (cause.exit_code, cause.place, cause.step) == (1, "train.py:1 in loss", 4)


def test_of_two_own_errors_the_earlier_is_the_cause(run):
    recorded(run, 0, 200)
    recorded(run, 1, 100)
    assert judge(run, evidence([(1, 300), (1, 310)]), {}).rank == 1


def test_a_death_without_a_record_is_the_cause_of_echoes_whatever_was_seen_first(run):
    recorded(run, 0, 100, echo=True)
    cause = judge(run, evidence([(1, 150), (-9, 200)]), {})
    assert (cause.kind, cause.rank, cause.exit_code, cause.victims) == ("killed", 1, 137, (0,))
    assert cause.details == ("from outside; it had used up to 5.0 MiB",)


def test_an_abort_is_the_last_to_be_blamed(run):
    """A communication library that loses its peer aborts its process, and may be reaped first."""
    assert judge(run, evidence([(-signal.SIGABRT, 100), (-signal.SIGSEGV, 200)]), {}).rank == 1
    assert judge(run, evidence([(-signal.SIGABRT, 100), None]), {}).rank == 0


def test_between_an_own_error_and_a_death_the_time_decides(run):
    recorded(run, 0, 200)
    assert judge(run, evidence([(1, 300), (-9, 100)]), {}).rank == 1
    assert judge(run, evidence([(1, 300), (-9, 250)]), {}).rank == 0


def test_what_the_supervisor_ended_is_nobodys_fault(run):
    recorded(run, 1, 100, echo=True)
    cause = judge(run, evidence([(-9, 50), (1, 150)], by_us={0}), {})
    assert (cause.kind, cause.rank) == ("victim", 1)


def test_a_rank_that_leaves_with_0_before_its_training_is_done_left_early(run):
    recorded(run, 0, 100, echo=True)
    beats = {0: dataclasses.replace(BEAT, step=4), 1: dataclasses.replace(BEAT, step=3)}
    cause = judge(run, evidence([(1, 200), (0, 300)], beats=beats), {})
    assert (cause.kind, cause.rank, cause.exit_code) == ("left early", 1, 1)
    assert cause.what == "left early with code 0 in step 3 (last finished: 2)"
    assert cause.details == ("rank 0 was in step 4",)
    assert cause.victims == (0,)


def test_completed_stopped_and_ended(run):
    done = dict.fromkeys(range(2), dataclasses.replace(BEAT, ended=Ended.COMPLETED))
    assert judge(run, evidence([(0, 1), (0, 2)], beats=done), {}) is None
    halted = dict.fromkeys(range(2), dataclasses.replace(BEAT, ended=Ended.STOPPED))
    assert judge(run, evidence([(0, 1), (0, 2)], beats=halted), {}).kind == "unfinished"
    assert judge(run, evidence([(0, 1), (0, 2)], script=True), {}) is None
    assert judge(run, evidence([(0, 1), (-9, 2)], script=True, by_us={1}), {}).kind == "unfinished"


def test_who_did_not_come_to_a_collective_that_another_gave_up_waiting_for(run):
    recorded(run, 0, 100, echo=True, kind="RuntimeError", message="Timed out")
    from mgpu.frames import Frame

    absent = {1: Stack(7, "S", "", (Frame("/u/train.py", 9, "stuck_here"),))}
    cause = judge(run, evidence([(1, 200), None], script=True, stacks=absent), {})
    assert (cause.kind, cause.rank, cause.exit_code) == ("missing", 1, 3)
    assert cause.place == "/u/train.py:9 in stuck_here"
    assert cause.details == ("rank 0: RuntimeError: Timed out",)


def test_a_hang_is_3_and_a_lost_helper_is_no_ranks_fault(run):
    cause = judge(run, evidence([None, None], hang=Hang((0, 1), 12.0), stacks={}), {0: 5, 1: 4})
    assert (cause.kind, cause.exit_code, cause.rank) == ("hang", 3, 1)
    assert "no progress for 12 s" in cause.details
    cause = judge(run, evidence([(-9, 1), (-9, 1)], spawner_gone="the process … was killed by SIGKILL"), {})
    assert (cause.kind, cause.rank, cause.exit_code) == ("supervisor", None, 137)


def test_a_crash_is_placed_by_what_faulthandler_wrote(run):
    log = run.log_path(1, 0)
    log.parent.mkdir(parents=True)
    log.write_text(
        "step 3\nFatal Python error: Segmentation fault\n\n"
        'Thread 0x1 (most recent call first):\n  File "/u/other.py", line 1 in wait\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/u/ops.py", line 7 in kernel\n'
        '  File "/u/train.py", line 3 in loss\n\nExtension modules: numpy\n'
    )
    cause = judge(run, evidence([(-signal.SIGSEGV, 1)]), {})
    assert (cause.place, cause.exit_code, cause.details) == ("/u/ops.py:7 in kernel", 139, ("| step 3",))


def test_the_same_error_on_several_ranks_has_no_victims(run):
    recorded(run, 0, 100)
    recorded(run, 1, 101)
    recorded(run, 2, 102, kind="TypeError")
    recorded(run, 3, 103, echo=True)
    cause = judge(run, evidence([(1, 200)] * 4, script=True), {})
    assert (cause.rank, cause.victims) == (0, (3,))
    assert cause.details == ("the same on rank 1", "rank 2, later: TypeError: bad")


def test_the_text_of_an_exit_is_told(run):
    recorded(run, 0, 100, kind="SystemExit", message="no data in /data")
    assert judge(run, evidence([(1, 200)], script=True), {}).what == "exited with code 1: no data in /data"
    recorded(run, 0, 100, kind="SystemExit", message="75", code=75)
    cause = judge(run, evidence([(75, 200)], script=True), {})
    assert (cause.what, cause.exit_code, cause.kind) == ("exited with code 75", 75, "exit")


def test_an_error_without_a_text_is_its_type(run):
    recorded(run, 0, 100, kind="KeyboardInterrupt", message="")
    assert judge(run, evidence([(1, 200)]), {}).what == "KeyboardInterrupt"


def test_an_error_that_a_full_disk_did_not_take_is_told_as_that(run):
    beats = {0: BEAT, 1: dataclasses.replace(BEAT, unrecorded=errno.ENOSPC)}
    cause = judge(run, evidence([(0, 300), (1, 200)], beats=beats), {})
    assert (cause.kind, cause.rank, cause.exit_code) == ("error", 1, 1)
    assert cause.what == "failed, and its error could not be written down: No space left on device"
    assert cause.advice == f"make room where {run.path} lies, then resume"


def test_a_removed_folder_is_the_cause_and_nothing_is_started_again(run):
    cause = judge(run, evidence([None, None], folder_gone=True), {})
    assert (cause.kind, cause.rank, cause.exit_code, cause.deterministic) == ("folder", None, 1, True)
    assert cause.what == f"{run.path} was removed while the run was under way"
