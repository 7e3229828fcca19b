"""What tests share: a folder with a spec and user code, and the real command run on it."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, settings
from trainers import Trainer

from mgpu.runs import Run, RunStore
from mgpu.spec import parse_value

# `make test-models` runs these, in an environment that has torchvision and timm.
collect_ignore = [] if importlib.util.find_spec("torchvision") else ["parallel/test_vision_models.py"]

# Under nohup, and in the background of a script, they are ignored, and what tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no fault of the code: no example has a time limit.
settings.register_profile("mgpu", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mgpu")

TOY_SPEC = """\
model: toy.py:Net
data:
  train: toy.py:Data
  workers: 0
task: toy.py:Task
optimizer: {target: torch.optim:AdamW, args: {lr: 1e-2}}
batch: {size: 4, micro: 1}
duration: 2 epochs
clip_norm: 1.0
devices: cpu:2
"""


class Bench:
    """A folder with toy.py and toy.yaml; commands run in it as a user would run them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(Path(__file__).with_name("toy.py"), folder)
        (folder / "toy.yaml").write_text(TOY_SPEC)

    def start(self, *arguments, **environment):
        env = {**os.environ, **environment}
        return subprocess.Popen(
            [sys.executable, "-m", "mgpu", *map(str, arguments)],
            cwd=self.folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def mgpu(self, *arguments, **environment):
        with self.start(*arguments, **environment) as process:
            out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def train(self, *arguments, expect=0, **settings):
        """Train toy.yaml with `settings` (dots as double underscores); the run, once it ended with `expect`."""
        sets = [f"--set={name.replace('__', '.')}={json.dumps(value)}" for name, value in settings.items()]
        done = self.mgpu("train", "toy.yaml", *sets, *arguments)
        assert done.returncode == expect, done.stderr
        return self.latest

    @property
    def store(self):
        return RunStore(self.folder / "runs")

    @property
    def latest(self) -> Run:
        return self.store.find("latest")

    def interrupt(self, process, step, signum=signal.SIGINT, after=0):
        """Send `signum` once a run beyond the first `after` has logged `step`; the exit code."""
        deadline = time.monotonic() + 60
        while len(self.store.list()) <= after or self.latest.last_step < step:
            assert time.monotonic() < deadline, "the run does not come along"
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signum)
        process.communicate(timeout=60)
        return process.returncode


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture
def trainer(tmp_path):
    """Makes small trainings of one rank in this process, each with a checkpointer."""
    made = []

    def make(path=tmp_path / "checkpoints", **settings):
        made.append(Trainer(path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.checkpointer.close()


@pytest.fixture
def small_disk(tmp_path):
    """8 MB that can be filled up; where mounting is not allowed, a limit on the size of a file says the same."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, check=False)
    yield folder if done.returncode == 0 else None
    if done.returncode == 0:
        subprocess.run(["umount", "-l", folder], check=True)


def metrics_of(run):
    return [json.loads(line) for line in run.metrics_path.read_text().splitlines()]


def weights_of(run):
    """All tensors of the newest checkpoint, by stock torch."""
    path = max(run.checkpoints.glob("step-*"))
    reader = dcp.FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in stored.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def spec_text(**changes):
    """TOY_SPEC with top-level keys replaced (values as YAML text) or removed (None)."""
    lines = [line for line in TOY_SPEC.splitlines() if line.partition(":")[0] not in changes]
    if "data" in changes:
        lines = [line for line in lines if not line.startswith("  ")]
    lines += [f"{key}: {value}" for key, value in changes.items() if value is not None]
    assert all(parse_value(str(value)) is not None for value in changes.values() if value is not None)
    return "\n".join(lines) + "\n"
