"""Publishing, finding, passing over and removing checkpoints, without torch."""

import hashlib
import json

import pytest

from mgpu.checkpoint import Best, CheckpointFolder, Manifest, Retention
from mgpu.checkpoint.listing import rows
from mgpu.checkpoint.manifest import FileRecord
from mgpu.errors import CheckpointError, DamagedCheckpoint, Refusal


def put(folder, step, content=b"weights", **metrics):
    """Publish a checkpoint of `step` the way a writer does."""
    partial = folder.partial_of(step, "1-1")
    partial.mkdir(parents=True)
    contents = {"__0_0.distcp": content, "data.json": json.dumps({"step": step}).encode(), ".metadata": b"m"}
    for name, block in contents.items():
        (partial / name).write_bytes(block)
    files = {name: FileRecord(len(b), hashlib.sha256(b).hexdigest()) for name, b in contents.items()}
    (partial / "manifest.json").write_text(Manifest(step, files, metrics=metrics).to_text())
    return folder.publish(partial, step)


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


def names(folder):
    return sorted(path.name for path in folder.path.iterdir())


def test_the_newest_good_one_is_found(folder):
    assert folder.steps() == []
    assert folder.newest() == (None, [])
    for step in (5, 10, 200000000):
        put(folder, step)
    assert folder.steps() == [200000000, 10, 5]
    found, warnings = folder.newest()
    assert (found.step, found.data, warnings) == (200000000, {"step": 200000000}, [])
    assert folder.find(10).path == folder.path / "step-00000010"


def test_damaged_and_incomplete_ones_are_passed_over_and_named(folder):
    """Case F4."""
    put(folder, 5)
    path = put(folder, 10)
    folder.partial_of(15, "1-3").mkdir()
    folder.partial_of(15, "2-1").mkdir()
    (path / "__0_0.distcp").write_bytes(b"wei")
    found, warnings = folder.newest()
    assert found.step == 5
    assert len(warnings) == 2
    assert "step-00000015 is incomplete" in warnings[0]
    assert "step-00000010 is damaged: __0_0.distcp has 3 bytes in place of 7" in warnings[1]
    with pytest.raises(DamagedCheckpoint, match="__0_0"):
        folder.find(10)
    with pytest.raises(Refusal, match="no checkpoint of step 7"):
        folder.find(7)
    folder.clear_leftovers()
    assert names(folder) == ["step-00000005", "step-00000010"]


def test_a_run_without_a_usable_checkpoint_says_why(folder):
    (put(folder, 10) / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        folder.find()
    assert "manifest.json is missing" in caught.value.hint


def test_a_step_that_is_come_by_again_replaces_its_checkpoint(folder):
    put(folder, 10, b"damaged")
    put(folder, 10, b"new one")
    assert (folder.path_of(10) / "__0_0.distcp").read_bytes() == b"new one"
    assert names(folder) == ["step-00000010"]


def test_retention_removes_the_rest(folder):
    for step, loss in ((10, 0.5), (20, 0.1), (30, 0.5), (40, 0.5)):
        put(folder, step, loss=loss)
    assert folder.prune(Retention(1, Best("loss", "min")), newest=40) == [30, 10]
    assert names(folder) == ["step-00000020", "step-00000040"]


def test_retention_never_touches_what_it_does_not_know_to_be_older_and_good(folder):
    """A damaged checkpoint of a later step must not push out the good one that was just written."""
    for step in (10, 20, 30):
        put(folder, step)
    assert folder.prune(Retention(keep=1), newest=20) == [10]
    assert folder.steps() == [30, 20]
    (folder.path_of(20) / "data.json").write_text("")
    put(folder, 25)
    assert folder.prune(Retention(keep=2), newest=25) == []
    put(folder, 26)
    assert folder.prune(Retention(keep=2), newest=26) == [20]


def test_one_that_is_being_read_stays_until_the_next_time(folder):
    put(folder, 10)
    put(folder, 20)
    with folder.reading(folder.path_of(10)):
        assert folder.prune(Retention(keep=1), newest=20) == []
        assert folder.steps() == [20, 10]
    assert folder.prune(Retention(keep=1), newest=20) == [10]
    with pytest.raises(CheckpointError, match="was removed"), folder.reading(folder.path_of(10)):
        pass


def test_a_reader_looks_again_when_retention_was_quicker(folder, monkeypatch):
    """`mgpu export` of a run that trains on and keeps one checkpoint."""
    put(folder, 10)
    listed = CheckpointFolder.steps

    def steps(self):
        found = listed(self)
        if found == [10]:  # between looking and reading, training saves and removes
            put(folder, 20)
            folder.remove(10)
        return found

    monkeypatch.setattr(CheckpointFolder, "steps", steps)
    assert folder.find().step == 20


def test_what_is_kept_is_not_removed_and_the_next_newest_is_taken_for_one_that_just_was(folder, monkeypatch):
    put(folder, 5)
    put(folder, 10)
    with folder.kept() as found:
        assert (found.step, folder.remove(10), folder.remove(5)) == (10, False, True)
    put(folder, 12)
    genuine, taken = CheckpointFolder.reading, []

    def overtaken(self, path):
        """Retention is quicker, once: between finding and reading."""
        if taken == [12]:
            assert folder.remove(12)
        taken.append(int(path.name.removeprefix("step-")))
        return genuine(self, path)

    monkeypatch.setattr(CheckpointFolder, "reading", overtaken)
    with folder.kept() as found:
        assert (found.step, found.path.exists()) == (10, True)
    assert taken == [12, 12, 10, 10]
    with pytest.raises(Refusal, match="no checkpoint of step 12"), folder.kept(12):
        pass


def test_a_damaged_one_is_listed_with_what_lies_there(folder):
    path = put(folder, 5)
    (path / "manifest.json").write_text("{")
    (row,) = rows(folder)
    assert (row.health, row.bytes) == ("damaged", sum(file.stat().st_size for file in path.iterdir()))
    assert row.created == path.stat().st_mtime
