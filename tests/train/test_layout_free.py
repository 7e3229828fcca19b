"""What must not depend on the layout, through the real command on real ranks: weights, draws, evaluation, streams, drift."""

import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import metrics_of, weights_of

from mgpu.data.order import EpochOrder
from mgpu.runs import State

pytestmark = pytest.mark.slow

SGD = {"target": "torch.optim:SGD", "args": {"lr": 0.1}}
LOSS = {"target": "torch.nn:CrossEntropyLoss"}
NUMBERS = {"model": "toy.py:OneWeight", "optimizer": SGD, "clip_norm": None}


def target(name, **arguments):
    return {"target": f"toy.py:{name}", "args": arguments}


@pytest.mark.parametrize(
    "devices, micro", [("cpu:2", 1), ("cpu:1", 1), ("cpu:1", 2)], ids=["two-ranks", "two-micro-batches", "one-batch"]
)
def test_the_gradient_is_the_mean_over_tokens_whatever_the_split(bench, devices, micro):
    """Case E1: one token 4, three tokens 0. The mean of means would be 2."""
    data = {"train": target("Ragged", values=[[4.0], [0.0, 0.0, 0.0]]), "collate": "toy.py:as_list"}
    run = bench.train(
        **NUMBERS, data=data, task=target("TokenMean"), batch={"size": 2, "micro": micro}, duration="2 steps",
        devices=devices,
    )  # fmt: skip
    assert weights_of(run)["model.w"].item() == pytest.approx(-0.2, rel=1e-6)
    assert [row["loss"] for row in metrics_of(run)] == pytest.approx([0.0, -0.1], abs=1e-7)


def test_ignored_tokens_weigh_nothing_in_any_layout(bench):
    """Must show 1: the gradient of one big batch by plain torch, to 1e-6, for sequences with 1 to 7 counted tokens."""
    settings = {
        "model": "toy.py:Bigram",
        "data": {"train": target("Sentences")},
        "task": {"target": "mgpu.train:Supervised", "args": {"loss": LOSS, "unit": "token"}},
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 1.0}},
        "clip_norm": None,
        "precision": "fp64",
        "duration": "2 steps",
    }
    expected = _plain_bigram(bench.folder)
    for devices, micro in (("cpu:1", 12), ("cpu:1", 1), ("cpu:2", 3), ("cpu:4", 1), ("cpu:3", 2)):
        run = bench.train(**settings, batch={"size": 12, "micro": micro}, devices=devices)
        found = weights_of(run)
        for name, value in expected.items():
            error = (found[f"model.{name}"] - value).norm() / value.norm()
            assert error < 1e-6, (devices, micro, name)


def _plain_bigram(folder):
    """Two steps of SGD with rate 1 over batches of 12 and 10, each one forward pass; loss by hand."""
    import importlib.util

    from mgpu.data.seeding import seed_everything, weights_seed

    spec = importlib.util.spec_from_file_location("toy_alone", folder / "toy.py")
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    seed_everything(weights_seed(0))
    model = toy.Bigram().double()
    samples = toy.Sentences()
    order = EpochOrder(22, 0, 0).at(range(22)).tolist()
    for ids in (order[:12], order[12:]):
        tokens, targets = (torch.stack(part) for part in zip(*(samples[i] for i in ids), strict=True))
        logs = model(tokens).log_softmax(-1)
        picked = [-logs[b, t, targets[b, t]] for b in range(len(ids)) for t in range(7) if targets[b, t] >= 0]
        torch.stack(picked).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)
                parameter.grad = None
    return model.state_dict()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_draws_are_distinct_and_belong_to_seed_epoch_and_sample(bench, start):
    """Case H1: 2 ranks with 2 loader workers each, 2 epochs of 16 samples."""

    def draws(name, seed):
        bench.train(
            **NUMBERS, data={"train": target("Drawn"), "workers": 2, "start": start}, seed=seed,
            task=target("Notes", path=name), batch={"size": 4, "micro": 1}, duration="2 epochs",
        )  # fmt: skip
        texts = [path.read_text() for path in sorted(bench.folder.glob(f"{name}-*.txt"))]
        return sorted(tuple(map(int, line.split())) for text in texts for line in text.splitlines())

    first = draws("first", 0)
    assert [index for index, _ in first] == sorted(list(range(16)) * 2)
    assert len({value for _, value in first}) == 32
    assert draws("again", 0) == first
    if start == "fork":
        assert not {value for _, value in draws("other", 1)} & {value for _, value in first}


@pytest.mark.parametrize("count, micro", [(10, 1), (10, 3), (1, 1)])
def test_evaluation_counts_every_sample_once(bench, count, micro):
    """Case D2: values 0..9 have the mean 4.5 on any number of ranks; one sample on four ranks neither hangs nor repeats."""
    values = list(range(count))
    expected = sum(values) / count
    for world in (1, 2, 3, 4):
        run = bench.train(
            **NUMBERS, task=target("EvaluatedProduct"), batch={"size": 4 * micro, "micro": micro}, duration="1 steps",
            data={"train": target("Numbers", values=[-10] * 12), "eval": target("Numbers", values=values)},
            metrics={
                "mean": "toy.py:MeanOfTargets", "count": "toy.py:CountOfTargets",
                "error": "torchmetrics:MeanAbsoluteError",
            },
            devices=f"cpu:{world}",
        )  # fmt: skip
        (found,) = [event for event in run.events() if event["event"] == "evaluated"]
        # one step of rate 0.1 on samples of -10 gives w = 1: loss w * x, error |w * x - x| = 0
        assert (found["mean"], found["count"], found["error"]) == (expected, count, 0.0)
        assert found["loss"] == pytest.approx(expected)


def test_a_stream_trains_alike_on_any_number_of_ranks_and_resumes(bench):
    """22 samples in batches of 8: an uneven tail, random augmentation and dropout, a stop in the middle of an epoch."""
    reference = None
    for world, workers in ((1, 0), (2, 2), (3, 1)):
        run = bench.train(
            data={"train": target("Stream"), "workers": workers}, batch={"size": 8, "micro": 2}, devices=f"cpu:{world}"
        )
        losses = [row["loss"] for row in metrics_of(run)]
        assert [row["samples"] for row in metrics_of(run)] == [8, 16, 22, 30, 38, 44]
        reference = reference or losses
        assert losses == pytest.approx(reference, rel=1e-5)
    bench.train(data={"train": target("Stream")}, batch={"size": 8, "micro": 2}, duration="2 steps", devices="cpu:3")
    done = bench.mgpu("resume", "latest", "--set=duration=2 epochs", "--devices=cpu:2")
    assert done.returncode == 0, done.stderr
    assert [row["loss"] for row in metrics_of(bench.latest)] == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize(
    "uneven, code, losses, weight",
    [
        # the gradient is the mean of x over what is live: (3 + 5) / 2 three times, then 3 alone twice
        ("use_all", 0, 5, -0.1 * (3 * 4 + 2 * 3)),
        ("shortest", 0, 3, -0.1 * 3 * 4),
        ("error", 1, 2, None),
    ],
)
def test_uneven_parts_end_as_agreed(bench, uneven, code, losses, weight):
    """Case D3: rank 0 has 5 micro batches of 2, rank 1 has 3."""
    settings = {
        "data.train": "toy.py:UnevenStream",
        "data.sharded": "true",
        "data.uneven": uneven,
        "task": "toy.py:Product",
    }
    done = bench.mgpu(
        "train", "toy.yaml", *(f"--set={key}={value}" for key, value in settings.items()), "--set=model=toy.py:OneWeight",
        "--set=optimizer={target: torch.optim:SGD, args: {lr: 0.1}}", "--set=batch={size: 4, micro: 2}",
        "--set=clip_norm=null", "--set=duration=1 epochs",
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert len(metrics_of(bench.latest)) == losses
    if weight is not None:
        assert weights_of(bench.latest)["model.w"].item() == pytest.approx(weight, rel=1e-6)
    assert ("have 5, 3 micro batches" in done.stderr) == (uneven != "use_all")


def test_replicas_that_see_other_streams_are_told_so(bench):
    done = bench.mgpu(
        "train", "toy.yaml", "--set=data.train=toy.py:UnevenStream", "--set=task=toy.py:Product",
        "--set=model=toy.py:OneWeight", "--set=batch={size: 4, micro: 2}",
    )  # fmt: skip
    assert done.returncode == 1
    assert "streams of different lengths" in done.stderr


def test_a_users_sampler_gives_the_order(bench):
    run = bench.train(
        data={"train": target("Data"), "sampler": "toy.py:Backwards"}, task=target("Task", trace="ids"), duration="1 epochs",
        devices="cpu:1",
    )  # fmt: skip
    assert run.state is State.COMPLETED
    assert (bench.folder / "ids-0.txt").read_text().split() == [str(index) for index in range(23, -1, -1)]
    done = bench.mgpu("train", "toy.yaml", "--set=data.sampler=toy.py:split_by_rank")
    assert done.returncode == 2
    assert "data.sampler" in done.stderr and "splits the data over ranks by itself" in done.stderr
    assert len(bench.store.list()) == 1


def test_batch_norm_keeps_the_same_statistics_in_every_layout(bench):
    """To the last bit under `exact`; in `fast` to rounding (SGD: Adam makes steps of gradients that are only rounding)."""
    for numerics in ("exact", "fast"):
        reference = None
        for world in (1, 3):
            run = bench.train(
                model="toy.py:Normed", batch={"size": 16, "micro": 4}, devices=f"cpu:{world}", duration="7 steps",
                numerics=numerics, optimizer=SGD,
            )  # fmt: skip
            weights = weights_of(run)
            reference = reference or weights
            for name, value in weights.items():
                assert numerics == "fast" or torch.equal(value, reference[name]), name
                torch.testing.assert_close(value, reference[name], rtol=1e-4, atol=1e-6)
        assert not torch.equal(weights["model.norm.running_mean"], torch.zeros(16))
        # epochs of 24: a whole batch of 4 micro batches, then one of 2
        assert weights["model.norm.num_batches_tracked"] == 4 + 2 + 4 + 2 + 4 + 2 + 4


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            ["model=toy.py:Frozen", "task={target: toy.py:Unfreezing, args: {at: 5}}"],
            ["parameter first.weight was unfrozen"],
        ),
        (["model=planted.py:OneLayerNotSynced"], ["parameter first.weight on rank 1", "at step 1"]),
        (["model=toy.py:Counting"], ["buffer seen on rank 1", "its own micro batches"]),
    ],
    ids=["unfrozen", "ignored-by-ddp", "buffer"],
)
def test_ranks_that_would_drift_apart_are_stopped_and_told_what_drifts(bench, settings, words):
    """Case G10."""
    (bench.folder / "planted.py").write_text((Path(__file__).parents[1] / "planted.py").read_text())
    done = bench.mgpu("train", "toy.yaml", *(f"--set={setting}" for setting in settings))
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr
    assert bench.latest.last_step <= 3


def test_unfreezing_is_caught_on_one_rank_too(bench):
    """Its optimizer would not know the parameter either."""
    task = "--set=task={target: toy.py:Unfreezing, args: {at: 5}}"
    done = bench.mgpu("train", "toy.yaml", "--devices=cpu:1", "--set=model=toy.py:Frozen", task)
    assert done.returncode == 1
    assert "parameter first.weight was unfrozen" in done.stderr


GPT = """\
name: gpt
model: {target: mgpu.zoo:GPT, args: {layers: 2, width: 32, context: 16, dropout: 0.1}}
data: {train: {target: mgpu.zoo:PythonSource, args: {split: train, context: 16, limit_bytes: 40000}}}
task: mgpu.zoo:NextByte
optimizer: {target: torch.optim:AdamW, args: {lr: 1e-3}}
schedule: {warmup: 10 steps, shape: cosine}
batch: {size: 24, micro: 2}
duration: 50 steps
clip_norm: 1.0
numerics: exact
"""
RESIDUAL = """\
name: residual
model: {target: mgpu.zoo:ResidualNet, args: {width: 8, blocks: 1, dropout: 0.1}}
data: {train: {target: mgpu.zoo:Digits, args: {split: train}}}
task: {target: mgpu.train:Supervised, args: {loss: {target: torch.nn:CrossEntropyLoss}}}
optimizer: {target: torch.optim:SGD, args: {lr: 0.05, momentum: 0.9}}
batch: {size: 44, micro: 4}
duration: 50 steps
clip_norm: 1.0
numerics: exact
"""


def _same_bits(run, expected):
    weights = weights_of(run)
    return weights.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) for name, value in weights.items()
    )


@pytest.mark.parametrize("text", [GPT, RESIDUAL], ids=["gpt-adamw", "residual-sgd"])
def test_exact_numerics_give_the_same_bits_on_any_number_of_ranks(bench, text):
    """Must show 2, issue by issue: 1, 2, 3, 4 and 6 ranks (12 and 11 micro batches a step, so splits are uneven too), and a
    run that is killed on 4 ranks and goes on on 3, then on 1."""
    (bench.folder / "toy.yaml").write_text(text)
    whole = bench.train("--devices=cpu:1")
    expected, rows = weights_of(whole), metrics_of(whole)
    for world in (2, 3, 4, 6):
        run = bench.train(f"--devices=cpu:{world}")
        assert _same_bits(run, expected), world
        for key in ("loss", "grad_norm", "lr"):
            assert [row[key] for row in metrics_of(run)] == [row[key] for row in rows]
    process = bench.start("train", "toy.yaml", "--devices=cpu:4", "--set=checkpoint.every=7 steps", "--name=killed")
    while bench.latest.spec_path.read_text().find("killed") < 0 or bench.latest.last_step < 16:
        assert process.poll() is None
    pids = next(event["pids"] for event in bench.latest.events() if event["event"] == "attempt_started")
    os.kill(pids[2], signal.SIGKILL)
    process.communicate(timeout=60)
    assert bench.latest.state is State.FAILED
    process = bench.start("resume", "latest", "--devices=cpu:3")
    assert bench.interrupt(process, step=bench.latest.last_step + 10) == 130
    done = bench.mgpu("resume", "latest", "--devices=cpu:1")
    assert done.returncode == 0, done.stderr
    assert [event["world"] for event in bench.latest.events() if event["event"] == "attempt_started"] == [4, 3, 1]
    assert [row["step"] for row in metrics_of(bench.latest)] == list(range(1, 51))
    assert _same_bits(bench.latest, expected)
