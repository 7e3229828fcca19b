"""When it is a hang, by heartbeats of invented times; and who is the odd one, by invented stacks."""

import dataclasses
from pathlib import Path

import torch

from mgpu.frames import Frame
from mgpu.launch.stacks import Stack
from mgpu.launch.watchdog import HangWatch, odd_rank
from mgpu.runs.heartbeat import Beat, Ended, Phase
from mgpu.spec import Span
from mgpu.spec.models import Watchdog

TORCH = Path(torch.__file__).parent
SECOND = 1_000_000_000
BEAT = Beat(5, Phase.TRAINING, 0, 1, 3, Ended.NO, 0, 0, True)
LIMITS = Watchdog(hang=Span(10, "seconds"), start=Span(60, "seconds"))
WAITS = (Frame("/u/train.py", 3, "loss"), Frame(f"{TORCH}/distributed/distributed_c10d.py", 9, "all_reduce"))
STUCK = (Frame("/u/train.py", 8, "stuck_here"),)
FETCHES = (Frame("/u/train.py", 3, "loss"), Frame(f"{TORCH}/utils/data/dataloader.py", 9, "__next__"))


def beat(at, phase=Phase.TRAINING, step=5):
    return dataclasses.replace(BEAT, beat_ns=at, phase=phase, step=step)


def stack(main=WAITS, state="S", children=()):
    return Stack(1, state, "", main, children)


class Clocked(HangWatch):
    """Looks every second from `start` on, as the node does, so that no pause is seen."""

    def run(self, beats, start, seconds):
        self._looked_ns = start
        for second in range(seconds + 1):
            found = self.check(beats, list(beats), start + second * SECOND)
            if found is not None:
                return second, found
        return None


def test_a_rank_without_a_beat_for_longer_than_the_limit_hangs():
    start = 1_000 * SECOND
    second, hang = Clocked(LIMITS).run({0: beat(start + 5 * SECOND), 1: beat(start)}, start, 30)
    assert (second, hang.ranks, hang.seconds) == (11, (1,), 11.0)


def test_slow_phases_have_a_limit_of_their_own_and_a_script_none():
    start = 1_000 * SECOND
    for phase in (Phase.STARTING, Phase.FIRST_STEP, Phase.SAVING, Phase.ENDING):
        assert Clocked(LIMITS).run({0: beat(start, phase)}, start, 70)[0] == 61
    assert Clocked(LIMITS).run({0: beat(start, Phase.EVALUATING)}, start, 70)[0] == 11
    assert Clocked(LIMITS).run({0: beat(start, Phase.SCRIPT)}, start, 10_000) is None
    assert Clocked(LIMITS).run({0: beat(0)}, start, 100) is None


def test_time_in_which_the_supervisor_slept_does_not_count():
    start = 1_000 * SECOND
    watch = Clocked(LIMITS)
    watch._looked_ns = start
    assert watch.check({0: beat(start)}, [0], start + 3600 * SECOND) is None
    assert watch.run({0: beat(start)}, start + 3600 * SECOND, 30)[0] == 11


def test_the_odd_rank_is_the_one_that_is_not_in_the_collective():
    beats = dict.fromkeys(range(3), BEAT)
    odd = odd_rank(beats, {0: stack(), 1: stack(STUCK), 2: stack()}, {})
    assert (odd.rank, odd.what, odd.place) == (1, "is stuck", "/u/train.py:8 in stuck_here")


def test_a_stopped_rank_comes_first_wherever_it_is():
    beats = dict.fromkeys(range(3), BEAT)
    odd = odd_rank(beats, {0: stack(STUCK), 1: stack(), 2: stack(WAITS, state="T")}, {})
    assert (odd.rank, odd.what) == (2, "is stopped by a signal (SIGSTOP)")


def test_of_several_outside_the_one_behind_is_named():
    beats = {0: beat(0, step=6), 1: beat(0, step=6), 2: beat(0, step=5)}
    assert odd_rank(beats, {0: stack(), 1: stack(STUCK), 2: stack(STUCK)}, {}).rank == 2
    assert odd_rank(beats, dict.fromkeys(range(3), stack(STUCK)), {}).rank == 2


def test_a_rank_that_waits_for_its_loader_names_what_the_loader_does():
    loader = Stack(77, "S", "", (Frame("/u/data.py", 4, "read_image"),), what="loader process")
    idle = Stack(
        78, "S", "", (Frame(f"{TORCH}/utils/data/_utils/worker.py", 4, "_worker_loop"),), what="loader process"
    )
    beats = dict.fromkeys(range(2), BEAT)
    odd = odd_rank(beats, {0: stack(FETCHES, children=(idle, loader)), 1: stack()}, {})
    assert (odd.rank, odd.what, odd.place) == (0, "waits for its loader process 77", "/u/data.py:4 in read_image")
    odd = odd_rank(beats, {0: stack(FETCHES, children=(idle,)), 1: stack()}, {})
    assert odd.what == "waits for its data loader"


def test_a_stopped_child_is_named_where_its_rank_waits_for_it():
    waits = (Frame("/m/mgpu/checkpoint/writer.py", 4, "outcome"),)
    loader, writer = (
        Stack(pid, "T", "", what=what) for pid, what in ((77, "loader process"), (78, "checkpoint writer"))
    )
    saves = {0: beat(0, Phase.SAVING), 1: beat(0, Phase.SAVING)}
    odd = odd_rank(saves, {0: stack(waits), 1: stack(waits, children=(loader, writer))}, {})
    assert (odd.rank, odd.what) == (1, "waits for its checkpoint writer 78, which is stopped by a signal")
    odd = odd_rank({0: BEAT, 1: BEAT}, {0: stack(), 1: stack(FETCHES, children=(loader, writer))}, {})
    assert (odd.rank, odd.what) == (1, "waits for its loader process 77, which is stopped by a signal")
    odd = odd_rank({0: BEAT, 1: BEAT}, {0: stack(), 1: stack(STUCK, children=(loader, writer))}, {})
    assert (odd.rank, odd.what) == (1, "is stuck")


def test_where_all_wait_the_flight_recorder_tells_who_is_late():
    beats = dict.fromkeys(range(3), BEAT)
    odd = odd_rank(beats, dict.fromkeys(range(3), stack()), {0: 12, 1: 11, 2: 12})
    assert (odd.rank, odd.what) == (1, "never entered collective 12: its last is 11")
    assert odd_rank(beats, dict.fromkeys(range(3), stack()), {0: 12, 1: 12, 2: 12}).rank is None
    assert odd_rank(beats, dict.fromkeys(range(3), stack()), {}).what == "all ranks wait in a collective"
    assert odd_rank(beats, dict.fromkeys(range(3), stack(STUCK)), {}).what == "all ranks are stuck in the same place"
