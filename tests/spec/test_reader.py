"""YAML 1.2, with positions: what PyYAML alone reads otherwise."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mgpu.errors import SpecError
from mgpu.spec.reader import Mark, parse, scalar


def plain(text, is_plain, key, mark):
    return scalar(text) if is_plain else text


def read(text):
    document = parse(text, "spec.yaml", plain)
    assert document.problems == []
    return document.data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("12:30", "12:30"),
        ("1:00:00", "1:00:00"),
        ("2024-01-01", "2024-01-01"),
        ("yes", "yes"),
        ("off", "off"),
        ("y", "y"),
        ("True", True),
        ("FALSE", False),
        ("~", None),
        ("Null", None),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("1_000", "1_000"),
        ("+12", 12),
        ("1e", "1e"),
    ],
)
def test_scalars_follow_the_core_schema(text, value):
    found = read(f"key: {text}")["key"]
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_float():
    assert math.isnan(read("key: .nan")["key"])


def test_quoted_scalars_stay_texts():
    assert read("a: '1e-4'\nb: \"true\"\nc: |\n  12\nd: !!str 5\n") == {"a": "1e-4", "b": "true", "c": "12\n", "d": "5"}


def test_every_key_and_item_has_its_place():
    marks = parse("a: 1\nb:\n  c: [x, y]\n", "spec.yaml", plain).marks
    assert marks[("a",)] == Mark("spec.yaml", 1, 1)
    assert marks[("b", "c")] == Mark("spec.yaml", 3, 3)
    assert marks[("b", "c", 1)] == Mark("spec.yaml", 3, 10)


def test_a_key_that_is_there_twice_is_told_with_both_lines():
    """Case C5."""
    text = "a: 1\nb: 2\nlr: 0.1\nc:\n  d: 1\n  e: 2\n  d: 3\nf: 4\nlr: 0.001\n"
    problems = [str(problem) for problem in parse(text, "spec.yaml", plain).problems]
    assert problems == [
        "spec.yaml:7:3: c.d: is there twice, on lines 5 and 7",
        "spec.yaml:9:1: lr: is there twice, on lines 3 and 9",
    ]


def test_a_merge_key_may_be_overridden():
    assert read("x: &x {a: 1, b: 2}\ny:\n  <<: *x\n  b: 3\n")["y"] == {"a": 1, "b": 3}
    assert read("x: &x {a: 1}\nz: &z {a: 2, c: 3}\ny:\n  <<: [*x, *z]\n")["y"] == {"a": 1, "c": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:\n\tb: 1\n", "a tab"),
        ("a: [1\n", "spec.yaml:2"),
        ("a: 1\n---\nb: 2\n", "single document"),
        ("a: &a [*a]\n", None),
        ("a: *missing\n", "missing"),
        ("a: !!python/object/apply:os.system [id]\n", None),
    ],
)
def test_what_is_no_plain_data_is_refused_with_its_line(text, words):
    try:
        problems = parse(text, "spec.yaml", plain).problems
    except SpecError as error:
        problems = error.problems
    assert problems
    assert "spec.yaml:" in str(problems[0])
    assert words is None or any(words in str(problem) for problem in problems)


def test_a_bomb_of_aliases_is_refused():
    levels = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    levels += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    with pytest.raises(SpecError, match="more than"):
        parse(levels, "spec.yaml", plain)


@given(st.text(max_size=200))
def test_no_text_raises_anything_else(text):
    try:
        parse(text, "spec.yaml", plain)
    except SpecError as error:
        assert error.problems  # noqa: PT017 - no error is just as right


plain_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("abc1e-4.: #$~yn"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcdef", min_size=1), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text("abcdef", min_size=1), plain_data, max_size=4).filter(bool))
def test_plain_data_survives_pyyaml_double_quoting(data):
    """PyYAML is told to quote every text, so that only numbers, booleans and null are read by our schema."""

    class Quoted(yaml.SafeDumper):
        pass

    Quoted.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))
    text = yaml.dump(data, Dumper=Quoted, allow_unicode=True)
    if "<<" not in text:
        assert read(text) == data
