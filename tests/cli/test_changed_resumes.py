"""Resumes that change the spec: what is changed is told, epochs count by samples, and what does not fit leaves no trace."""

import json
import math

import pytest
from conftest import metrics_of
from test_supervision import events_of

pytestmark = pytest.mark.slow

EPOCHS = "--set=duration=6 epochs"
COSINE = "--set=schedule={shape: cosine}"


def newest_position(run):
    folder = max(run.checkpoints.glob("step-*"))
    return json.loads((folder / "data.json").read_text())["position"]


def notes_of(run):
    return " | ".join(event["text"] for event in events_of(run, "note"))


def test_epochs_go_on_to_their_end_with_another_batch_size(bench):
    """24 samples by 4: after 15 steps, epoch 2 has 12 left, which are 2 batches of 8; 3 whole epochs of 3 follow."""
    run = bench.train(COSINE, duration="15 steps")
    done = bench.mgpu("resume", run.id, EPOCHS, "--set=batch.size=8")
    assert done.returncode == 0, done.stderr
    assert "changed by this resume: batch.size: 8 (was 4); duration: 6 epochs (was 15 steps)" in done.stderr
    position = newest_position(run)
    assert (position["epoch"], position["samples"], position["step"]) == (6, 6 * 24, 15 + 2 + 9)
    last = metrics_of(run)[-1]
    assert last["lr"] == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * 25 / 26)))
    assert f"step {15 + 2 + 9}/{15 + 2 + 9}" in done.stderr


def test_data_that_shrank_under_the_place_in_the_epoch_goes_on_with_the_next_epoch(bench):
    """10 samples by 4 are 3 batches: epochs 3, 4 and 5 are left."""
    run = bench.train(duration="15 steps")
    done = bench.mgpu("resume", run.id, EPOCHS, "--set=data.train={target: toy.py:Data, args: {n: 10}}", "--set=seed=9")
    assert done.returncode == 0, done.stderr
    position = newest_position(run)
    assert (position["epoch"], position["step"], position["samples"]) == (6, 15 + 9, 60 + 30)
    told = "in the epoch under way some samples may come twice or not at all"
    assert f"the training data has 10 samples, and had 24: {told}" in notes_of(run)
    assert f"the seed is 9, and was 0: {told}" in notes_of(run)
    again = bench.mgpu("resume", run.id, "--set=duration=7 epochs", "--set=seed=9")
    assert again.returncode == 0 and notes_of(run).count("the seed is") == 1, again.stderr


def test_a_resume_that_does_not_fit_leaves_the_spec_as_it_was(bench):
    run = bench.train(duration="4 steps")
    done = bench.mgpu("resume", run.id, "--set=duration=8 steps", "--set=model=toy.py:Normed")
    assert done.returncode == 1 and "the checkpoint does not fit the model" in done.stderr
    assert f"{run.id} has its spec of before again" in done.stderr
    assert bench.mgpu("resume", run.id, "--set=duration=8 steps").returncode == 0
    assert run.last_step == 8
