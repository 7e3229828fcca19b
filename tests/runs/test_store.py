"""The registry: runs are made whole, found by what a person types, and removed at once."""

import json
import multiprocessing
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mgpu.errors import Refusal, RunNotFound
from mgpu.runs import Run, RunStore, State, shell_reference
from mgpu.runs import store as store_module
from mgpu.runs.liveness import this_process


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path / "deep" / "runs")


def create(store, name="gpt"):
    return store.create(name, "name: gpt\n", {"steps": 5}, ["mgpu", "train", "gpt.yaml"], spec_source="gpt.yaml")


def old_run(store, id_, unix):
    folder = store.root / id_
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text(json.dumps({"event": "created", "unix": unix}) + "\n")
    return Run(folder)


def test_a_new_run_holds_what_was_asked(store):
    run = create(store)
    assert re.fullmatch(r"gpt-\d{8}-\d{6}-[0-9a-f]{4}", run.id)
    assert run.path == store.root / run.id
    assert run.spec_path.read_text() == "name: gpt\n"
    assert run.plan() == {"steps": 5}
    (event,) = run.events()
    assert (event["event"], event["command"], event["spec"]) == ("created", ["mgpu", "train", "gpt.yaml"], "gpt.yaml")
    assert run.state is State.CREATED
    assert [path.name for path in store.root.iterdir()] == [run.id]


def test_an_id_that_is_taken_is_never_written_over(store, monkeypatch):
    class StoppedClock(store_module.datetime):
        @classmethod
        def now(cls, zone=None):
            return cls(2025, 1, 2, 3, 4, 5, tzinfo=zone)

    digits = iter(["beef", "beef", "cafe"])
    monkeypatch.setattr(store_module, "datetime", StoppedClock)
    monkeypatch.setattr(store_module.secrets, "token_hex", lambda count: next(digits))
    first = create(store)
    first.record("note", text="mine")
    second = create(store)
    assert (first.id, second.id) == ("gpt-20250102-030405-beef", "gpt-20250102-030405-cafe")
    assert [event["event"] for event in first.events()] == ["created", "note"]


def test_a_run_that_cannot_be_written_leaves_nothing(store):
    with pytest.raises(TypeError):
        store.create("gpt", "", {"steps": object()}, [])
    assert list(store.root.iterdir()) == []


def create_several(root):
    return [create(RunStore(root)).id for _ in range(10)]


def test_processes_and_threads_that_create_at_once_each_get_their_own(store):
    with multiprocessing.get_context("spawn").Pool(2) as pool, ThreadPoolExecutor(4) as threads:
        from_processes = pool.map_async(create_several, [store.root] * 2)
        from_threads = list(threads.map(create_several, [store.root] * 4))
        batches = from_processes.get(timeout=60) + from_threads
    ids = [id_ for batch in batches for id_ in batch]
    assert len(set(ids)) == 60
    assert {run.id for run in store.list()} == set(ids)
    assert all(len(run.events()) == 1 for run in store.list())


def test_runs_are_listed_newest_first_by_when_they_were_made(store):
    old_run(store, "zebra", 100.0)
    old_run(store, "ant", 300.0)
    old_run(store, "mole", 200.0)
    assert [run.id for run in store.list()] == ["ant", "mole", "zebra"]


def test_the_list_passes_over_what_is_no_run_and_shows_broken_runs(store):
    assert store.list() == []
    old_run(store, "whole", 100.0)
    (store.root / "empty-folder").mkdir()
    (store.root / "a-file").write_text("")
    (store.root / ".removing-x").mkdir()
    (store.root / ".removing-x" / "events.jsonl").write_text("")
    broken = store.root / "broken"
    broken.mkdir()
    (broken / "events.jsonl").write_bytes(b"\xff\x00{")
    half = store.root / "half"
    half.mkdir()
    (half / "plan.json").write_text("{}")
    assert {run.id for run in store.list()} == {"whole", "broken", "half"}
    assert [run.state for run in store.list()] == [State.CREATED] * 3


def test_a_run_is_found_by_id_prefix_path_and_latest(store, monkeypatch):
    first = old_run(store, "gpt-20250101-000000-aaaa", 100.0)
    second = old_run(store, "gpt-20250102-000000-bbbb", 200.0)
    third = old_run(store, "digits-20250101-000000-cccc", 150.0)
    (third.path / "spec.yaml").write_text("")
    assert store.find(first.id) == first
    assert store.find("gpt-20250102") == second
    assert store.find("d") == third
    assert store.find("latest") == second
    assert store.find(str(third.path)) == third
    assert store.find(str(third.path / "spec.yaml")) == third
    monkeypatch.chdir(third.path)
    assert store.find("spec.yaml") == third
    assert store.find(".") == third
    assert store.find("../" + first.id) == first


def test_an_id_that_begins_another_is_found(store):
    short, _ = old_run(store, "gpt", 100.0), old_run(store, "gpt-2", 200.0)
    assert store.find("gpt") == short


def test_several_runs_that_could_be_meant_are_named(store):
    for number in range(7):
        old_run(store, f"gpt-{number}", float(number))
    with pytest.raises(RunNotFound) as caught:
        store.find("gpt")
    assert caught.value.message == "7 runs begin with 'gpt'"
    assert caught.value.hint == "which of gpt-6, gpt-5, gpt-4, gpt-3, gpt-2, … (2 more)?"
    assert caught.value.exit_code == 2


def test_a_misspelt_run_is_answered_with_the_nearest(store):
    old_run(store, "digits-20250101-000000-aaaa", 100.0)
    old_run(store, "gpt-stdlib-20250101-000000-bbbb", 200.0)
    with pytest.raises(RunNotFound) as caught:
        store.find("digist")
    assert caught.value.hint == "did you mean digits-20250101-000000-aaaa?"
    with pytest.raises(RunNotFound) as caught:
        store.find("gpt-stdlib-20250101-000000-bbbc")
    assert caught.value.hint == "did you mean gpt-stdlib-20250101-000000-bbbb?"
    with pytest.raises(RunNotFound) as caught:
        store.find("zzz")
    assert caught.value.hint == "the newest: gpt-stdlib-20250101-000000-bbbb, digits-20250101-000000-aaaa"


@pytest.mark.parametrize("reference", ["latest", "gpt", "", "/", "~nobody-of-that-name/x", "x" * 5000, "a\0b"])
def test_nothing_is_found_where_there_are_no_runs(store, reference):
    with pytest.raises(RunNotFound):
        store.find(reference)


def test_a_removed_run_is_gone(store):
    run = create(store)
    (run.checkpoints / "step-1").mkdir(parents=True)
    (run.checkpoints / "step-1" / "weights").write_bytes(b"1")
    store.remove(run)
    assert list(store.root.iterdir()) == []
    with pytest.raises(RunNotFound):
        store.remove(run)


def test_a_running_run_is_not_removed_and_a_lost_one_is(store):
    run = create(store)
    run.record("attempt_started", attempt=1, **this_process())
    with pytest.raises(Refusal, match="is running") as caught:
        store.remove(run)
    assert caught.value.hint == f"stop it first: mgpu stop {shell_reference(run)}"
    assert run.path.is_dir()
    run.record("attempt_started", attempt=2, **{**this_process(), "boot_id": "0-0-0"})
    store.remove(run)
    assert not run.path.exists()


def test_a_run_is_out_of_sight_before_its_files_are_deleted(store, monkeypatch):
    run = create(store)
    seen = []
    monkeypatch.setattr(store_module.shutil, "rmtree", lambda path: seen.append((path.name, store.list())))
    store.remove(run)
    ((name, listed),) = seen
    assert name.startswith(f".removing-{run.id}-")
    assert listed == []


def test_ids_tell_the_time_in_utc(store):
    before = int(time.time())
    stamp = create(store).id.removeprefix("gpt-")[:15]
    parsed = store_module.datetime.strptime(stamp, "%Y%m%d-%H%M%S").replace(tzinfo=store_module.UTC).timestamp()
    assert before <= parsed <= time.time()
