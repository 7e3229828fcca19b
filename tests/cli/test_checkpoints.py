"""Checkpoints through the real command: nothing is lost, whatever happens to ranks, files and disks."""

import contextlib
import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import metrics_of, weights_of
from safetensors.torch import load_file, save_file
from test_start_up import run as run_without_torch

from mgpu.checkpoint import CheckpointFolder, Manifest
from mgpu.runs import State

STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 3}
"""Ranks of each; tests/parallel takes every strategy there is to one process and back."""
pytestmark = pytest.mark.slow


def ids_of(folder, name):
    """What the task of each rank was given, in order."""
    return {
        path.stem: [int(word) for word in path.read_text().split()]
        for path in sorted(Path(folder).glob(f"{name}-*.txt"))
    }


def steps_of(run):
    return CheckpointFolder(run.checkpoints).steps()


def notes_of(run):
    return [event["text"] for event in run.events() if event["event"] == "note"]


def assert_same(run, expected):
    for name, value in weights_of(run).items():
        assert torch.equal(value, expected[name]), name


def test_a_resume_in_mid_epoch_gives_each_rank_the_very_samples_that_were_to_come(bench):
    """Case F1: 24 samples, global batch 4, 2 epochs, 2 ranks, stopped after step 4; loaders had prefetched by then."""
    whole = bench.train(task__args__trace="whole", batch__micro=2)
    expected = ids_of(bench.folder, "whole")
    for workers in (0, 2):
        trace = f"workers{workers}"
        bench.train(task__args__trace=trace, duration="4 steps", batch__micro=2, data__workers=workers)
        done = bench.mgpu("resume", "latest", "--set=duration=2 epochs")
        assert done.returncode == 0, done.stderr
        found = ids_of(bench.folder, trace)
        assert [found[f"{trace}-{rank}"] for rank in (0, 1)] == [expected[f"whole-{rank}"] for rank in (0, 1)]
        assert [row["step"] for row in metrics_of(bench.latest)] == list(range(1, 13))
        assert_same(bench.latest, weights_of(whole))


@pytest.mark.parametrize("damage", ["__1_0.distcp", "incomplete"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(bench, damage):
    """Case F4: checkpoints of steps 5 and 10; what becomes of the newer is told, and the run ends with the same bits."""
    whole = bench.train(checkpoint__every="5 steps")
    run = bench.train(checkpoint__every="5 steps", duration="10 steps")
    path = run.checkpoints / "step-00000010"
    if damage == "incomplete":
        (path / "manifest.json").unlink()
        path.rename(run.checkpoints / ".step-00000010.1-2.partial")
    else:
        os.truncate(path / damage, (path / damage).stat().st_size // 2)
    done = bench.mgpu("resume", run.id, "--set=duration=2 epochs")
    assert done.returncode == 0, done.stderr
    (note,) = [text for text in notes_of(run) if "passed over" in text]
    assert "step-00000010" in note and note in done.stderr
    assert damage in note
    assert [e["start_step"] for e in run.events() if e["event"] == "training"] == [0, 5]
    assert steps_of(run) == [12, 10, 5]
    for step in steps_of(run):
        Manifest.read(run.checkpoints / f"step-{step:08d}").verify(run.checkpoints / f"step-{step:08d}")
    assert not list(run.checkpoints.glob(".*"))
    assert_same(run, weights_of(whole))


def test_a_run_without_a_whole_checkpoint_does_not_start_over(bench):
    run = bench.train(duration="4 steps")
    (run.checkpoints / "step-00000004" / "data.json").write_text("{}")
    done = bench.mgpu("resume", run.id, "--set=duration=6 steps")
    assert done.returncode == 1
    assert "no checkpoint of this run is whole" in done.stderr
    assert "data.json has 2 bytes" in done.stderr


def test_saves_that_fail_are_told_and_do_not_end_training_but_the_run(bench):
    """Case F5: all ranks go on to the end, and leave alike; with room again, the run ends well."""
    run = bench.train(duration="4 steps")
    for path in (run.checkpoints / "step-00000004").iterdir():
        path.unlink()
    (run.checkpoints / "step-00000004").rmdir()
    run.checkpoints.rmdir()
    run.checkpoints.write_text("in the way")
    done = bench.mgpu("resume", run.id, "--set=duration=10 steps", "--set=checkpoint.every=4 steps")
    assert done.returncode == 1
    failed = [(event["step"], event["error"]) for event in run.events() if event["event"] == "save_failed"]
    assert [step for step, _ in failed] == [4, 8, 10]
    assert all(str(run.checkpoints) in error for _, error in failed)
    assert "the checkpoint of step 4 was not saved" in done.stderr
    (cause,) = [line for line in done.stderr.splitlines() if line.startswith("cause")]
    assert "rank 0" in cause and "CheckpointError: the checkpoint of step 10 was not saved" in cause
    assert [row["step"] for row in metrics_of(run)] == list(range(1, 11))
    assert run.state is State.FAILED
    run.checkpoints.unlink()
    done = bench.mgpu("resume", run.id)
    assert done.returncode == 0, done.stderr
    assert steps_of(run) == [10, 8, 4]


def test_the_number_of_ranks_may_change_at_every_resume(bench):
    """Must show 4, case F8: 4 → 2 → 3 → 1 ranks within an epoch; every id once, parameters within 1e-6."""
    whole = bench.train("--devices=cpu:1", duration="6 steps")
    bench.train("--devices=cpu:4", duration="2 steps", task__args__trace="ids", data__workers=1)
    for devices, duration in (("cpu:2", 3), ("cpu:3", 5), ("cpu:1", 6)):
        done = bench.mgpu("resume", "latest", f"--devices={devices}", f"--set=duration={duration} steps")
        assert done.returncode == 0, done.stderr
    ids = [index for part in ids_of(bench.folder, "ids").values() for index in part]
    assert sorted(ids) == list(range(24))
    assert [row["lr"] for row in metrics_of(bench.latest)] == [row["lr"] for row in metrics_of(whole)]
    expected = weights_of(whole)
    for name, value in weights_of(bench.latest).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6 if name.startswith("model.") else 1e-4)


@pytest.mark.parametrize("before, after", list(itertools.permutations(STRATEGIES, 2)))
def test_a_run_goes_on_under_another_strategy(bench, before, after):
    """Must show 5."""

    def layout(strategy):
        return f"--devices=cpu:{STRATEGIES[strategy]}", f"--set=parallel.strategy={strategy}"

    whole = bench.train(*layout(after), duration="6 steps")
    bench.train(*layout(before), duration="3 steps")
    done = bench.mgpu("resume", "latest", *layout(after), "--set=duration=6 steps")
    assert done.returncode == 0, done.stderr
    expected = weights_of(whole)
    for name, value in weights_of(bench.latest).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6 if name.startswith("model.") else 1e-4)


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_stop_signal_at_different_times_gives_one_checkpoint_of_one_step(bench, ranks):
    """Case F17: SIGTERM to rank 0 alone, then to both 0.3 s apart, while a step takes 0.2 s."""
    process = bench.start("train", "toy.yaml", "--set=task.args.delay=0.1", "--set=checkpoint.every=100 steps")
    while not (bench.store.list() and bench.latest.last_step >= 2):
        assert process.poll() is None, process.communicate()
    run = bench.latest
    pids = next(event["pids"] for event in run.events() if event["event"] == "attempt_started")
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # the first signal may have ended both by now
            os.kill(pids[rank], signal.SIGTERM)
        if rank != ranks[-1]:
            time.sleep(0.3)  # the case itself, not a wait for something
    process.communicate(timeout=30)
    (step,) = steps_of(run)
    assert step == run.last_step < 12
    found = CheckpointFolder(run.checkpoints).find()
    assert found.data["position"]["step"] == step
    counts = {value.item() for name, value in weights_of(run).items() if name.endswith(".step")}
    assert counts == {float(step)}
    done = bench.mgpu("resume", run.id, "--set=task.args.delay=0")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics_of(run)] == list(range(1, 13))


def test_the_learning_rate_of_the_spec_in_force_wins_and_is_told(bench):
    run = bench.train(duration="4 steps")
    done = bench.mgpu("resume", run.id, "--set=duration=6 steps", "--set=optimizer.args.lr=0.5")
    assert done.returncode == 0, done.stderr
    assert "lr is 0.5 by the spec, and was 0.01" in done.stderr
    assert [row["lr"] for row in metrics_of(run)] == [0.01] * 4 + [0.5] * 2


def test_a_run_starts_from_the_weights_of_another(bench):
    """`init_from` a run and an exported file: step 0, the same weights; what does not fit is refused."""
    source = bench.train(duration="3 steps")
    expected = {name: value for name, value in weights_of(source).items() if name.startswith("model.")}
    exported = bench.mgpu("export", source.id, "--output=weights.safetensors")
    assert exported.stdout == "weights.safetensors\n"
    for init_from in (source.id, "weights.safetensors"):
        run = bench.train(init_from=init_from, optimizer__args__lr=1e-30, duration="1 steps")
        assert run.id != source.id
        assert [row["step"] for row in metrics_of(run)] == [1]
        for name, value in expected.items():
            assert torch.equal(weights_of(run)[name], value), name
    changed = {
        name: value for name, value in load_file(bench.folder / "weights.safetensors").items() if "last" not in name
    }
    save_file(changed, bench.folder / "less.safetensors")
    done = bench.mgpu("train", "toy.yaml", "--set=init_from=less.safetensors")
    assert done.returncode == 1
    assert "last.weight is missing" in done.stderr
    (bench.folder / "broken.txt").write_text("no weights")
    done = bench.mgpu("train", "toy.yaml", "--set=init_from=runs")
    assert done.returncode == 2 and "init_from" in done.stderr


def test_checkpoints_are_listed_checked_and_exported(bench):
    """keep_best by the evaluation, retention, health; --check finds what the eye cannot see."""
    text = (
        (bench.folder / "toy.yaml")
        .read_text()
        .replace("data:\n", "data:\n  eval: {target: toy.py:Data, args: {n: 8}}\n")
    )
    text += "evaluate: {every: 2 steps}\ncheckpoint: {every: 2 steps, keep: 2, keep_best: {metric: loss, mode: max}}\n"
    (bench.folder / "toy.yaml").write_text(text)
    run = bench.train()
    losses = {event["step"]: event["loss"] for event in run.events() if event["event"] == "evaluated"}
    best = max(losses, key=lambda step: losses[step])
    listed = json.loads(bench.mgpu("checkpoints", "latest", "--json").stdout)
    assert [row["step"] for row in listed] == sorted({12, 10, best}, reverse=True)
    assert [row["health"] for row in listed] == ["whole"] * len(listed)
    assert listed[0]["metrics"]["loss"] == losses[12]
    shard = run.checkpoints / "step-00000010" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-9] ^= 1
    shard.write_bytes(content)
    table = bench.mgpu("checkpoints", "latest")
    assert table.returncode == 0 and "damaged" not in table.stdout
    checked = bench.mgpu("checkpoints", "latest", "--check")
    assert checked.returncode == 1
    lines = checked.stdout.splitlines()
    assert lines[0].startswith("step 12 ") and "verified" in lines[0]
    assert "damaged: __0_0.distcp has another checksum" in lines[1]
    refused = bench.mgpu("export", "latest", "--step=10")
    assert refused.returncode == 1 and "__0_0.distcp" in refused.stderr
    assert bench.mgpu("export", "latest", "--step=11").returncode == 2
    assert bench.mgpu("export", "latest", "--output=no/where").returncode == 2
    done = bench.mgpu("export", "latest", "--format=pt")
    assert done.stdout == f"{run.id}-step-12.pt\n"
    assert "torch.load" in done.stderr
    exported = torch.load(bench.folder / done.stdout.strip(), weights_only=True)
    expected = weights_of(run)
    assert {f"model.{name}" for name in exported} == {name for name in expected if name.startswith("model.")}
    assert all(torch.equal(value, expected[f"model.{name}"]) for name, value in exported.items())


def test_listing_and_checking_work_without_torch(bench):
    run = bench.train(duration="2 steps")
    code = "from mgpu.cli.app import main\nmain()\n"
    out = run_without_torch(f"sys.argv = ['mgpu', 'checkpoints', '{run.id}', '--check']\n{code}", bench.folder)
    assert out.startswith("step 2 ") and "verified" in out
    for command in ("checkpoints", "export"):
        out = run_without_torch(f"sys.argv = ['mgpu', '{command}', '--help']\n{code}", bench.folder)
        assert f"mgpu {command} latest" in out.split("Example:")[1]


@pytest.mark.parametrize(
    "setting, words",
    [
        ("checkpoint.keep=0", ["checkpoint.keep", "greater than or equal to 1"]),
        ("checkpoint.asinc=true", ["checkpoint.asinc", "did you mean async?"]),
        ("checkpoint.keep_best={metric: loss, mode: max}", ["checkpoint.keep_best", "data.eval is not set"]),
        ("checkpoint.keep_every=5 minutes", ["checkpoint.keep_every", "epochs or steps"]),
    ],
)
def test_settings_without_sense_are_refused(bench, setting, words):
    done = bench.mgpu("train", "toy.yaml", f"--set={setting}", "--dry-run")
    assert done.returncode == 2
    for word in words:
        assert word in done.stderr
