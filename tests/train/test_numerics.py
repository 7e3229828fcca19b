"""The numbers of DESIGN's numerics, each against a value by hand or plain single-process torch."""

import json

import pytest
import torch
from conftest import metrics_of, weights_of

from mgpu.data.order import EpochOrder
from mgpu.data.seeding import micro_batch_seed, sample_seed, seed_everything, weights_seed
from mgpu.train.schedule import LearningRate

pytestmark = pytest.mark.slow

NUMBERS = {
    "model": "toy.py:OneWeight",
    "task": {"target": "toy.py:Product", "args": {}},
    "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
    "clip_norm": None,
}


def weight(run):
    return weights_of(run)["model.w"].item()


def numbers(bench, values, **settings):
    """Train OneWeight on `values`; loss is w * x, so that each step takes lr * mean(x) from w."""
    data = {"train": {"target": "toy.py:Numbers", "args": {"values": values}}}
    return bench.train(**{**NUMBERS, "data": data, **settings})


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2", "cpu:3"])
def test_the_tail_of_an_epoch_is_divided_by_its_own_count(bench, devices):
    """Case E2: any order of 0..9 in batches of 8 and 2. Dividing the tail by 8 would give another weight."""
    run = numbers(bench, list(range(10)), batch={"size": 8, "micro": 2}, duration="1 epochs", devices=devices)
    order = EpochOrder(10, 0, 0).at(range(10)).tolist()
    expected = -0.1 * (sum(order[:8]) / 8 + sum(order[8:]) / 2)
    assert weight(run) == pytest.approx(expected, rel=1e-6)
    assert [row["step"] for row in metrics_of(run)] == [1, 2]


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_the_accumulated_gradient_is_clipped_once(bench, devices):
    """Case E5: micro gradients 10 and -9 have the mean 0.5, below the limit of 1."""
    run = numbers(bench, [10, -9], batch={"size": 2, "micro": 1}, duration="1 steps", clip_norm=1.0, devices=devices)
    assert weight(run) == pytest.approx(-0.05, rel=1e-6)
    assert metrics_of(run)[0]["grad_norm"] == pytest.approx(0.5, rel=1e-6)


def test_a_gradient_above_the_limit_is_scaled_down_to_it(bench):
    run = numbers(bench, [3, 5], batch={"size": 2, "micro": 1}, duration="1 steps", clip_norm=1.0)
    assert weight(run) == pytest.approx(-0.1, rel=1e-5)
    assert metrics_of(run)[0]["grad_norm"] == pytest.approx(4.0)


def test_the_schedule_is_a_function_of_the_step_whatever_the_layout(bench):
    """Case E3: linear decay from 0.1 to 0 in 10 steps on 1 and 2 ranks, accumulation 1, 2 and 4."""
    rates = []
    for devices, micro in (("cpu:1", 4), ("cpu:1", 1), ("cpu:2", 2), ("cpu:2", 1)):
        run = numbers(
            bench, list(range(20)), batch={"size": 4, "micro": micro}, duration="10 steps", devices=devices,
            schedule={"shape": "linear"},
        )  # fmt: skip
        rates.append([row["lr"] for row in metrics_of(run)])
    assert rates[0][5] == pytest.approx(0.05)
    assert rates[0] == pytest.approx([0.1 * (1 - k / 10) for k in range(10)])
    assert rates[1:] == [rates[0]] * 3


def test_warm_up_cosine_and_floor():
    rate = LearningRate(warmup=4, total=12, shape="cosine", floor=0.2)
    assert [rate.factor(k) for k in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rate.factor(8) == pytest.approx(0.6)
    assert rate.factor(12) == pytest.approx(0.2)
    assert rate.factor(50) == pytest.approx(0.2)
    assert LearningRate(2, 5, "constant", 0.0).factor(4) == 1.0


def plain_torch(module, samples, steps, size, micro):
    """The toy training as a user would write it in one process: same seeds, no mgpu loop, no mgpu strategy."""
    seed_everything(weights_seed(0))
    seed_everything(weights_seed(0))
    data = module.Data()
    model = module.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        epoch, offset = divmod(step * size, len(data))
        order = EpochOrder(len(data), 0, epoch)
        total = 0.0
        for index in range(size // micro):
            batch = []
            for k in range(micro):
                sample = int(order.at(offset + index * micro + k))
                seed_everything(sample_seed(0, epoch, sample))
                batch.append(data[sample])
            x, y = torch.stack([b[0] for b in batch]), torch.stack([b[1] for b in batch])
            seed_everything(micro_batch_seed(0, step, index))
            loss = torch.nn.functional.mse_loss(model(x), y, reduction="sum") / size
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return model, losses


def test_one_rank_equals_plain_torch(bench, monkeypatch):
    """Case L1 (iv): the same bits as a loop written by hand; 12 steps over 2 epochs, dropout and augmentation on."""
    run = bench.train("--devices=auto:1")
    monkeypatch.syspath_prepend(str(bench.folder))
    threads = torch.get_num_threads()
    torch.set_num_threads(json.loads(run.plan_path.read_text())["threads"])
    try:
        import toy

        model, losses = plain_torch(toy, 24, steps=12, size=4, micro=1)
    finally:
        torch.set_num_threads(threads)
    assert [row["loss"] for row in metrics_of(run)] == pytest.approx(losses, rel=1e-6)
    weights = weights_of(run)
    for name, value in model.state_dict().items():
        assert torch.equal(weights[f"model.{name}"], value), name


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_lower_precisions_train_and_resume_exactly(bench, precision):
    whole = bench.train(precision=precision, duration="12 steps")
    bench.train(precision=precision, duration="5 steps", schedule={"shape": "constant"})
    done = bench.mgpu("resume", "latest", "--set=duration=12 steps")
    assert done.returncode == 0, done.stderr
    for name, value in weights_of(bench.latest).items():
        assert torch.equal(value, weights_of(whole)[name]), name
    assert metrics_of(whole)[-1]["loss"] < 4 * metrics_of(whole)[0]["loss"]
