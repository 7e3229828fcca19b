"""Batch norm's running statistics, caught a micro batch at a time, are those of one plain process."""

import copy

import pytest
import torch
from torch import nn

from mgpu.parallel._exact_statistics import MicroBatchStatistics


def network(momentum):
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=momentum), nn.ReLU(), nn.Flatten())


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_a_window_equals_plain_torch(momentum):
    torch.manual_seed(0)
    model = network(momentum)
    plain = copy.deepcopy(model)
    statistics = MicroBatchStatistics(model)
    for step in range(3):
        images = [torch.randn(4, 1, 6, 6) * (step + 1) for _ in range(5)]
        for image in images:
            with statistics.of_one_micro_batch():
                output = model(image)
            assert torch.equal(output, plain(image))
        statistics.settle((5,), 0, torch.device("cpu"))
        assert model[1].num_batches_tracked == plain[1].num_batches_tracked
        torch.testing.assert_close(model[1].running_mean, plain[1].running_mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(model[1].running_var, plain[1].running_var, rtol=1e-6, atol=1e-6)
        assert model[1].momentum == momentum


def test_statistics_stay_as_they_were_until_they_are_settled():
    model = network(0.1)
    statistics = MicroBatchStatistics(model)
    with statistics.of_one_micro_batch():
        model(torch.randn(4, 1, 6, 6))
    assert torch.equal(model[1].running_mean, torch.zeros(3))
    assert model[1].num_batches_tracked == 0


def test_a_frozen_or_unused_module_keeps_its_statistics():
    model = network(0.1)
    model[1].eval()
    statistics = MicroBatchStatistics(model)
    with statistics.of_one_micro_batch():
        model(torch.randn(4, 1, 6, 6))
    statistics.settle((1,), 0, torch.device("cpu"))
    assert torch.equal(model[1].running_var, torch.ones(3))
    assert model[1].num_batches_tracked == 0
