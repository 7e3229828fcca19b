"""Cases that go wrong in silence elsewhere: running statistics, unused parameters, little data, unfreezing, drift,
compression, recomputation and compilation."""

import pytest
import torch
from rank_pool import RankFailed
from shop import POINTS, assert_same, make_workshop  # noqa: F401

pytestmark = pytest.mark.slow

SPREAD = {
    "ddp": (3, {"strategy": "ddp", "unused_parameters": True}),
    "fsdp": (4, {"strategy": "fsdp"}),
    "hybrid": (4, {"strategy": "hybrid", "shard": 2, "pipeline": 2}),
}
CHAIN = {
    "data": {"train": "stack.py:Numbers"}, "clip_norm": None, "evaluate": {}, "task": "stack.py:Sum",
    "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}}, "batch": {"size": 2, "micro": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", list(SPREAD))
def test_running_statistics_are_those_of_one_process(workshop, name):
    """Batch norm's buffers too, over windows that do not divide evenly."""
    world, parallel = SPREAD[name]
    settings = {**POINTS, "model": "stack.py:Normed"}
    trained = workshop.train(world, parallel=parallel, **settings)
    assert int(trained.weights["model.blocks.0.norm.num_batches_tracked"]) == 4 + 4 + 3 + 4 + 4
    assert_same(trained, workshop.single(**settings), 1e-9)


@pytest.mark.parametrize("name", list(SPREAD))
def test_parameters_without_a_gradient(workshop, name):
    world, parallel = SPREAD[name]
    settings = {**POINTS, "model": {"target": "stack.py:Normed", "args": {"unused": True}}}
    assert_same(workshop.train(world, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


@pytest.mark.parametrize("name", list(SPREAD))
def test_fewer_samples_than_one_global_batch(workshop, name):
    """Three samples, of which one replica or more gets none."""
    world, parallel = SPREAD[name]
    tokens = {"target": "stack.py:Tokens", "args": {"n": 3}}
    settings = {"data": {"train": tokens, "eval": {**tokens, "args": {"n": 1}}}, "model__args": {"double": True}}
    settings["batch"] = {"size": 8, "micro": 1}
    assert_same(workshop.train(world, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


def test_unfreezing_after_the_start_is_an_error_that_names_the_parameter(workshop):
    """Case G10: the ranks would train the parameter on gradients of their own."""
    with pytest.raises(RankFailed, match=r"first\.weight was unfrozen after the start"):
        workshop.train(2, parallel={"strategy": "ddp"}, model="stack.py:Thawing", duration="3 steps", **CHAIN)


def test_ranks_that_drift_apart_are_found_before_they_are_saved(workshop):
    settings = {**CHAIN, "task": "stack.py:Apart", "duration": "1 steps", "model": "stack.py:Chain"}
    with pytest.raises(RankFailed, match=r"last\.weight on rank 1 is not what the other ranks hold"):
        workshop.train(2, parallel={"strategy": "ddp"}, **settings)


@pytest.mark.parametrize("compress, error", [("fp16", 1e-3), ("bf16", 1e-2), ("powersgd", 0.5)])
def test_compressed_gradients_resume_to_the_same_bits(workshop, compress, error):
    """PowerSGD's memory, and the error that each rank carries on, are in the checkpoint."""
    parallel = {"strategy": "ddp", "compress": compress, "powersgd_start": 2, "powersgd_rank": 1}
    settings = {"model__args": {"double": True}}
    whole = workshop.train(2, parallel=parallel, **settings)
    half = workshop.train(2, parallel=parallel, duration="3 steps", **settings)
    resumed = workshop.resume(half.run, 2, duration="5 steps")
    for name, value in whole.weights.items():
        assert torch.equal(resumed.weights[name], value), name
    exact = workshop.single(**settings)
    difference = max(abs(a - b) for a, b in zip(whole.losses, exact.losses, strict=True))
    assert 0 < difference < error
    assert any("error_dict" in name for name in whole.weights) == (compress == "powersgd")


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("world, parallel", [
    (2, {"strategy": "ddp"}), (2, {"strategy": "fsdp"}), (2, {"strategy": "tensor"}), (2, {"strategy": "pipeline"}),
])  # fmt: skip
def test_recomputed_activations_change_nothing(workshop, world, parallel, kind):
    settings = {"model__args": {"double": True}}
    trained = workshop.train(world, parallel=parallel, activation_checkpointing=kind, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("world, parallel", [
    (2, {"strategy": "ddp"}), (2, {"strategy": "fsdp"}), (2, {"strategy": "pipeline"}),
])  # fmt: skip
def test_compiled_blocks_change_nothing(workshop, world, parallel):
    settings = {"model__args": {"double": True}, "duration": "2 steps"}
    trained = workshop.train(world, parallel=parallel, compile="aot_eager", **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("world, parallel", [
    (2, {"strategy": "fsdp"}), (2, {"strategy": "pipeline"}), (4, {"strategy": "hybrid", "shard": 2, "pipeline": 2}),
])  # fmt: skip
def test_lower_precisions_stay_near_one_process(workshop, world, parallel, precision):
    settings = {"precision": precision, "duration": "3 steps"}
    trained = workshop.train(world, parallel=parallel, **settings)
    assert trained.losses == pytest.approx(workshop.single(**settings).losses, rel=1e-3)


def test_a_step_issues_the_collectives_it_should(workshop):
    """By CommDebugMode, on two ranks: two passes each of a model of four layers."""
    untied = {"model__args": {"tie": False}}
    accumulated = workshop.collectives(2, parallel={"strategy": "ddp"}, **untied)
    at_once = workshop.collectives(2, parallel={"strategy": "ddp"}, batch={"size": 4, "micro": 2}, **untied)
    # One bucket of gradients, and the sums of the losses: the first pass, which does not synchronise, adds nothing.
    assert accumulated == at_once == {"c10d.allreduce_": 2}
    units, passes = 4 + 1, 2
    sharded = workshop.collectives(2, parallel={"strategy": "fsdp"}, **untied)
    assert sharded == {
        "c10d._allgather_base_": 2 * units * passes, "c10d._reduce_scatter_base_": units, "c10d.allreduce_": 1,
    }  # fmt: skip
    plan = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
    split = workshop.collectives(2, parallel={"strategy": "tensor", "plan": plan}, **untied)
    # One sum for each layer, forward and backward, in each of four passes; after the first of all steps peers are compared.
    assert split == {"c10d_functional.all_reduce": 2 * 4 * 4, "c10d.allreduce_": 1, "c10d.allgather_": 1}
