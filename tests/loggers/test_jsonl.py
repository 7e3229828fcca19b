"""metrics.jsonl keeps every digit of every step, through kills and resumes."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu.files import read_lines
from mgpu.loggers.jsonl import JsonlLogger
from mgpu.runs import Run


def opened(run, resume_step=0):
    logger = JsonlLogger()
    logger.open(run, resume_step=resume_step)
    return logger


def steps(run):
    return [line["step"] for line in read_lines(run.metrics_path)]


def not_json(text):
    raise AssertionError(f"{text} is not JSON")


def test_a_line_keeps_every_digit_and_is_there_at_once(tmp_path):
    run = Run(tmp_path)
    logger = opened(run)
    logger.log(1, {"step": 1, "epoch": 0, "loss": 0.1 + 0.2, "lr": None, "note": "grüße"})
    assert run.metrics_path.read_text() == (
        '{"step": 1, "epoch": 0, "loss": 0.30000000000000004, "lr": null, "note": "grüße"}\n'
    )
    logger.log(2, {"loss": 1e-300})
    assert run.metrics_path.read_text().splitlines()[1] == '{"step": 2, "loss": 1e-300}'
    logger.close("completed")


@settings(deadline=None)
@given(st.lists(st.floats(), min_size=1, max_size=5))
def test_every_float_comes_back_and_every_line_is_json(tmp_path_factory, losses):
    run = Run(tmp_path_factory.mktemp("run"))
    logger = opened(run)
    for step, loss in enumerate(losses, 1):
        logger.log(step, {"loss": loss})
    logger.close("completed")
    for line, loss in zip(run.metrics_path.read_text().splitlines(), losses, strict=True):
        found = json.loads(line, parse_constant=not_json)["loss"]
        if math.isfinite(loss):
            assert found.hex() == loss.hex()
        else:
            assert found == ("nan" if math.isnan(loss) else "inf" if loss > 0 else "-inf")


def test_a_resumed_run_drops_the_steps_it_trains_again(tmp_path):
    run = Run(tmp_path)
    run.metrics_path.write_text(
        '{"step": 39, "loss": 3.0}\n{"step": 40, "loss": 2.0}\n{"step": 41, "loss": 1.0}\n{"step": 42, "lo'
    )
    logger = opened(run, resume_step=40)
    logger.log(41, {"loss": 0.5})
    logger.close("completed")
    assert run.metrics_path.read_text() == (
        '{"step": 39, "loss": 3.0}\n{"step": 40, "loss": 2.0}\n{"step": 41, "loss": 0.5}\n'
    )


def test_a_torn_tail_is_dropped_though_no_step_is(tmp_path):
    run = Run(tmp_path)
    run.metrics_path.write_text('{"step": 1}\n{"ste')
    opened(run, resume_step=7).close("failed")
    assert run.metrics_path.read_text() == '{"step": 1}\n'


def test_an_undamaged_file_is_left_as_it_is(tmp_path):
    run = Run(tmp_path)
    run.metrics_path.write_text('{"step": 1}\n{"step": 2}\n')
    before = os.stat(run.metrics_path).st_ino
    opened(run, resume_step=2).close("failed")
    assert os.stat(run.metrics_path).st_ino == before
    assert steps(run) == [1, 2]


@settings(deadline=None)
@given(cut=st.integers(0, 400), resume_step=st.integers(0, 25))
def test_cut_anywhere_and_resumed_anywhere_the_steps_are_whole(tmp_path_factory, cut, resume_step):
    run = Run(tmp_path_factory.mktemp("run"))
    text = "".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(1, 21))
    run.metrics_path.write_text(text[:cut])
    whole = [line["step"] for line in read_lines(run.metrics_path)]
    logger = opened(run, resume_step)
    logger.log(resume_step + 1, {"loss": 0.25})
    logger.close("completed")
    assert steps(run) == [step for step in whole if step <= resume_step] + [resume_step + 1]


def test_a_killed_process_loses_no_line(tmp_path):
    program = (
        "import os, signal, sys; from mgpu.loggers.jsonl import JsonlLogger; from mgpu.runs import Run\n"
        "logger = JsonlLogger(); logger.open(Run(sys.argv[1]), resume_step=0)\n"
        "for step in range(1, 101): logger.log(step, {'loss': 1 / step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert steps(Run(tmp_path)) == list(range(1, 101))


def test_lines_that_a_full_disk_did_not_take_are_written_once_it_does(tmp_path):
    run = Run(tmp_path)
    logger = opened(run)
    genuine, logger._handle = logger._handle, os.open("/dev/full", os.O_WRONLY)
    logger.log(1, {"loss": 1.0})
    logger.log(2, {"loss": 0.5})
    os.close(logger._handle)
    logger._handle = genuine
    logger.log(3, {"loss": 0.25})
    logger.close("completed")
    assert steps(run) == [1, 2, 3]


def test_an_end_that_loses_lines_is_an_error():
    logger = JsonlLogger()
    logger._handle = os.open("/dev/full", os.O_WRONLY)
    logger.log(1, {"loss": 1.0})
    logger.log(2, {"loss": 0.5})
    with pytest.raises(OSError, match="No space left on device: the last 2 lines of the metrics are lost"):
        logger.close("completed")


def test_a_logger_that_is_not_open_refuses_a_step(tmp_path):
    logger = opened(Run(tmp_path))
    logger.close("completed")
    with pytest.raises(ValueError, match="not open"):
        logger.log(1, {})
