"""The specs in configs/ name what the zoo has."""

from pathlib import Path

import pytest
import torch

from mgpu.spec import load_spec
from mgpu.train.targets import build

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["quickstart", "digits"])
def test_a_model_a_task_and_data_fit_together(name):
    if name == "digits":
        pytest.importorskip("sklearn")
        pytest.importorskip("torchmetrics")
    spec = load_spec(CONFIGS / f"{name}.yaml").spec
    torch.manual_seed(0)
    model, task = build(spec.model), build(spec.task)
    for target in (spec.data.train, spec.data.eval):
        data = build(target)
        batch = torch.utils.data.default_collate([data[index] for index in range(4)])
        total, units, predictions, targets = task.evaluate(model, batch)
        for metric in map(build, spec.metrics.values()):
            metric.update(predictions, targets)
            assert 0 <= float(metric.compute()) <= 1
        assert int(units) == batch[1].numel()
        total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert spec.name == name
    assert spec.batch.size % spec.batch.micro_size == 0
