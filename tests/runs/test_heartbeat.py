"""What a rank writes into its slot is what everybody else reads, and nothing has a name that could be left behind."""

import os
import time

from mgpu.runs.heartbeat import Board, Ended, Phase


def test_each_rank_has_a_slot_of_its_own():
    board = Board.create(3)
    before = time.monotonic_ns()
    board.heart(1).beat(7, Phase.SAVING)
    board.heart(1).set("asked", 15)
    board.heart(2).set("ended", Ended.STOPPED)
    one, two = board.read(1), board.read(2)
    assert (one.step, one.phase, one.asked, one.ended) == (7, Phase.SAVING, 15, Ended.NO)
    assert before <= one.beat_ns <= time.monotonic_ns()
    assert (two.step, two.beat_ns, two.ended) == (0, 0, Ended.STOPPED)
    assert board.heart(1).get("step") == 7
    board.clear()
    assert {beat.step for beat in board.all().values()} == {0}


def test_a_forked_process_writes_and_another_reads_through_proc():
    board = Board.create(2)
    pid = os.fork()
    if pid == 0:
        board.heart(1).beat(3, Phase.TRAINING)
        os._exit(0)
    os.waitpid(pid, 0)
    seen = Board.of({"pid": os.getpid(), "heartbeats": board.descriptor, "world": 2})
    assert seen is not None
    assert seen.read(1).step == board.read(1).step == 3
    assert seen.read(0).step == 0


def test_what_is_gone_or_foreign_has_no_board(tmp_path):
    with (tmp_path / "file").open("w") as stream:
        assert Board.of({"pid": os.getpid(), "heartbeats": stream.fileno(), "world": 1}) is None
    assert Board.of({"pid": 2**30, "heartbeats": 3, "world": 1}) is None
    assert Board.of({"pid": os.getpid(), "world": 1}) is None
    assert not [name for name in os.listdir("/dev/shm") if "mgpu" in name]
