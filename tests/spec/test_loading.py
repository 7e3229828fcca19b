"""Extends, substitution, --set and validation, with every problem at its line."""

import math

import jsonschema
import pytest
from conftest import spec_text

from mgpu.errors import SpecError
from mgpu.spec import DeviceRequest, Span, json_schema, load_spec, parse_value, resolve_secrets


@pytest.fixture
def load(tmp_path):
    def load(text=None, *overrides, environ=(), **changes):
        path = tmp_path / "toy.yaml"
        path.write_text(spec_text(**changes) if text is None else text)
        return load_spec(path, overrides, dict(environ))

    return load


def problems_of(load, *arguments, **keywords):
    with pytest.raises(SpecError) as caught:
        load(*arguments, **keywords)
    return [str(problem).rpartition("/")[2] for problem in caught.value.problems]


def test_numbers_in_scientific_notation_are_numbers_everywhere(load):
    """Case C1."""
    spec = load(
        name='"1e-4"', optimizer="{target: torch.optim:AdamW, args: {lr: 1e-4, eps: 1e-8}}", duration="1e3 steps"
    ).spec
    assert spec.optimizer.args == {"lr": 0.0001, "eps": 1e-08}
    assert spec.duration == Span(1000, "steps")
    assert spec.name == "1e-4"
    assert load(batch="{size: 1e3, micro: 1e1}").spec.batch.size == 1000


@pytest.mark.parametrize("time", ["12:00:00", "1:00:00", "12:30", "08:30", "1-00:00:00"])
def test_times_stay_as_written(load, time):
    """Case C3."""
    for written in (time, f'"{time}"'):
        assert load(cluster=f"{{engine: local, time: {written}}}").spec.cluster.model_extra == {"time": time}


def test_misspelt_and_misplaced_keys_are_all_told_with_line_and_nearest_key(load):
    """Case C4."""
    text = spec_text(batch="{size: 4, micr: 1}") + "gradient_acumulation_steps: 8\noptimiser: x\nmicro: 2\n"
    assert problems_of(load, text) == [
        "toy.yaml:10:18: batch.micr: unknown key; did you mean micro?",
        "toy.yaml:11:1: gradient_acumulation_steps: unknown key; accumulation is derived: write batch.micro",
        "toy.yaml:12:1: optimiser: unknown key; write optimizer",
        "toy.yaml:13:1: micro: unknown key; it belongs in batch: write batch.micro",
    ]
    assert load(spec_text() + "x-notes: {anything: [goes]}\n").spec == load().spec


def test_substitution(load):
    """Case C9."""
    environ = {"LR": "1e-3", "ODD": "a: b # c", "HOME": "/root", "TOKEN": "s3cret"}
    text = (
        spec_text(data=None)
        + """\
data:
  train:
    # a comment on ${UNSET} is no reference
    target: toy.py:Data
    args:
      a: ${SCRATCH:-/tmp/x}/runs
      b: $$HOME
      c: "${env:ODD}"
      d: ${env:LR}
      e: '${env:LR}'
      f: ${ODD}
      g: ${secret:TOKEN}
      h: costs $5
"""
    )
    loaded = load(text, environ=environ)
    arguments = loaded.spec.data.train.args
    assert arguments == {
        "a": "/tmp/x/runs",
        "b": "$HOME",
        "c": "a: b # c",
        "d": 0.001,
        "e": "1e-3",
        "f": "a: b # c",
        "g": "${secret:TOKEN}",
        "h": "costs $5",
    }
    assert "s3cret" not in loaded.dump()
    assert resolve_secrets(arguments, environ)["g"] == "s3cret"
    again = load(loaded.dump(), environ={"TOKEN": "s3cret"})
    assert again.document == loaded.document


def test_an_unset_variable_is_named_with_its_line(load):
    text = spec_text(name="${env:SCRATCH}-${OTHER}")
    found = problems_of(load, text)
    assert len(found) == 1
    assert found[0].startswith("toy.yaml:11:7: name: ")
    assert "SCRATCH is not set" in found[0]
    assert "OTHER is not set" in found[0]
    assert "only env and secret" in problems_of(load, spec_text(name="${file:x}"))[0]
    assert "TOKEN is not set" in problems_of(load, spec_text(name="'${secret:TOKEN}'"))[0]


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"duration": "0 epochs"}, "duration", ["at least 1", "0 epochs"]),
        ({"duration": "-5 steps"}, "duration", ["at least 1", "-5 steps"]),
        ({"duration": "1.5 epochs"}, "duration", ["whole number"]),
        ({"duration": "10"}, "duration", ["N epochs", "N steps"]),
        ({"duration": "3 minutes"}, "duration", ["epochs or steps"]),
        ({"batch": "{size: 0}"}, "batch.size", ["greater than or equal to 1", "is 0"]),
        ({"batch": "{size: 4, micro: 0}"}, "batch.micro", ["greater than or equal to 1", "is 0"]),
        (
            {"batch": "{size: 64, micro: 48}"},
            "batch",
            ["size 64", "micro 48", "write micro 32 or 64, or size 48 or 96"],
        ),
        ({"batch": "{size: yes}"}, "batch.size", ["valid integer", "'yes'"]),
        ({"seed": "true"}, "seed", ["valid integer", "True"]),
        ({"clip_norm": ".nan"}, "clip_norm", ["finite", "nan"]),
        ({"clip_norm": "-1"}, "clip_norm", ["greater than 0", "-1"]),
        ({"checkpoint": "{keep: 0}"}, "checkpoint.keep", ["greater than or equal to 1", "is 0"]),
        ({"optimizer": "{target: torch.optim:SGD, args: {lr: -1}}"}, "optimizer.args.lr", ["above 0", "-1"]),
        ({"optimizer": "{target: torch.optim:SGD, args: {lr: .nan}}"}, "optimizer.args.lr", ["finite", "nan"]),
        ({"optimizer": "{target: torch.optim:SGD, args: {lr: '1e-3'}}"}, "optimizer.args.lr", ["number", "'1e-3'"]),
        ({"schedule": "{warmup: 200 steps}", "duration": "100 steps"}, "schedule.warmup", ["200 steps", "100 steps"]),
        ({"evaluate": "{every: 1 epochs}"}, "evaluate.every", ["data.eval"]),
        ({"restart": "{max: -1}"}, "restart.max", ["greater than or equal to 0", "is -1"]),
        ({"watchdog": "{hang: 3 steps}"}, "watchdog.hang", ["seconds or minutes or hours"]),
        ({"devices": "none"}, "devices", ["cpu:N"]),
        ({"devices": "[0, 0]"}, "devices", ["twice"]),
        ({"model": "no-colon"}, "model.target", ["package.module:attribute"]),
        ({"model": None}, "", ["missing: model"]),
        ({"loggers": "console"}, "loggers", ["tuple"]),
    ],
)
def test_senseless_values_are_refused_with_key_value_and_range(load, changes, place, words):
    """Case C11."""
    found = problems_of(load, **changes)
    assert len(found) == 1, found
    assert (f": {place}: " if place else "") in found[0]
    for word in words:
        assert word in found[0]


def test_all_problems_come_at_once_and_in_order(load):
    found = problems_of(load, batch="{size: 0}", duration="0 epochs", seed="-1")
    assert [line.split(": ")[1] for line in found] == ["batch.size", "duration", "seed"]


def test_set_changes_any_field_and_misspelt_ones_are_told(load):
    loaded = load(
        None, "devices=[0,3]", "data.workers=2", "optimizer.args.lr=1e-3", "model.args.dropout=0.5", "clip_norm="
    )
    assert loaded.spec.devices == DeviceRequest("cuda", 2, (0, 3))
    assert loaded.spec.data.workers == 2
    assert loaded.spec.optimizer.args["lr"] == 1e-3
    assert loaded.spec.model.target.endswith("toy.py:Net")
    assert loaded.spec.model.args == {"dropout": 0.5}
    assert loaded.spec.clip_norm is None
    with pytest.raises(SpecError, match=r"--set batch.siz.*batch.siz: unknown key; did you mean size?"):
        load(None, "batch.siz=3")
    with pytest.raises(SpecError, match=r"write --set key.path=value"):
        load(None, "batch.size")
    with pytest.raises(SpecError, match="no such place"):
        load(None, "loggers.7=x", loggers="[console]")


def test_values_of_set():
    assert [parse_value(text) for text in ("1e-4", "[0, 3]", "a b", "'1'", "true")] == [1e-4, [0, 3], "a b", "1", True]


def test_extends_merges_mappings_and_replaces_args_of_another_target(load, tmp_path):
    (tmp_path / "base.yaml").write_text(spec_text(seed="7", schedule="{warmup: 2 steps, shape: linear}"))
    spec = load(
        "extends: base.yaml\nname: child\nschedule: {shape: cosine}\noptimizer: {args: {weight_decay: 0.1}}\n"
    ).spec
    assert (spec.name, spec.seed, spec.schedule.shape, str(spec.schedule.warmup)) == ("child", 7, "cosine", "2 steps")
    assert spec.optimizer.args == {"lr": 0.01, "weight_decay": 0.1}
    other = load("extends: base.yaml\noptimizer: {target: torch.optim:SGD, args: {lr: 0.5}}\nclip_norm: null\n").spec
    assert other.optimizer.args == {"lr": 0.5}
    assert other.clip_norm is None


def test_faults_in_a_base_are_told_with_its_file(load, tmp_path):
    (tmp_path / "base.yaml").write_text(spec_text(seed="-7"))
    assert problems_of(load, "extends: base.yaml\n")[0].startswith("base.yaml:11:1: seed:")
    (tmp_path / "base.yaml").write_text("extends: toy.yaml\n")
    assert "circle" in problems_of(load, "extends: base.yaml\n")[0]
    assert "no such file" in problems_of(load, "extends: gone.yaml\n")[0]


@pytest.mark.parametrize("content", [b"", b"# only a comment\n", b"- a list\n", b"just text", b"\xff\xfe\x00"])
def test_files_that_are_no_spec_are_refused(tmp_path, content):
    (tmp_path / "bad.yaml").write_bytes(content)
    for path in (tmp_path / "bad.yaml", tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(SpecError):
            load_spec(path)


def test_file_targets_count_from_the_file_that_wrote_them(load, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.yaml").write_text(spec_text())
    spec = load("extends: sub/base.yaml\nmodel: toy.py:Other\n").spec
    assert spec.model.target == f"{tmp_path / 'toy.py'}:Other"
    assert spec.data.train.target == f"{tmp_path / 'sub' / 'toy.py'}:Data"


def test_the_name_is_the_files_unless_given(load):
    assert load().spec.name == "toy"


def test_a_dumped_spec_reads_back_the_same(load):
    loaded = load(spec_text(name='"1e-4"', devices="[1, 2]", metrics="{}", x="0").replace("x: 0\n", "x-a: {b: 1}\n"))
    again = load(loaded.dump())
    assert again.document == loaded.document
    assert again.spec == loaded.spec


def test_the_schema_agrees_with_the_models(load):
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    document = {**load().document, "x-anything": 1, "extends": "base.yaml", "devices": "cpu:2", "model": "a.b:C"}
    assert list(validator.iter_errors(document)) == []
    for bad in (
        {"duration": "2 weeks"},
        {"bach": {}},
        {"devices": "tpu"},
        {"batch": {"size": 0}},
        {"precision": "fp8"},
    ):
        assert list(validator.iter_errors({**document, **bad})), bad
    assert schema["properties"]["seed"]["description"].startswith("Decides weights")


def test_infinity_never_passes(load):
    assert math.isinf(parse_value(".inf"))
    assert "finite" in problems_of(load, optimizer="{target: torch.optim:SGD, args: {lr: .inf}}")[0]
