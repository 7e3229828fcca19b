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


SKIPPING = {
    "one": {**POINTS, "model": "stack.py:Skipping"},
    "two-handed-over": {**POINTS, "model": "stack.py:Scaled"},
    "constant-and-one": {**POINTS, "model": {"target": "stack.py:Scaled", "args": {"constant": True}}},
    "u-net": {**POINTS, "model": "stack.py:UNet"},
    "encoder-decoder": {"model": "stack.py:Translator"},
    "integers": {**POINTS, "model": "stack.py:Chosen"},
    "changed-in-place": {**POINTS, "model": "stack.py:Overwriting"},
}
MIDDLE = {"encoder-decoder": ["encoder.1", "decoder.0", "decoder.1"]}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", list(SKIPPING))
def test_values_that_skip_stages(workshop, name, ranks):
    split = MIDDLE[name][:: 2 if ranks == 2 else 1][: ranks - 1] if name in MIDDLE else "auto"
    parallel = {"strategy": "pipeline", "split": split}
    trained = workshop.train(ranks, parallel=parallel, **SKIPPING[name])
    assert_same(trained, workshop.single(**SKIPPING[name]), 1e-9)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_values_that_skip_stages_in_every_schedule(workshop, schedule, ranks):
    """Eight micro batches a step, then three; 2 to 8 stages."""
    settings = {**SKIPPING["u-net"], "batch": {"size": 16, "micro": 2}, "duration": "4 steps"}
    trained = workshop.train(ranks, parallel={"strategy": "pipeline", "schedule": schedule}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)
    assert trained.told[0]["schedules"][:1] == ([kind] if (kind := SCHEDULES[schedule].kind) else [])


@pytest.mark.parametrize("schedule", [name for name, schedule in SCHEDULES.items() if schedule.stages(2, 2) == 4])
def test_a_bias_that_a_later_stage_takes_gets_its_whole_gradient(workshop, schedule):
    """Made of parameters alone, in the first of the decoder's stages: nothing that was received is on its way on."""
    settings = {**SKIPPING["encoder-decoder"], "batch": {"size": 16, "micro": 2}, "duration": "4 steps"}
    parallel = {"strategy": "pipeline", "schedule": schedule, "split": MIDDLE["encoder-decoder"]}
    assert_same(workshop.train(2, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


def test_values_that_skip_stages_go_on_from_a_checkpoint(workshop):
    settings, parallel = SKIPPING["encoder-decoder"], {"strategy": "pipeline", "split": ["decoder.0"]}
    whole = workshop.single(**settings)
    run = workshop.train(2, parallel=parallel, **{**settings, "duration": "3 steps"}).run
    assert_same(workshop.resume(run, 2, parallel=parallel, duration="5 steps"), whole, 1e-9, evaluations=False)
    run = workshop.train(2, parallel=parallel, **{**settings, "duration": "3 steps"}).run
    resumed = workshop.resume(run, 1, parallel={"strategy": "single"}, duration="5 steps")
    assert_same(resumed, whole, 1e-9, evaluations=False)


@pytest.mark.parametrize("model, told", [
    ("stack.py:Asking", r"Tensor.__bool__ in stage 0 depends on the values of activations"),
    ("stack.py:Reaching", r"takes blocks.0.linear.weight outside of the module that has it"),
    ("stack.py:Returning", r"blocks.0 of stage 0 takes a value of the later stage 1, made by blocks.3"),
    ({"target": "stack.py:Overwriting", "args": {"kept": True}}, r"that blocks\.2 has changed in place in a later stage"),
])  # fmt: skip
def test_a_model_that_cannot_be_cut_is_told_where_and_why(workshop, model, told):
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


@pytest.mark.parametrize("strategy, split, told", [
    ("pipeline", "time", "split by measured time of a micro batch: stage 0: layers.0"),
    ("pipeline", "auto", "split by floating-point operations of a micro batch: stage 0: layers.0 to layers.1"),
    ("model", "auto", "split by memory of weights, gradients, optimizer state and the activations of a micro batch: device 0"),
])  # fmt: skip
def test_a_model_is_cut_by_its_costs_told_and_cut_alike_on_a_resume(workshop, strategy, split, told):
    """Dropout in none of its layers, so that even a cut that a busy machine moves changes nothing."""
    settings, parallel = {"model__args": {"double": True}}, {"strategy": strategy, "split": split}
    run = workshop.train(2, parallel=parallel, duration="3 steps", **settings).run
    kept = (run.path / "split.json").read_text()
    trained = workshop.resume(run, 2, parallel=parallel, duration="5 steps")
    assert_same(trained, workshop.single(**settings), 1e-9, evaluations=False)
    notes = [event["text"] for event in run.events() if event["event"] == "note" and "split by" in event["text"]]
    assert len(notes) == 2 and notes[0].startswith(told)
    assert notes[1] == f"{notes[0]} (as in the attempt before)"
    assert (run.path / "split.json").read_text() == kept


def test_a_model_whose_costs_need_values_is_cut_by_weights_and_tells_why(workshop):
    """Reads its input's values at the start, which is no activation: all stages can follow."""
    settings = {**POINTS, "model": "stack.py:Finite"}
    trained = workshop.train(2, parallel={"strategy": "pipeline"}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)
    notes = [event["text"] for event in trained.run.events() if event["event"] == "note"]
    assert any(
        "split by number of weights (floating-point operations of a micro batch unknown" in text for text in notes
    )
