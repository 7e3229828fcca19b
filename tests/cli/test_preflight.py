"""What only the user's own code can tell is refused before a rank starts: exit code 2, with the spec's key."""

import pytest

CODE = """
import sys
import torch
from torch.distributed.tensor import DTensor
class Metric:
    def update(self, predictions, targets): pass
    def compute(self): return 0.0
class Whole(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor):
                    raise RuntimeError("knows no shards")
        super().step()
class Leaving:
    def __init__(self): sys.exit(0)
"""


@pytest.mark.parametrize(
    "settings, words",
    [
        # 24 samples in batches of 12: two steps an epoch
        (["duration=2 epochs", "schedule={warmup: 5 steps, shape: cosine}"], ["schedule.warmup", "5 steps", "4 steps"]),
        (["duration=5 steps", "schedule={warmup: 3 epochs, shape: cosine}"], ["schedule.warmup", "6 steps", "5 steps"]),
        (["data.eval=toy.py:Data", "metrics={mine: own.py:Metric}"], ["metrics.mine", "has no reset"]),
        (["data.train=own.py:Leaving"], ["data.train", "SystemExit: 0"]),
        (
            ["task={target: mgpu.train:Supervised, args: {loss: torch.nn:MSELoss}}"],
            ["task", "{target: torch.nn:MSELoss}"],
        ),
        (["optimizer=torch.optim:LBFGS"], ["optimizer: torch.optim:LBFGS cannot make a step: TypeError", "closure"]),
        (
            ["optimizer={target: own.py:Whole, args: {lr: 1e-2}}", "parallel.strategy=fsdp"],
            ["own.py:Whole cannot make a step on parameters that fsdp has sharded: RuntimeError: knows no shards"],
        ),
    ],
    ids=["warm-up-in-steps", "warm-up-in-epochs", "metric", "leaving", "loss", "closure", "sharded"],
)
def test_it_is_refused_before_a_rank_starts(bench, settings, words):
    (bench.folder / "own.py").write_text(CODE)
    size = ["batch={size: 12, micro: 6}"]
    done = bench.mgpu("train", "toy.yaml", *(f"--set={setting}" for setting in size + settings))
    assert done.returncode == 2, done.stderr
    for word in words:
        assert word in done.stderr
    assert bench.store.list() == []


def test_an_optimizer_of_ones_own_that_wants_another_model_is_left_to_the_ranks(bench):
    """It takes only the three shapes of the toy's parameters."""
    (bench.folder / "own.py").write_text(
        "import torch\n\nclass Picky(torch.optim.SGD):\n    def step(self):\n"
        "        assert {tuple(p.shape) for g in self.param_groups for p in g['params']} == {(16, 8), (16,), (1, 16), (1,)}\n"
        "        super().step()\n"
    )
    bench.train("--set=optimizer={target: own.py:Picky, args: {lr: 1e-2}}", duration="2 steps")


def test_a_folder_for_runs_that_cannot_be_written_is_refused(bench):
    (bench.folder / "taken").write_text("a file")
    done = bench.mgpu("train", "toy.yaml", "--runs-dir", "taken/runs")
    assert done.returncode == 2
    assert "taken/runs cannot be written: Not a directory" in done.stderr
    assert "Traceback" not in done.stderr
