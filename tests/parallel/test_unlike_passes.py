"""Models of which ranks use different parameters in one step, and parameters in unusual places: as in one process.

AdamW decays what has a gradient, be it zero: a parameter that nobody used must have none.
"""

import pytest
from rank_pool import RankFailed
from shop import POINTS, assert_same, make_workshop  # noqa: F401

pytestmark = pytest.mark.slow

UNLIKE = {
    "ddp": (3, {"strategy": "ddp", "unused_parameters": True}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "fsdp, whole": (3, {"strategy": "fsdp", "wrap": "whole"}),
    "fsdp, replicated": (4, {"strategy": "fsdp", "replicate": 2}),
}
STAGED = {"shard x pipeline": (4, {"strategy": "hybrid", "shard": 2, "pipeline": 2})}
SWITCH = {"target": "branching.py:Branching", "args": {"kind": "switch"}}
UNEVEN = {"target": "branching.py:Branching", "args": {"kind": "switch", "hidden": 11}}
EXPERTS = {"target": "branching.py:Branching", "args": {"kind": "experts"}}
SETTINGS = {
    **POINTS, "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 1e-2, "weight_decay": 0.3}},
    "batch": {"size": 6, "micro": 1},
}  # fmt: skip


@pytest.mark.parametrize("model", [SWITCH, UNEVEN, EXPERTS], ids=["switch", "uneven", "experts"])
@pytest.mark.parametrize("name", list(UNLIKE))
def test_ranks_may_use_different_parameters(workshop, name, model):
    """With accumulation, and a last batch of which not every replica has a micro batch."""
    world, parallel = UNLIKE[name]
    settings = {**SETTINGS, "model": model}
    assert_same(workshop.train(world, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp, whole"])
def test_a_loss_beside_the_output_counts(workshop, name):
    """Of experts, by an attribute: the output alone does not lead to all that the loss depends on."""
    world, parallel = UNLIKE[name]
    settings = {**SETTINGS, "model": EXPERTS, "task": "branching.py:Balanced", "evaluate": {}}
    settings["data"] = {"train": "stack.py:Points"}
    assert_same(workshop.train(world, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


@pytest.mark.parametrize("name, model", [("ddp", "Skipping"), ("fsdp, whole", "Skipping"), ("fsdp, whole", "Either")])
def test_blocks_may_be_passed_over(workshop, name, model):
    world, parallel = UNLIKE[name]
    settings = {**SETTINGS, "model": f"branching.py:{model}"}
    assert_same(workshop.train(world, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [*UNLIKE, *STAGED])
def test_numbers_and_shared_weights_are_parameters_like_others(workshop, name, tied):
    """A parameter without dimensions has nothing to cut, one that two blocks share belongs to neither."""
    world, parallel = {**UNLIKE, **STAGED}[name]
    settings = {**SETTINGS, "model": {"target": "branching.py:Gained", "args": {"tied": tied}}}
    trained = workshop.train(world, parallel=parallel, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)
    if name == "fsdp":
        assert any("blocks.0, blocks.3 share parameters" in note for note in trained.notes) == tied


def test_a_gradient_that_does_not_come_names_the_parameter_and_the_option(workshop):
    with pytest.raises(RankFailed, match=r"no gradient came for blocks\.\d\.\S+, .* and \d+ more"):
        workshop.train(2, parallel={"strategy": "ddp"}, model=SWITCH, **SETTINGS)
    settings = {**POINTS, "model": {"target": "stack.py:Normed", "args": {"unused": True}}}
    with pytest.raises(RankFailed, match=r"no gradient came for spare\.weight, spare\.bias: the loss"):
        workshop.train(2, parallel={"strategy": "ddp"}, **settings)


def test_an_unlike_order_of_blocks_is_an_error_that_tells_what_to_do(workshop):
    """The shards of the two blocks have the same sizes, so that FSDP itself sees nothing."""
    settings = {**SETTINGS, "model": "branching.py:Either", "batch": {"size": 2, "micro": 1}}
    with pytest.raises(RankFailed, match="different orders"):
        workshop.train(2, parallel={"strategy": "fsdp"}, **settings)


def test_a_static_graph_may_have_unused_parameters(workshop):
    parallel = {"strategy": "ddp", "static_graph": True, "unused_parameters": True}
    settings = {**SETTINGS, "model": {"target": "stack.py:Normed", "args": {"unused": True, "norm": False}}}
    settings["batch"], settings["data"] = {"size": 2, "micro": 1}, {"train": "stack.py:Points"}
    settings["evaluate"] = {}
    assert_same(workshop.train(2, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


def test_a_loss_that_reads_a_weight_of_the_last_stage_is_right_in_a_pipeline(workshop):
    settings = {**SETTINGS, "model": "branching.py:Gained", "task": "branching.py:Penalised"}
    settings["data"], settings["evaluate"] = {"train": "stack.py:Points"}, {}
    trained = workshop.train(2, parallel={"strategy": "pipeline"}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)


@pytest.mark.parametrize("parallel", [
    {"strategy": "fsdp"}, {"strategy": "tensor", "plan": {"blocks.*.linear": "colwise_gather"}},
])  # fmt: skip
def test_a_loss_that_reads_parts_of_weights_is_an_error(workshop, parallel):
    task = {"target": "branching.py:Penalised", "args": {"names": ["blocks.0.linear.weight"]}}
    settings = {**SETTINGS, "model": "branching.py:Gained", "task": task}
    settings["data"], settings["evaluate"] = {"train": "stack.py:Points"}, {}
    assert_same(workshop.train(2, parallel={"strategy": "ddp"}, **settings), workshop.single(**settings), 1e-9)
    with pytest.raises(RankFailed, match="reads parameters of the model beside calling it"):
        workshop.train(2, parallel=parallel, **settings)


@pytest.mark.parametrize("schedule, task, words", [
    ("1f1b", "branching.py:Scaled", "fails where it reads scale of the model"),
    ("1f1b", {"target": "branching.py:Penalised", "args": {"names": ["blocks.0.linear.weight"]}},
     "fails where it reads get_parameter of the model"),
    ("zbv", "branching.py:Scaled", r"beside calling it \(scale\), whose gradients"),
    ("zero-bubble", "branching.py:Penalised", r"beside calling it \(head\.weight\), whose gradients"),
])  # fmt: skip
def test_a_loss_that_reads_what_a_pipeline_cannot_give_it_is_an_error(workshop, schedule, task, words):
    settings = {**SETTINGS, "model": "branching.py:Gained", "task": task}
    settings["data"], settings["evaluate"] = {"train": "stack.py:Points"}, {}
    with pytest.raises(RankFailed, match=words):
        workshop.train(2, parallel={"strategy": "pipeline", "schedule": schedule}, **settings)
