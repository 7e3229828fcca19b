"""The script that checks a GPU machine is kept in order on CPUs: same rows, fewer of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"


def check(*arguments):
    return subprocess.run(
        [str(SCRIPT), "--devices", "cpu:1", *arguments],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip


@pytest.mark.slow
def test_rows_that_need_no_gpu_pass_on_a_cpu():
    done = check("--only", "machine", "topology", "collective", "strategy ddp", "snapshot", "crash")
    assert done.returncode == 0, done.stderr
    assert "6 of 6 in " in done.stdout
    assert "losses against single: 0.0e+00" in done.stdout
    assert "was killed by SIGSEGV" in done.stdout


def test_a_row_that_the_time_does_not_allow_is_a_failure():
    done = check("--only", "machine", "--seconds", "-1")
    assert done.returncode == 1
    assert "not run: the time was over" in done.stdout
    assert "0 of 1 in " in done.stdout
