"""What holds for every logger there is: a new file in the folder is tested here without being named."""

import io
import subprocess
import sys

import pytest

import mgpu.loggers
from mgpu.errors import UnknownName
from mgpu.loggers import Logger, logger_class
from mgpu.plugins import plugin_names
from mgpu.runs import Run

NAMES = plugin_names("mgpu.loggers")


def test_the_built_in_loggers_are_here():
    assert {"console", "jsonl"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_logger_lives_through_an_attempt_and_a_resume(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    run = Run(tmp_path)
    for resume_step in (0, 2):
        logger = logger_class(name)()
        assert isinstance(logger, Logger)
        assert logger.where in ("rank0", "front")
        logger.open(run, resume_step=resume_step)
        for step in range(resume_step + 1, resume_step + 4):
            logger.log(step, {"step": step, "loss": 1.5, "lr": None, "grad_norm": float("inf"), "seconds": 0.5 * step})
        logger.evaluated(resume_step + 3, {"loss": 2.5, "accuracy": float("nan")})
        logger.close("completed")
        logger.close("completed")


@pytest.mark.parametrize("name", NAMES)
def test_a_logger_that_was_never_opened_can_be_closed(name):
    logger_class(name)().close("failed")


def test_an_unknown_logger_gets_the_nearest_name():
    with pytest.raises(UnknownName) as caught:
        logger_class("consol")
    assert (caught.value.message, caught.value.hint) == ("unknown logger 'consol'", "did you mean console?")


@pytest.mark.parametrize("name", NAMES)
def test_a_logger_is_imported_without_torch(name):
    check = f"import sys; sys.modules['torch'] = None; from mgpu.loggers import logger_class; logger_class({name!r})"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_finding_a_logger_brings_in_no_display_library():
    check = f"import sys, {mgpu.loggers.__name__} as l; l.logger_class('console'); sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
