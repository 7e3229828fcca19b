"""When a training saves, and how it ends."""

import time

import pytest
import torch

from mgpu.data.position import Position
from mgpu.errors import CheckpointError
from mgpu.parallel.base import Context
from mgpu.runs import RunStore
from mgpu.spec import Span
from mgpu.spec.models import Checkpoint
from mgpu.train.saving import Saving, choose_start, has_ended


def at(step, epoch=0):
    return Position(step=step, epoch=epoch)


@pytest.mark.parametrize(
    "every, before, after, due",
    [
        (None, at(1), at(2), False),
        (Span(2, "steps"), at(1), at(2), True),
        (Span(2, "steps"), at(2), at(3), False),
        (Span(2, "steps"), at(2), at(2), False),  # fp16 skipped the step
        (Span(2, "epochs"), at(9, 1), at(10, 2), True),
        (Span(2, "epochs"), at(9, 2), at(10, 3), False),
        (Span(2, "epochs"), at(9, 2), at(10, 2), False),
    ],
)
def test_spans_end_where_they_say(every, before, after, due):
    assert has_ended(every, before, after) is due


@pytest.fixture
def saving(trainer):
    def make(**spec):
        one = trainer()
        context = Context(rank=0, world=1, replica=0, replicas=1, device=torch.device("cpu"))
        made = Saving(Checkpoint(**spec), one.checkpointer, one.state, context)
        one.train()
        return made, one

    return make


def saved(one):
    one.checkpointer.wait()
    return [event["step"] for event in one.events if event["event"] == "saved"]


def test_minutes_are_counted_from_the_save_before(saving, monkeypatch):
    made, one = saving(every="2 minutes")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 119)
    assert not made.is_due(at(1), at(2))
    monkeypatch.setattr(time, "monotonic", lambda: now + 121)
    assert made.is_due(at(2), at(3))
    made.save(at(3))
    assert not made.is_due(at(3), at(4))
    assert saved(one) == [3]


def test_the_end_is_saved_once(saving):
    made, one = saving(every="3 steps")
    made.save(at(3))
    made.finish(at(3))
    assert saved(one) == [3]


def test_without_at_exit_only_what_is_due_is_saved(saving):
    made, one = saving(every="3 steps", at_exit=False)
    made.save(at(3))
    made.finish(at(4))
    assert saved(one) == [3]


def test_without_async_training_waits_until_it_is_on_disk(saving):
    made, one = saving(**{"async": False})
    made.save(at(3))
    assert one.folder.steps() == [3]


def test_a_checkpoint_has_the_metrics_of_its_own_step_only(saving):
    made, one = saving()
    made.measured(3, {"loss": 0.25})
    made.save(at(3))
    made.finish(at(4))
    metrics = {step: dict(one.folder.find(step).manifest.metrics) for step in (3, 4)}
    assert metrics == {3: {"loss": 0.25}, 4: {}}


def test_a_run_whose_last_save_failed_does_not_end_well(saving):
    made, one = saving()
    one.folder.path.write_text("in the way")
    made.save(at(3))
    with pytest.raises(CheckpointError, match="step 4 was not saved"):
        made.finish(at(4))
    assert [event["step"] for event in one.events if event["event"] == "save_failed"] == [3, 4]


def test_a_failure_that_a_later_save_made_good_is_forgotten(saving):
    made, one = saving()
    one.folder.path.write_text("in the way")
    made.save(at(3))
    one.checkpointer.wait()
    one.folder.path.unlink()
    made.finish(at(4))
    assert saved(one) == [4]


def test_a_run_starts_from_nothing_from_weights_or_from_its_own_checkpoint(trainer, tmp_path):
    other = trainer(tmp_path / "other")
    other.train()
    other.save()
    run = RunStore(tmp_path / "runs").create("one", "{}\n", {}, ["mgpu"])
    init_from = str(other.folder.path_of(1))
    assert choose_start(run, None, 0, None).weights is None
    assert choose_start(run, init_from, 0, None).weights.path == other.folder.path_of(1)
    own = trainer(run.checkpoints)
    own.step = 7
    own.save()
    start = choose_start(run, init_from, 0, None)
    assert (start.checkpoint.step, start.weights) == (7, None)
    (run.checkpoints / "step-00000007" / "data.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint of this run is whole"):
        choose_start(run, init_from, 0, None)
    assert any("data.json is missing" in event.get("text", "") for event in run.events())
    with pytest.raises(CheckpointError, match="nowhere"):
        choose_start(RunStore(tmp_path / "runs").create("two", "{}\n", {}, ["mgpu"]), "nowhere", 0, None)
