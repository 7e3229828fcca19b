"""Reading runs nothing that is in a file, whoever wrote it and however well its hashes fit."""

import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mgpu.checkpoint import CheckpointFolder, Manifest
from mgpu.checkpoint.manifest import FileRecord
from mgpu.checkpoint.reading import read_metadata, read_weights
from mgpu.checkpoint.restore import restore
from mgpu.errors import DamagedCheckpoint

FILES = ["__0_0.distcp", ".metadata", "data.json", "manifest.json"]


class Payload:
    """Pickles to a call: whoever unpickles it freely creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def two(trainer):
    """Checkpoints of steps 1 and 2."""
    one = trainer()
    for _ in range(2):
        one.train()
        one.save()
    return one


def rehash(path):
    """Make the manifest fit the files as they are now, as an attacker would."""
    old = Manifest.read(path)
    files = {
        name: FileRecord((path / name).stat().st_size, hashlib.sha256((path / name).read_bytes()).hexdigest())
        for name in old.files
    }
    (path / "manifest.json").write_text(Manifest(old.step, files, old.position).to_text())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["removed", "emptied", "halved", "first", "middle", "last", "longer", "unreadable"])
def test_whatever_happens_to_a_file_it_is_named_and_the_one_before_is_used(two, name, how):
    """Must show 3, case F4: noticed, named, fell back."""
    path = two.folder.path_of(2) / name
    content = path.read_bytes()
    places = {"first": 0, "middle": len(content) // 2, "last": len(content) - 1}
    if how == "removed":
        path.unlink()
    elif how == "unreadable":
        path.unlink()
        path.mkdir()
    elif how in places:
        flipped = bytearray(content)
        flipped[places[how]] ^= 0x01
        path.write_bytes(flipped)
    else:
        path.write_bytes({"emptied": b"", "halved": content[: len(content) // 2], "longer": content + b"\0"}[how])
    found, warnings = two.folder.newest()
    assert found.step == 1
    (warning,) = warnings
    assert "step-00000002 is damaged" in warning and name in warning
    restore(found, two.state)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("are_hashes_made_to_fit", [False, True])
def test_a_crafted_pickle_executes_nothing_wherever_it_lies(two, tmp_path, name, are_hashes_made_to_fit):
    """Must show 3. The payload is in a zip as torch.save makes it where a tensor is read, bare elsewhere."""
    victim, path = tmp_path / "executed", two.folder.path_of(2)
    if name == "__0_0.distcp":
        place = next(iter(read_metadata(path).storage_data.values()))
        torch.save(Payload(victim), path / "payload")
        payload = (path / "payload").read_bytes()
        content = bytearray((path / name).read_bytes())
        content[place.offset : place.offset + len(payload)] = payload
        (path / name).write_bytes(content)
    else:
        (path / name).write_bytes(pickle.dumps(Payload(victim)))
    if are_hashes_made_to_fit and name != "manifest.json":
        rehash(path)
        with pytest.raises((DamagedCheckpoint, ValueError)):
            restore(two.folder.find(2), two.state)
    else:
        assert two.folder.newest()[0].step == 1
    assert not victim.exists()
    pickle.loads(pickle.dumps(Payload(victim)))
    assert victim.exists(), "the payload is a live one"


@pytest.mark.parametrize(
    "what",
    [
        os.system,
        shutil.rmtree,
        eval,
        torch.load,
        torch.hub.load,
        torch.serialization.load,
        pickle.loads,
        getattr,
    ],
)
def test_the_unpickler_lets_no_function_through(tmp_path, what):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(what))
    with pytest.raises(DamagedCheckpoint, match="has no place in a checkpoint"):
        read_metadata(tmp_path)


def test_metadata_that_is_something_else_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": torch.Size([1])}))
    with pytest.raises(DamagedCheckpoint, match="is no metadata"):
        read_metadata(tmp_path)


def craft(two, change):
    path = two.folder.path_of(2)
    metadata = read_metadata(path)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    rehash(path)
    return two.folder.find(2)


def test_bytes_in_place_of_a_tensor_are_refused(two):
    """torch's own planner would unpickle them."""

    def change(metadata):
        metadata.state_dict_metadata["model.0.weight"] = BytesStorageMetadata()

    with pytest.raises(DamagedCheckpoint, match="BytesStorageMetadata has no place"):
        read_weights(craft(two, change))


def test_a_file_that_the_manifest_does_not_list_is_never_opened(two):
    def change(metadata):
        for place in metadata.storage_data.values():
            place.relative_path = "../../secret"

    with pytest.raises(DamagedCheckpoint, match="secret"):
        read_weights(craft(two, change))


def test_data_that_is_no_mapping_is_damage(two):
    path = two.folder.path_of(2)
    (path / "data.json").write_text("[1]")
    rehash(path)
    found, warnings = two.folder.newest()
    assert found.step == 1
    assert "data.json" in warnings[0]


def test_weights_are_read_whole(two):
    weights = read_weights(two.folder.find(2))
    assert set(weights) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for name, value in weights.items():
        assert torch.equal(value, two.model.get_parameter(name))
    assert json.loads((two.folder.path_of(2) / "data.json").read_text())["step"] == 2
    assert CheckpointFolder(two.folder.path).steps() == [2, 1]
