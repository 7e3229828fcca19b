"""The record of a rank's error is written, whatever breaks in meanwhile."""

import json
import signal

import pytest

from mgpu.runs import Run
from mgpu.runs.heartbeat import Board, Phase
from mgpu.train import rank as rank_module
from mgpu.train.rank import Start


@pytest.fixture
def torn():
    """SIGCHLD as torch leaves it once loaders run: a handler that raises wherever Python just is."""

    def handler(signum, frame):
        raise RuntimeError("a loader process was killed")

    before = signal.signal(signal.SIGCHLD, handler)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_a_loader_that_dies_during_the_record_does_not_undo_it(tmp_path, monkeypatch, torn):
    board, run = Board.create(1), Run(tmp_path)
    heart = board.heart(0)
    heart.beat(4, Phase.TRAINING)
    attempts = []
    genuine = rank_module.write_failure

    def broken_into(*arguments, **named):
        attempts.append(signal.getsignal(signal.SIGCHLD))
        signal.raise_signal(signal.SIGCHLD)
        if len(attempts) == 1:
            raise RuntimeError("a loader process was killed")
        genuine(*arguments, **named)

    monkeypatch.setattr(rank_module, "write_failure", broken_into)
    rank_module._record(ValueError("bad sample 17"), heart, run, Start(str(tmp_path), 1, 0, 0, 0), 0, 1)
    told = json.loads(run.failure_path(1, 0).read_text())
    assert (told["type"], told["message"], told["step"]) == ("ValueError", "bad sample 17", 4)
    assert attempts == [signal.SIG_DFL, signal.SIG_DFL]
    assert board.read(0).failed_ns == told["monotonic_ns"]


def test_a_disk_that_takes_no_record_hides_no_error(tmp_path, capsys):
    (tmp_path / "failures").write_text("a file where the folder should be")
    heart = Board.create(1).heart(0)
    before = signal.getsignal(signal.SIGCHLD)
    try:
        rank_module._record(ValueError("x"), heart, Run(tmp_path), Start(str(tmp_path), 1, 0, 0, 0), 0, 1)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert "could not be written" in capsys.readouterr().err
