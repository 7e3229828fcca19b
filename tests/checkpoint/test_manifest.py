"""The manifest notices every change to itself and to the files it lists."""

import hashlib
import json

import pytest

from mgpu.checkpoint.manifest import FileRecord, Manifest
from mgpu.errors import DamagedCheckpoint


@pytest.fixture
def folder(tmp_path):
    contents = {"__0_0.distcp": b"shard bytes", "data.json": b"{}\n", ".metadata": b"pickle"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = {name: FileRecord(len(c), hashlib.sha256(c).hexdigest()) for name, c in contents.items()}
    manifest = Manifest(5, files, {"epoch": 1, "offset": 8}, {"loss": 0.5}, {"world": 2}, {"torch": "2"})
    (tmp_path / "manifest.json").write_text(manifest.to_text())
    return tmp_path


def test_it_reads_back_what_was_written(folder):
    manifest = Manifest.read(folder)
    manifest.verify(folder)
    assert manifest.step == 5
    assert manifest.position == {"epoch": 1, "offset": 8}
    assert manifest.metrics == {"loss": 0.5}
    assert manifest.bytes == len(b"shard bytes") + 3 + 6
    assert manifest.to_text() == (folder / "manifest.json").read_text()


def test_metrics_that_are_no_numbers_survive(folder):
    old = Manifest.read(folder)
    manifest = Manifest(5, old.files, metrics={"loss": float("nan"), "gain": float("inf")})
    (folder / "manifest.json").write_text(manifest.to_text())
    back = Manifest.read(folder).metrics
    assert back["loss"] != back["loss"]
    assert back["gain"] == float("inf")


def test_every_single_byte_of_the_manifest_counts(folder):
    """Must show 3: 1 bit flipped at every position, and every truncation, is noticed."""
    path = folder / "manifest.json"
    text = path.read_bytes()
    for place in range(len(text)):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
            Manifest.read(folder)
        path.write_bytes(text[:place])
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
            Manifest.read(folder)
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is missing"):
        Manifest.read(folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", "data.json", ".metadata"])
def test_every_file_it_lists_is_checked_and_named(folder, name):
    manifest, content = Manifest.read(folder), (folder / name).read_bytes()
    for place in range(len(content)):
        (folder / name).write_bytes(content[:place] + bytes([content[place] ^ 0x80]) + content[place + 1 :])
        manifest.verify(folder, contents=False)
        with pytest.raises(DamagedCheckpoint, match=f"{name} has another checksum"):
            manifest.verify(folder)
        (folder / name).write_bytes(content[:place])
        with pytest.raises(DamagedCheckpoint, match=f"{name} has {place} bytes in place of {len(content)}"):
            manifest.verify(folder, contents=False)
    (folder / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{name} is missing"):
        manifest.verify(folder)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"files": {}}, "does not list data.json"),
        ({"step": "five"}, "cannot be understood"),
        ({"files": None}, "cannot be understood"),
    ],
)
def test_a_manifest_with_a_valid_hash_and_senseless_content_is_damaged(folder, change, words):
    value = {**json.loads((folder / "manifest.json").read_text()), **change, "sha256": "0" * 64}
    text = json.dumps(value, indent=2).encode()
    text = text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1)
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(DamagedCheckpoint, match=words):
        Manifest.read(folder)


def test_a_file_outside_of_the_folder_is_never_named(folder):
    files = {**Manifest.read(folder).files, "../secret": FileRecord(1, "0")}
    (folder / "manifest.json").write_text(Manifest(5, files).to_text())
    with pytest.raises(DamagedCheckpoint, match="no plain file name"):
        Manifest.read(folder)
