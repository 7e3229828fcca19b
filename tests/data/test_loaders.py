"""The loader's processes: here until their work is done, and no longer than the rank."""

import os
import subprocess
import sys
import time

import pytest

KEEPER = """\
import multiprocessing
import os
import signal
import sys

from mgpu.data.loading import make_loader


class Squares:
    def __getitem__(self, index):
        return index * index


if __name__ == '__main__':
    batches = iter(make_loader(Squares(), [[(0, 1), (0, 2)]] * 50, 0, workers=2, start=sys.argv[1], collate=list, pin=False))
    print(next(batches), flush=True)
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGTERM)  # as a scheduler does: they leave the stopping to the rank
    for rest in range(48):
        next(batches)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_end_with_their_rank_whoever_still_holds_the_batches(tmp_path, start):
    path = tmp_path / "keeper.py"
    path.write_text(KEEPER)
    done = subprocess.run([sys.executable, path, start], capture_output=True, text=True, timeout=60, check=False)
    first, pids = done.stdout.splitlines()
    assert (done.returncode, first) == (0, "[1, 4]"), done.stderr
    assert len(pids.split()) == 2
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids.split()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
