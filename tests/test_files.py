import json
import math
import os
import stat

import pytest

from mgpu.files import LineTail, append_line, json_text, read_lines, write_all, write_atomic, write_json


def test_a_file_is_replaced_whole_and_nothing_stays_beside_it(tmp_path):
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    write_atomic(path, "new\u00e9")
    assert path.read_text(encoding="utf-8") == "new\u00e9"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_atomic(path, "old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_json_holds_what_json_lacks_as_text(tmp_path):
    assert json.loads(json_text({"a": [math.nan, math.inf, -math.inf, 0.1]})) == {"a": ["nan", "inf", "-inf", 0.1]}
    assert json.loads(json_text({"name": "\udcff\u00e9"})) == {"name": "\udcff\u00e9"}
    write_json(tmp_path / "a.json", {"b": (1, 2)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": [1, 2]}


def test_a_torn_line_is_closed_off_and_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    append_line(path, {"n": 1})
    with path.open("a") as stream:
        stream.write('{"n": 2, "torn')
    append_line(path, {"n": 3}, durable=True)
    path.write_bytes(path.read_bytes() + b"[4]\n\xff\xfe\n")
    assert list(read_lines(path)) == [{"n": 1}, {"n": 3}]
    assert list(read_lines(tmp_path / "missing.jsonl")) == []


def test_a_short_write_goes_on_with_the_rest(monkeypatch):
    written = []

    def short(handle, block):
        written.append(bytes(block[:3]))
        return len(written[-1])

    monkeypatch.setattr(os, "write", short)
    write_all(0, b"abcdefgh")
    assert written == [b"abc", b"def", b"gh"]


def test_a_tail_gives_each_whole_line_once(tmp_path):
    path = tmp_path / "a.jsonl"
    tail = LineTail(path)
    assert tail.read() == []
    path.write_text('{"n": 1}\n{"n": 2}\n{"n"')
    assert tail.read() == [{"n": 1}, {"n": 2}]
    assert tail.read() == []
    with path.open("a") as stream:
        stream.write(": 3}\nnonsense\n")
    assert tail.read() == [{"n": 3}]


@pytest.mark.parametrize("torn", ["", '{"n"'])
@pytest.mark.parametrize("count", [0, 1, 2, 20_000])
def test_a_tail_can_begin_with_the_newest_line(tmp_path, count, torn):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(count)) + torn)
    tail = LineTail(path)
    tail.skip_to_last()
    assert tail.read() == [{"n": n} for n in range(count)][-1:]
    with path.open("a") as stream:
        stream.write('{"n": -1}\n'[len(torn) :])
    assert tail.read() == [{"n": -1}]


def test_a_tail_can_leave_out_what_is_there_and_goes_on_after_a_replacement(tmp_path):
    path = tmp_path / "a.jsonl"
    append_line(path, {"n": 1})
    tail = LineTail(path)
    tail.skip_to_end()
    append_line(path, {"n": 2})
    assert tail.read() == [{"n": 2}]
    write_atomic(path, '{"n": 1}\n')
    assert tail.read() == []
    append_line(path, {"n": 2})
    assert tail.read() == [{"n": 2}]
