"""`mgpu verify` passes what is right and finds what is planted, with step, parameter and cause."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mgpu.errors import Refusal
from mgpu.inspect.layouts import Layout
from mgpu.inspect.recording import _rates, distance
from mgpu.train.trace import digest

ROOT = Path(__file__).parents[2]


def verify(bench, *arguments, spec="toy.yaml", layouts="cpu:1,cpu:2", steps=6):
    shutil.copy(ROOT / "tests" / "planted.py", bench.folder)
    done = bench.mgpu("verify", spec, f"--layouts={layouts}", f"--steps={steps}", *arguments)
    return done.returncode, " ".join(done.stdout.split()), done.stderr


@pytest.mark.slow
def test_a_sound_training_agrees_in_all_layouts(bench):
    code, out, err = verify(bench, layouts="cpu:1,cpu:2,cpu:3,cpu:4")
    assert code == 0, out + err
    assert out.count("agrees") == 3
    assert "The layout is no part of the result." in out


@pytest.mark.slow
def test_exact_numerics_agree_to_the_last_bit(bench):
    code, out, err = verify(bench, "--set=numerics=exact", "--json", layouts="cpu:1,cpu:3")
    assert code == 0, out + err
    (row,) = json.loads(out)["layouts"]
    assert (row["loss"], row["gradient"], row["parameter"], row["steps"]) == (0, 0, 0, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, words",
    [
        (["task=planted.py:AveragedPerRank"], ["step 1: loss", "0.5 relative", "depends on rank, world size"]),
        # epochs of 3 whole batches and a tail: the fourth step is the first that the fault touches
        (
            ["task=planted.py:CountingTask", "optimizer={target: planted.py:FullCountInTheTail, args: {lr: 0.01}}"],
            ["step 4: parameter first.weight", "optimizer's own state"],
        ),
        (["data.train.target=planted.py:EqualSeeds"], ["step 1: content of micro batch", "seed made of rank"]),
        (
            ["task=planted.py:CountingTask", "optimizer={target: planted.py:SteppedPerMicroBatch, args: {lr: 0.01}}"],
            ["step 1: learning rate", "once a micro batch"],
        ),
        (["model=planted.py:OneLayerNotSynced"], ["step 1: gradient of first.weight", "not summed over the ranks"]),
    ],
    ids=["averaged-per-rank", "tail", "equal-seeds", "schedule", "layer-not-synced"],
)
def test_a_planted_fault_is_found_and_named(bench, changes, words):
    code, out, err = verify(bench, *(f"--set={change}" for change in changes))
    assert code == 1, out + err
    for word in words:
        assert word in out
    assert "DIFFERS" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "digits"])
def test_the_configs_agree(bench, name):
    code, out, err = verify(bench, spec=ROOT / "configs" / f"{name}.yaml", steps=5)
    assert code == 0, out + err


@pytest.mark.slow
def test_a_training_that_does_not_repeat_itself_is_no_reference(bench):
    code, out, err = verify(bench, "--set=task=planted.py:AnotherEachTime", steps=2)
    assert code == 2, out + err
    assert "gives another result when it is repeated: step 1, loss" in " ".join(err.split())


@pytest.mark.slow
def test_every_strategy_agrees_on_a_gpt(bench):
    """Must show 3 of the strategies' issue; dropout off, which pipeline and tensor draw otherwise."""
    small = "model={target: mgpu.zoo:GPT, args: {layers: 4, width: 32, context: 16, heads: 2}}"
    data = [f"data.{part}.args.context=16" for part in ("train", "eval")]
    changes = [small, *data, "batch={size: 16, micro: 4}", "task={target: mgpu.zoo:NextByte, args: {length: 1}}"]
    code, out, err = verify(
        bench,
        *(f"--set={change}" for change in changes),
        spec=ROOT / "configs" / "quickstart.yaml",
        layouts="all",
        steps=4,
    )
    assert code == 0, out + err
    for name in ("ddp@cpu:2", "fsdp@cpu:2", "model@cpu:2", "pipeline@cpu:2", "tensor@cpu:2", "dp@cpu:2"):
        assert f"{name} " in out, out + err
    assert "hybrid:replicate=2:pipeline=2@cpu:4: 4 steps" in err
    assert out.count("agrees") == 7
    assert "left out" not in err


def test_what_cannot_be_verified_is_refused(bench):
    assert verify(bench, layouts="cpu:two")[0] == 2
    code, _, err = verify(bench, layouts="cpu:1,cpu:9")
    assert code == 2
    assert "9 replicas" in err
    assert "steps" not in err  # refused before anything was trained


def test_layouts_are_devices_with_or_without_a_strategy():
    assert Layout.parse("cpu:2") == Layout("cpu:2")
    assert Layout.parse(" fsdp@4") == Layout("4", "fsdp")
    assert Layout.parse("ddp@cpu:2").overrides == ["devices=cpu:2", "parallel={strategy: ddp}"]
    hybrid = Layout.parse("hybrid:replicate=2:pipeline=2@cpu:4")
    assert hybrid == Layout("cpu:4", "hybrid", ("replicate=2", "pipeline=2"))
    assert hybrid.overrides[1] == "parallel={strategy: hybrid, replicate: 2, pipeline: 2}"
    assert Layout.parse("acme.strategies:Ring:chunks=3@2") == Layout("2", "acme.strategies:Ring", ("chunks=3",))
    for text in ("", "cpu:", "a b", "@2", "hybrid:=2@cpu:4", "hybrid:replicate=@cpu:4"):
        with pytest.raises(Refusal):
            Layout.parse(text)


def test_rates_are_those_of_each_parameter_on_every_rank():
    """In groups of whatever order; a rank that sees another rate is not outvoted."""
    assert _rates([{"lr": {"a": 0.1, "b": 0.2}}, {"lr": {"b": 0.2, "c": 0.1}}]) == {"a": 0.1, "b": 0.2, "c": 0.1}
    assert _rates([{"lr": {"a": 0.1}}, {"lr": {"a": 0.3}}]) == {"a": 0.1, "a on rank 1": 0.3}


def test_the_distance_of_two_digests_estimates_that_of_the_tensors():
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(4000, generator=generator)
    for size in (1e-4, 1.0):
        error = torch.randn(4000, generator=generator) * size
        found = distance(digest(base), digest(base + error))
        assert 0.3 < found / float(error.norm()) < 3
    assert distance(digest(base), digest(base.clone())) == 0
    assert distance(digest(base), digest(base * float("nan"))) == float("inf")
