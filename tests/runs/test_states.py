"""The state of a run is what its events add up to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.runs.states import ENDED, History, State, fold

CREATED = {"event": "created", "command": ["mgpu", "train"], "spec": "x.yaml"}
STARTED = {"event": "attempt_started", "attempt": 1, "pid": 7, "process_start": 9, "host": "a", "boot_id": "b"}


def ended(state, step=None, exit_code=0):
    return {"event": "attempt_ended", "attempt": 1, "state": state, "exit_code": exit_code, "step": step}


def test_no_events_at_all_is_a_created_run():
    assert fold([]) == History(State.CREATED, 0, 0, None, None)


def test_states_follow_the_events():
    assert fold([CREATED]).state is State.CREATED
    assert fold([CREATED, {"event": "queued"}]).state is State.QUEUED
    assert fold([CREATED, {"event": "queued"}, STARTED]).state is State.RUNNING
    assert fold([CREATED, STARTED, {"event": "note", "text": "hello"}]).state is State.RUNNING


@pytest.mark.parametrize("state", sorted(ENDED))
def test_an_attempt_ends_in_the_state_it_says(state):
    history = fold([CREATED, STARTED, ended(state.value, step=40, exit_code=5)])
    assert (history.state, history.last_step, history.exit_code, history.supervisor) == (state, 40, 5, None)


def test_an_attempt_that_ended_in_an_unknown_state_failed():
    assert fold([STARTED, ended("exploded")]).state is State.FAILED
    assert fold([STARTED, ended(["completed"])]).state is State.FAILED


def test_a_second_attempt_runs_again_and_has_no_exit_code_yet():
    history = fold([CREATED, STARTED, ended("failed", 40, 1), {**STARTED, "attempt": 2, "pid": 8}])
    assert (history.state, history.attempts, history.exit_code) == (State.RUNNING, 2, None)
    assert history.supervisor is not None
    assert history.supervisor["pid"] == 8


def test_a_preempted_run_that_was_put_back_is_queued():
    assert fold([CREATED, STARTED, ended("preempted"), {"event": "queued"}]).state is State.QUEUED


def test_a_queued_event_does_not_hide_a_running_attempt():
    assert fold([CREATED, STARTED, {"event": "queued"}]).state is State.RUNNING


def test_attempt_numbers_survive_a_lost_line():
    assert fold([CREATED, {**STARTED, "attempt": 3}]).attempts == 3
    assert fold([CREATED, STARTED, {"event": "attempt_started"}]).attempts == 2


def test_the_last_step_goes_back_with_a_resume():
    first = [
        CREATED,
        STARTED,
        {"event": "training", "start_step": 0},
        {"event": "saved", "step": 40},
        ended("failed", 55),
    ]
    assert fold(first).last_step == 55
    resumed = [*first, {**STARTED, "attempt": 2}, {"event": "training", "start_step": 40}]
    assert fold(resumed).last_step == 40
    assert fold([*resumed, {"event": "evaluated", "step": 48}]).last_step == 48


def test_an_attempt_that_died_before_training_does_not_hide_the_step():
    assert fold([STARTED, ended("failed", 55), {**STARTED, "attempt": 2}, ended("failed", None)]).last_step == 55


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
KINDS = st.sampled_from(["created", "queued", "attempt_started", "training", "saved", "attempt_ended"]) | ANYTHING
FIELDS = st.dictionaries(st.sampled_from(["attempt", "pid", "step", "start_step", "state", "exit_code"]), ANYTHING)


@given(st.lists(st.builds(lambda kind, fields: {"event": kind, **fields}, KINDS, FIELDS), max_size=6))
def test_no_event_whatever_makes_it_raise(events):
    history = fold(events)
    assert history.attempts >= sum(event["event"] == "attempt_started" for event in events)
    assert (history.supervisor is not None) == (history.state is State.RUNNING)


def test_a_start_counts_as_running_until_it_is_refused():
    ended = {"event": "attempt_ended", "state": "failed", "exit_code": 1}
    starting = {"event": "starting", "pid": 7}
    assert fold([CREATED, starting]) == History(State.RUNNING, 0, 0, None, starting)
    assert fold([CREATED, STARTED, ended, starting]).state is State.RUNNING
    refused = fold([CREATED, STARTED, ended, starting, {"event": "refused"}])
    assert refused == History(State.FAILED, 1, 0, 1, None)
