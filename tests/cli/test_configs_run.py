"""The configs as a newcomer runs them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mgpu.runs import State
from mgpu.zoo import Digits, ResidualNet

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_can_be_planned(bench, path):
    done = bench.mgpu("train", path, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert sum(plan["counts"]) * plan["micro"] == plan["size"]


@pytest.mark.slow
def test_digits_learn_to_be_read_and_plain_torch_agrees(bench):
    """At least 97 % of 360 digits that were never seen; the exported weights give the same count in plain torch."""
    done = bench.mgpu("train", CONFIGS / "digits.yaml", "--devices=auto:2")
    assert done.returncode == 0, done.stderr
    run = bench.latest
    assert run.state is State.COMPLETED
    evaluated = [event for event in run.events() if event["event"] == "evaluated"][-1]
    assert evaluated["accuracy"] >= 0.97
    exported = bench.mgpu("export", run.id)
    assert exported.returncode == 0, exported.stderr
    model = ResidualNet(width=32, blocks=1)
    model.load_state_dict(load_file(bench.folder / exported.stdout.strip()))
    model.eval()
    digits = Digits(split="eval")
    images, targets = torch.utils.data.default_collate([digits[index] for index in range(len(digits))])
    with torch.no_grad():
        right = (model(images).argmax(1) == targets).float().mean().item()
    assert right == pytest.approx(evaluated["accuracy"], abs=1e-6)
