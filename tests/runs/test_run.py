"""One run directory: its events, and what they and its metrics say of it."""

import json
import os
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu.runs import Run, State
from mgpu.runs.liveness import this_process


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "gpt-20250102-030405-beef"
    folder.mkdir()
    made = Run(folder)
    made.events_path.touch()
    return made


def test_the_directory_is_laid_out_as_documented(run):
    assert run.id == "gpt-20250102-030405-beef"
    names = [run.spec_path, run.plan_path, run.provenance_path, run.events_path, run.metrics_path, run.checkpoints]
    assert [path.name for path in names] == [
        "spec.yaml",
        "plan.json",
        "provenance.json",
        "events.jsonl",
        "metrics.jsonl",
        "checkpoints",
    ]
    assert run.log_path(2, 13) == run.path / "logs/2/rank-13.log"
    assert run.node_log_path(2, 1) == run.path / "logs/2/node-1.log"
    assert run.failure_path(1, 0) == run.path / "failures/1/rank-0.json"


def test_a_run_keeps_its_path_when_the_process_moves(run, monkeypatch):
    monkeypatch.chdir(run.path.parent)
    relative = Run(run.id)
    monkeypatch.chdir("/")
    assert relative == run


def test_an_event_carries_its_kind_its_time_and_its_values(run):
    run.record("note", text="grüße", kind="a value may be called so")
    (event,) = run.events()
    assert event["event"] == "note"
    assert (event["text"], event["kind"]) == ("grüße", "a value may be called so")
    stamp = datetime.strptime(event["time"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    assert 0 <= event["unix"] - stamp.timestamp() < 0.001
    assert len(event["time"]) == len("2025-01-02T03:04:05.678Z")


def test_a_torn_line_costs_only_itself(run):
    run.record("created")
    with run.events_path.open("a") as stream:
        stream.write('{"event": "attempt_started", "atte')
    run.record("attempt_ended", state="interrupted", exit_code=130, step=7)
    assert [event["event"] for event in run.events()] == ["created", "attempt_ended"]
    assert (run.state, run.exit_code, run.last_step) == (State.INTERRUPTED, 130, 7)


def test_the_last_step_is_the_newest_that_events_or_metrics_know(run):
    assert run.last_step == 0
    run.record("training", attempt=1, start_step=10)
    assert run.last_step == 10
    run.metrics_path.write_text('{"step": 11, "loss": 2.0}\n{"step": 12, "loss": 1.5}\n{"step": 13, "lo')
    assert run.last_step == 12
    run.record("attempt_ended", state="failed", exit_code=1, step=14)
    assert run.last_step == 14


def test_the_last_step_is_found_at_the_end_of_a_long_file(run):
    with run.metrics_path.open("w") as stream:
        stream.writelines(f'{{"step": {step}, "loss": 0.123456789}}\n' for step in range(1, 20001))
        stream.write("[1]\n7\n\n")
    assert run.last_step == 20000


def test_a_damaged_directory_still_answers(run):
    run.events_path.unlink()
    run.events_path.mkdir()
    run.metrics_path.mkdir()
    run.plan_path.write_text("{")
    assert (run.state, run.attempts, run.last_step, run.exit_code) == (State.CREATED, 0, 0, None)
    assert (run.events(), run.plan()) == ([], {})
    assert run.created_unix == os.stat(run.path).st_mtime


def test_the_plan_is_what_was_written(run):
    run.plan_path.write_text(json.dumps({"steps": 12}))
    assert run.plan() == {"steps": 12}


WHOLE_STORY = b"".join(
    json.dumps({**event, "note": "ü"}, ensure_ascii=False).encode() + b"\n"
    for event in (
        {"event": "created", "unix": 1.0},
        {"event": "attempt_started", "attempt": 1, **this_process()},
        {"event": "training", "attempt": 1, "start_step": 0},
        {"event": "saved", "step": 3},
        {"event": "attempt_ended", "state": "failed", "exit_code": 1, "step": 5},
        {"event": "attempt_started", "attempt": 2, **this_process()},
        {"event": "attempt_ended", "state": "completed", "exit_code": 0, "step": 9},
    )
)


@settings(deadline=None)
@given(st.integers(0, len(WHOLE_STORY)))
def test_events_cut_off_anywhere_are_read_up_to_there(tmp_path_factory, length):
    run = Run(tmp_path_factory.mktemp("cut"))
    run.events_path.write_bytes(WHOLE_STORY[:length])
    # A line counts once its closing brace is there, with or without the newline.
    whole = [line for line in WHOLE_STORY[:length].split(b"\n") if line.endswith(b"}")]
    assert len(run.events()) == len(whole)
    expected = {0: "created", 1: "created", 5: "failed", 7: "completed"}.get(len(whole), "running")
    assert run.state == expected
    assert run.attempts == sum(b"attempt_started" in line for line in whole)
    assert run.exit_code == {5: 1, 7: 0}.get(len(whole))


def test_the_last_saved_checkpoint_is_the_one_that_was_written_last(run):
    """After a resume from before a damaged step 30, step 27 is newer than that."""
    assert run.last_saved() is None
    for step in (20, 30):
        (run.checkpoints / f"step-{step:08}").mkdir(parents=True)
        run.record("saved", step=step)
    assert run.last_saved() == 30
    (run.checkpoints / "step-00000027").mkdir()
    assert run.last_saved() == 30  # published, but nothing says when
    run.record("saved", step=27)
    run.record("saved", step=29)  # pruned since
    assert run.last_saved() == 27
    assert run.checkpoint_steps() == [30, 27, 20]


def test_a_run_that_is_being_removed_does_not_come_back_by_an_event(run, capfd):
    run.events_path.unlink()
    with pytest.raises(FileNotFoundError):
        run.record("saved", step=3)
    run.tell("saved", step=4)
    assert not run.events_path.exists()
    assert "saved {'step': 4} (no event" in capfd.readouterr().err
    run.record("created")
    assert [event["event"] for event in run.events()] == ["created"]
