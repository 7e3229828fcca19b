"""Weights out into a file, and from a file, a checkpoint or a run into a model."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file
from torch import nn

from mgpu.checkpoint.weights import export, find_weights, load_weights, snippet
from mgpu.errors import CheckpointError, DamagedCheckpoint, RunNotFound


def tied_model():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


@pytest.fixture
def one(trainer):
    made = trainer(model=tied_model())
    made.train(2)
    made.save()
    return made


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_an_exported_file_loads_by_the_snippet_that_is_shown(one, tmp_path, kind):
    path, model = tmp_path / f"model.{kind}", tied_model()
    export(one.folder.find(), path, kind)
    exec(snippet(path, kind), {"model": model})
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_safetensors_holds_tied_weights_once(one, tmp_path):
    export(one.folder.find(), tmp_path / "m.safetensors", "safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"0.weight", "0.bias", "1.bias"}
        assert file.metadata()["1.weight"] == "0.weight"
        assert file.metadata()["step"] == "2"
    assert load_model(tied_model(), tmp_path / "m.safetensors") == (set(), [])


def test_equal_weights_give_equal_files(one, tmp_path):
    """The library writes its metadata (format, step, tied names) in an order of its own each time."""
    contents = set()
    for number in range(12):
        path = tmp_path / f"{number}.safetensors"
        export(one.folder.find(), path, "safetensors")
        contents.add(path.read_bytes())
    assert len(contents) == 1
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert list(json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]) == ["1.weight", "format", "step"]
    load_model(tied_model(), path)


@pytest.mark.parametrize("source", ["file", "checkpoint", "folder without a run"])
def test_a_model_starts_from_weights(one, tmp_path, source):
    export(one.folder.find(), tmp_path / "m.safetensors", "safetensors")
    reference = {"file": tmp_path / "m.safetensors", "checkpoint": one.folder.path_of(2)}.get(source, tmp_path / "none")
    if source == "folder without a run":
        with pytest.raises(RunNotFound):
            find_weights(str(reference), tmp_path)
        return
    model = tied_model()
    load_weights(find_weights(str(reference), tmp_path), model)
    assert model[1].weight is model[0].weight
    assert torch.equal(model[1].weight, one.model[0].weight)
    assert torch.equal(model[1].bias, one.model[1].bias)


def test_a_tied_file_fills_a_model_without_ties(one):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    load_weights(one.folder.find(), model)
    assert torch.equal(model[1].weight, one.model[0].weight)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"0.bias": None}, ["0.bias is missing"]),
        ({"2.bias": torch.zeros(1)}, ["2.bias is not in the model"]),
        ({"0.bias": torch.zeros(4)}, ["0.bias", "(4,)", "(3,)"]),
        ({"0.bias": torch.zeros(3).half()}, ["0.bias", "float16", "float32"]),
        ({"1.weight": torch.zeros(3, 3)}, ["1.weight and 0.weight differ, and the model ties them"]),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_names(tmp_path, change, words):
    weights = {"0.weight": torch.ones(3, 3), "0.bias": torch.ones(3), "1.bias": torch.ones(3), **change}
    save_file({name: value for name, value in weights.items() if value is not None}, tmp_path / "m.safetensors")
    model = tied_model()
    before = model[1].bias.clone()
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path / "m.safetensors", model)
    for word in words:
        assert word in caught.value.message
    assert torch.equal(model[1].bias, before)


def test_what_is_no_weights_file_is_named(tmp_path, one):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt is no safetensors file"):
        load_weights(find_weights(str(tmp_path / "notes.txt"), tmp_path), tied_model())
    (one.folder.path_of(2) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="__0_0"):
        find_weights(str(one.folder.path_of(2)), tmp_path)
