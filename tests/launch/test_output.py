"""Logs that are moved aside while they are written and read."""

import json
import os
import signal

import pytest

from mgpu.launch.output import LogKeeper, LogTail, TextTail, clock_path, offset_at, older, written
from mgpu.runs import Run
from mgpu.runs.requests import REOPEN_SIGNAL


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    run.log_path(1, 0).parent.mkdir(parents=True)
    return run


@pytest.fixture
def asked():
    """This process as the rank: how often it was asked to reopen its log."""
    heard = []
    before = signal.signal(REOPEN_SIGNAL, lambda signum, frame: heard.append(signum))
    yield heard
    signal.signal(REOPEN_SIGNAL, before)


def test_a_log_beyond_its_limit_is_moved_aside_and_the_rank_is_told(run, asked):
    log = run.log_path(1, 0)
    keeper = LogKeeper(run, 1, 1, limit=10)
    for number, text in enumerate(("one\n", "two two two\n", "three\n", "four four four\n", "five\n")):
        with log.open("a") as stream:
            stream.write(text)
        keeper.tick(100.0 + 10 * number, [os.getpid()])
    assert len(asked) == 2
    assert older(log).read_text() == "three\nfour four four\n"
    assert log.read_text() == "five\n"
    assert b"".join(written(log)) == b"three\nfour four four\nfive\n"
    assert b"".join(written(log, skip=6)) == b"four four four\nfive\n"
    assert b"".join(written(log, skip=23)) == b"ve\n"


def test_a_process_that_cannot_reopen_its_log_keeps_it(run):
    log = run.log_path(1, 0)
    log.write_text("x" * 100)
    LogKeeper(run, 1, 1, limit=10).tick(1.0, [os.getpid()])
    assert log.stat().st_size == 100


def test_the_clock_dates_what_is_kept(run):
    lines = [
        {"unix": 100, "written": {"0": 50, "1": 7}, "dropped": {}},
        {"unix": 110, "written": {"0": 90}, "dropped": {}},
        {"unix": 120, "written": {"0": 130}, "dropped": {"0": 60}},
    ]
    clock_path(run, 1).write_text("".join(json.dumps(line) + "\n" for line in lines))
    # 60 bytes are gone for good, so what was written at 110 begins at 90 - 60.
    assert [offset_at(run, 1, 0, unix) for unix in (99, 100, 115, 121)] == [0, 0, 30, 70]
    assert offset_at(run, 1, 1, 121) == 7


def test_a_tail_reads_the_end_of_the_old_file_before_the_new_one(run):
    log = run.log_path(1, 0)
    tail = LogTail(log)
    assert tail.read() == b""
    stream = log.open("ab", buffering=0)
    stream.write(b"1")
    assert tail.read() == b"1"
    log.rename(older(log))
    stream.write(b"2")
    log.write_bytes(b"3")
    assert tail.read() == b"23"
    with log.open("ab") as more:
        more.write(b"4")
    assert tail.read() == b"4"
    stream.close()
    tail.close()


def test_a_text_tail_gives_whole_lines_and_the_last_one_at_the_end(run):
    log = run.log_path(1, 0)
    tail = TextTail(log)
    log.write_bytes(b"one\ntw")
    assert tail.read() == ["one"]
    with log.open("ab") as stream:
        stream.write(b"o\n\xff")
    assert tail.read() == ["two"]
    assert tail.read(at_end=True) == ["�"]
    assert tail.read(at_end=True) == []
    tail.close()
