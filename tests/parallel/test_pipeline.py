"""Pipelines: every schedule, models of other shapes, what cannot be cut."""

import pytest
from rank_pool import RankFailed
from shop import POINTS, assert_same, make_workshop  # noqa: F401

from mgpu.parallel._schedules import SCHEDULES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule_gives_what_one_process_gives(workshop, schedule, ranks):
    """Eight micro batches a step over 2 and 4 ranks (2 to 8 stages), then a smaller window of three."""
    settings = {
        "model__args": {"double": True, "layers": 8}, "batch": {"size": 16, "micro": 2}, "duration": "4 steps",
    }  # fmt: skip
    parallel = {"strategy": "pipeline", "schedule": schedule}
    trained = workshop.train(ranks, parallel=parallel, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)
    kind = SCHEDULES[schedule].kind
    assert trained.told[0]["schedules"][:1] == ([kind] if kind else [])
    stages = sum(len(told["stages"]) for told in trained.told)
    assert stages == SCHEDULES[schedule].stages(ranks, 2)


@pytest.mark.parametrize("parallel", [
    {"strategy": "pipeline"}, {"strategy": "pipeline", "split": ["encoder.blocks.3"]},
    {"strategy": "pipeline", "schedule": "interleaved"}, {"strategy": "model"},
])  # fmt: skip
def test_parameters_outside_of_any_stage_belong_to_the_first(workshop, parallel):
    settings = {**POINTS, "model": "stack.py:Patches"}
    assert_same(workshop.train(2, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_batch_norm_in_a_pipeline(workshop, schedule):
    settings = {**POINTS, "model": "stack.py:Normed"}
    trained = workshop.train(2, parallel={"strategy": "pipeline", "schedule": schedule}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev", "sequential"])
def test_activations_that_are_transposed_views_travel(workshop, schedule):
    settings = {**POINTS, "model": "stack.py:Turned"}
    trained = workshop.train(2, parallel={"strategy": "pipeline", "schedule": schedule}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)


def test_an_output_with_something_that_cannot_travel(workshop):
    """The loss and the evaluation are of the logits; the rest stays where it is."""
    settings = {**POINTS, "model": "stack.py:Remembering"}
    trained = workshop.train(2, parallel={"strategy": "pipeline"}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)


@pytest.mark.parametrize(
    "model, told",
    [
        ("stack.py:Skipping", "earlier stage"),
        ("stack.py:Scaled", "only one tensor is handed over"),
        ({"target": "stack.py:Scaled", "args": {"constant": True}}, "is not the one that it misses"),
    ],
)
def test_a_value_that_skips_a_stage_is_refused_by_name(workshop, model, told):
    with pytest.raises(RankFailed, match=told):
        workshop.train(2, parallel={"strategy": "pipeline"}, **{**POINTS, "model": model})


def test_accumulated_gradients_are_not_scaled_again(workshop):
    """Case G4: weights 1, loss the mean of the outputs over x = 1..8: both gradients are 4.5, whatever the schedule."""
    settings = {
        "model": "stack.py:Chain", "data": {"train": "stack.py:Numbers"}, "task": "stack.py:Sum", "clip_norm": None,
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}}, "batch": {"size": 8, "micro": 2},
        "duration": "1 steps", "evaluate": {},
    }  # fmt: skip
    parallel = {"strategy": "pipeline", "schedule": "gpipe", "split": ["last"]}
    trained = workshop.train(2, parallel=parallel, **settings)
    assert trained.weights["model.first.weight"].item() == pytest.approx(1 - 0.45)
    assert trained.weights["model.last.weight"].item() == pytest.approx(1 - 0.45)
    assert trained.norms == pytest.approx([4.5 * 2**0.5])
    assert trained.losses == pytest.approx([4.5])
