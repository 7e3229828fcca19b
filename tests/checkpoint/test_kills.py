"""Must show 2, in short: the whole of it is `python scripts/soak/kill_matrix.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak" / "kill_matrix.py"


@pytest.mark.slow
def test_ranks_killed_around_their_saves_lose_nothing(tmp_path):
    """12 seeded instants: SIGKILL of all ranks, resume, the bits of a run that nobody killed."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--kills", "12", "--seed", "7"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12 kills over ")
