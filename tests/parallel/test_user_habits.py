"""What models and tasks do beside the textbook: the same numbers as in one process, or an error that says why not."""

import pytest
from rank_pool import RankFailed
from shop import assert_same, make_workshop  # noqa: F401

pytestmark = pytest.mark.slow

SPLIT = {
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "pipeline": (2, {"strategy": "pipeline"}),
    "shard x pipeline": (4, {"strategy": "hybrid", "shard": 2, "pipeline": 2}),
}
SETTINGS = {
    "data": {"train": "stack.py:Points"}, "evaluate": {}, "task": "habits.py:Plain", "model": "habits.py:Staged",
    "batch": {"size": 8, "micro": 2},
}  # fmt: skip


def agrees(workshop, name, tolerance=1e-9, **settings):
    world, parallel = SPLIT[name]
    trained = workshop.train(world, parallel=parallel, **{**SETTINGS, **settings})
    assert_same(trained, workshop.single(**{**SETTINGS, **settings}), tolerance)
    return trained


@pytest.mark.parametrize("settings", [
    {"task": "habits.py:Popping", "data": {"train": "habits.py:Named"}}, {"task": "habits.py:InPlace"},
    {"task": "habits.py:Mixup"},
], ids=["pops", "in place", "mixup"])  # fmt: skip
@pytest.mark.parametrize("name", ["ddp", "pipeline"])
def test_a_task_may_do_what_it_likes_before_it_calls_the_model(workshop, name, settings):
    agrees(workshop, name, **settings)


@pytest.mark.parametrize("name", ["fsdp", "shard x pipeline"])
def test_names_of_modules_are_free(workshop, name):
    agrees(workshop, name)


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
@pytest.mark.parametrize("name", ["fsdp", "pipeline", "shard x pipeline"])
def test_batch_norm_counts_each_pass_once_and_in_order(workshop, name, kind):
    """With recomputed activations, whose second pass must not count, and micro batches of several shapes."""
    settings = {"model": {"target": "habits.py:Staged", "args": {"norm": True}}, "batch": {"size": 8, "micro": 1}}
    settings["data"] = {"train": "habits.py:Long"}
    # Not Adam, which makes steps of the rounding errors that are the gradient of a bias before a batch norm.
    settings["optimizer"] = {"target": "torch.optim:SGD", "args": {"lr": 0.01}}
    trained = agrees(workshop, name, activation_checkpointing=kind, **settings)
    assert_same(trained, workshop.single(**{**SETTINGS, **settings}), 1e-9)
    assert int(trained.weights["model.stages.0.norm.num_batches_tracked"]) == 8 + 8 + 6 + 8 + 8


def test_stages_without_a_batch_norm_keep_the_order_too(workshop):
    settings = {"batch": {"size": 8, "micro": 1}, "data": {"train": "habits.py:Long"}}
    settings["optimizer"] = {"target": "torch.optim:SGD", "args": {"lr": 0.01}}
    agrees(workshop, "pipeline", model="habits.py:Halfway", **settings)


def test_trial_passes_leave_buffers_alone(workshop):
    """Only `sequential` goes through a model in the order in which one process would."""
    SPLIT["one by one"] = (2, {"strategy": "pipeline", "schedule": "sequential"})
    agrees(workshop, "one by one", model="habits.py:Counting")


def test_a_hook_on_the_whole_model_is_no_part_of_a_pipeline(workshop):
    agrees(workshop, "fsdp", model="habits.py:Hooked")
    with pytest.raises(RankFailed, match="the model has forward hooks on itself"):
        agrees(workshop, "pipeline", model="habits.py:Hooked")


@pytest.mark.parametrize("name", ["ddp", "pipeline"])
def test_gradients_of_each_precision_are_divided_in_it(workshop, name):
    """By 6 and by 8 samples: what bfloat16 has of a sixth is 0.2 % off."""
    settings = {"model": "habits.py:Mixed", "batch": {"size": 6, "micro": 2}, "clip_norm": None}
    settings["optimizer"] = {"target": "torch.optim:SGD", "args": {"lr": 0.01}}
    world, parallel = SPLIT[name]
    trained = workshop.train(world, parallel=parallel, **{**SETTINGS, **settings})
    one = workshop.single(**{**SETTINGS, **settings})
    assert trained.losses == pytest.approx(one.losses, rel=3e-4)
    assert trained.norms == pytest.approx(one.norms, rel=3e-4)


def test_an_optimizer_factory_gets_parameters_and_groups_of_any_rank_are_kept(workshop):
    """Scalars are not sharded, and only one stage has some."""
    optimizer = {"target": "habits.py:by_dimensions", "args": {"lr": 1e-2}}
    for name in ("fsdp", "shard x pipeline"):
        agrees(workshop, name, model="branching.py:Gained", optimizer=optimizer)
    world, parallel = SPLIT["shard x pipeline"]
    settings = {**SETTINGS, "model": "branching.py:Gained", "optimizer": optimizer}
    half = workshop.train(world, parallel=parallel, duration="3 steps", **settings)
    resumed = workshop.resume(half.run, 2, parallel={"strategy": "fsdp"}, duration="5 steps")
    assert_same(resumed, workshop.single(**settings), 1e-9)


@pytest.mark.parametrize("world, n", [(2, 24), (3, 22)])
def test_a_static_graph_sums_in_every_step(workshop, world, n):
    settings = {**SETTINGS, "batch": {"size": world, "micro": 1}, "duration": "9 steps"}
    settings["data"] = {"train": {"target": "stack.py:Points", "args": {"n": n}}}
    trained = workshop.train(world, parallel={"strategy": "ddp", "static_graph": True}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)


def test_powersgd_takes_several_buckets(workshop):
    parallel = {"strategy": "ddp", "compress": "powersgd", "powersgd_start": 2, "bucket_mb": 1e-4}
    trained = workshop.train(2, parallel=parallel, **{**SETTINGS, "duration": "8 steps"})
    exact = workshop.single(**{**SETTINGS, "duration": "8 steps"})
    assert trained.losses == pytest.approx(exact.losses, rel=0.3)
