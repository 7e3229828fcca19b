"""Which checkpoints stay: worked out by hand."""

import pytest

from mgpu.checkpoint import Best, Manifest, Retention
from mgpu.spec import Span, load_spec


def checkpoints(**metrics):
    """Checkpoints of steps 10 to 60, an epoch being 20 steps, with the metric `loss` of each step that is given."""
    return [
        Manifest(
            step,
            {},
            position={"epoch": step // 20, "offset": 4 * (step % 20)},
            metrics={"loss": metrics[f"s{step}"]} if f"s{step}" in metrics else {},
        )
        for step in range(10, 70, 10)
    ]


def test_the_newest_stay():
    assert Retention(keep=2).kept(checkpoints()) == {50, 60}
    assert Retention(keep=9).kept(checkpoints()) == {10, 20, 30, 40, 50, 60}
    assert Retention(keep=1).kept([]) == set()


@pytest.mark.parametrize("mode, best", [("min", 20), ("max", 30)])
def test_the_best_stays_as_well(mode, best):
    known = checkpoints(s20=0.1, s30=0.9, s40=0.1, s50=0.5)
    assert Retention(1, Best("loss", mode)).kept(known) == {best, 60}


def test_a_metric_that_is_nan_or_missing_is_never_the_best():
    known = checkpoints(s20=float("nan"), s40=3.0)
    assert Retention(1, Best("loss", "min")).kept(known) == {40, 60}
    assert Retention(1, Best("loss", "max")).kept(checkpoints()) == {60}


def test_milestones_stay_as_well():
    assert Retention(1, every=Span(30, "steps")).kept(checkpoints()) == {30, 60}
    assert Retention(1, every=Span(1, "epochs")).kept(checkpoints()) == {20, 40, 60}
    assert Retention(1, every=Span(2, "epochs")).kept(checkpoints()) == {40, 60}


def test_it_is_read_from_the_spec(bench):
    text = (bench.folder / "toy.yaml").read_text().replace("data:\n", "data:\n  eval: toy.py:Data\n")
    text += "evaluate: {every: 5 steps}\n"
    text += "checkpoint: {every: 10 steps, keep: 2, keep_best: {metric: loss, mode: max}, keep_every: 2 epochs}\n"
    (bench.folder / "toy.yaml").write_text(text)
    spec = load_spec(bench.folder / "toy.yaml").spec.checkpoint
    assert Retention.of(spec) == Retention(2, Best("loss", "max"), Span(2, "epochs"))
    assert spec.asynchronous and spec.at_exit
