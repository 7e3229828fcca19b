"""Each fault on each of three ranks of four: the right culprit, the right exit code, the cause last on the screen, and no
process left. `MGPU_FAULT_REPEATS=20` runs each cell so many times."""

import os
import shutil
import time
from pathlib import Path

import psutil
import pytest
from faulty import memory_cgroup

from mgpu.runs import State

REPEATS = int(os.environ.get("MGPU_FAULT_REPEATS", "1"))
OUT_OF_MEMORY = (137, "killed", "out of memory") if memory_cgroup() else (1, "error", "MemoryError")
TABLE = {
    "raise_error": (1, "error", "ValueError: bad sample 17"),
    "raise_after_leaving_the_group": (1, "error", "ValueError: bad sample 17"),
    "import_error": (1, "error", "ModuleNotFoundError"),
    "exit_75": (75, "exit", "exited with code 75"),
    "leave": (1, "left early", "left early with code 0"),
    "killed": (137, "killed", "was killed by SIGKILL"),
    "stopped": (3, "hang", "is stopped by a signal (SIGSTOP)"),
    "stuck_here": (3, "hang", "is stuck, in step 3 (last finished: 2)"),
    "crash": (139, "killed", "was killed by SIGSEGV"),
    "out_of_memory": OUT_OF_MEMORY,
    "dead_loader": (1, "error", "in its data loader"),
}
PLACES = {"raise_error": "raise_error", "stuck_here": "stuck_here", "crash": "crash", "stopped": "stopped"}


@pytest.mark.slow
@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("culprit", [0, 2, 3])
@pytest.mark.parametrize("fault", TABLE)
def test_the_culprit_is_named_and_nothing_is_left(bench, fault, culprit, repeat):
    shutil.copy(Path(__file__).with_name("faulty.py"), bench.folder)
    # torch itself looks after its loaders every 5 s, where the signal of their end was lost on it.
    hang = 20 if fault == "dead_loader" else 2
    (bench.folder / "job.yaml").write_text(
        f"script: {{path: faulty.py, args: [{fault}, {culprit}]}}\ndevices: cpu:4\nwatchdog: {{hang: {hang} seconds}}\n"
    )
    done = bench.mgpu("train", "job.yaml")
    run = bench.latest
    code, kind, words = TABLE[fault]
    cause = run.events()[-1]["cause"]
    assert (done.returncode, run.exit_code, run.state) == (code, code, State.FAILED), done.stderr
    assert (cause["rank"], cause["kind"]) == (culprit, kind), done.stderr
    report = done.stderr[done.stderr.rindex("\nfailed ") :]
    assert f"cause  rank {culprit} on " in report
    assert words in report
    assert "Traceback" not in report
    assert "faulty.py:" in report or fault not in PLACES
    assert f"in {PLACES.get(fault, '')}" in cause["place"] or fault not in PLACES
    assert report.rstrip().splitlines()[-1].startswith("next")
    assert_nothing_left(run)


def assert_nothing_left(run, seconds=5):
    """No live process was started with this run's path in its environment."""
    deadline = time.monotonic() + seconds
    while left := processes_of(run):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def processes_of(run):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MGPU_RUN") == str(run.path) and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.pid, process.cmdline()))
        except psutil.Error:
            continue
    return found
