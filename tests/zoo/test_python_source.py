"""PythonSource: which bytes, in which split, cut how."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mgpu.zoo import PythonSource


@pytest.fixture
def tree(tmp_path):
    """60 files of known bytes, and some that are to be left out."""
    for number in range(60):
        path = tmp_path / f"package_{number % 7}" / f"module_{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes((number + step) % 256 for step in range(100 + number)))
    for name in (
        "site-packages/added.py",
        "package_0/test/test_it.py",
        "package_0/__pycache__/cached.py",
        "package_0/notes.txt",
        "_sysconfigdata_linux.py",
        "sitecustomize.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("left out")
    return tmp_path


def text_of(data):
    """The text that the blocks were cut from, put together again."""
    inputs = [x for x, _ in data.__getitems__(range(len(data)))]
    return bytes(torch.cat([*inputs, data[len(data) - 1][1][-1:]]).tolist())


def test_a_sample_is_a_block_and_the_same_one_byte_further(tree):
    data = PythonSource("train", context=8, root=str(tree))
    for index in (0, 1, len(data) - 1):
        x, y = data[index]
        assert x.shape == y.shape == (8,)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[1:], y[:-1])
    assert torch.equal(data[0][1][-1:], data[1][0][:1])


@pytest.mark.parametrize("split", ["train", "eval"])
def test_blocks_follow_one_another_through_the_files(tree, split):
    data = PythonSource(split, context=8, root=str(tree), eval_fraction=0.3)
    whole = b"".join((tree / name).read_bytes() for name in data.files)
    assert len(data) == (len(whole) - 1) // 8
    assert text_of(data) == whole[: 8 * len(data) + 1]


def test_the_splits_share_no_file_and_leave_none_out(tree):
    train, evaluation = (
        PythonSource(split, context=8, root=str(tree), eval_fraction=0.3).files for split in ("train", "eval")
    )
    wanted = {f"package_{number % 7}/module_{number}.py" for number in range(60)}
    assert not set(train) & set(evaluation)
    assert set(train) | set(evaluation) == wanted
    assert 8 <= len(evaluation) <= 28  # 0.3 of 60 is 18, three standard deviations are 10.6


def test_the_split_of_a_file_does_not_depend_on_the_others(tree):
    before = PythonSource("eval", context=8, root=str(tree), eval_fraction=0.3).files
    for number in range(0, 60, 2):
        (tree / f"package_{number % 7}" / f"module_{number}.py").unlink()
    after = PythonSource("eval", context=8, root=str(tree), eval_fraction=0.3).files
    assert after == [name for name in before if (tree / name).exists()]


def test_a_limit_keeps_the_beginning(tree):
    whole, part = (PythonSource("train", context=8, root=str(tree), limit_bytes=limit) for limit in (None, 1001))
    assert len(part) == 125
    assert text_of(part) == text_of(whole)[:1001]


@pytest.mark.parametrize("indices", [[3], [5, 0, 5, 2], list(range(40))])
def test_many_samples_at_once_are_the_same_samples(tree, indices):
    data = PythonSource("train", context=8, root=str(tree))
    together = data.__getitems__(indices)
    assert len(together) == len(indices)
    for index, (x, y) in zip(indices, together, strict=True):
        assert torch.equal(x, data[index][0])
        assert torch.equal(y, data[index][1])


def test_past_the_end_is_an_index_error(tree):
    data = PythonSource("train", context=8, root=str(tree))
    with pytest.raises(IndexError):
        data[len(data)]


def test_a_loader_makes_batches_of_it(tree):
    x, y = next(iter(DataLoader(PythonSource("train", context=8, root=str(tree)), batch_size=6)))
    assert x.shape == y.shape == (6, 8)
    assert x.is_contiguous()


def test_it_survives_a_trip_to_a_loader_process(tree):
    data = PythonSource("train", context=8, root=str(tree))
    text = pickle.dumps(data)
    again = pickle.loads(text)
    assert len(text) < 2 * 8 * len(data)
    assert all(torch.equal(a, b) for a, b in zip(data[7], again[7], strict=True))


def test_no_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        PythonSource("train", context=8, root=str(tmp_path / "nowhere"))


def test_too_little_text_is_an_error(tmp_path):
    (tmp_path / "short.py").write_bytes(bytes(8))
    with pytest.raises(ValueError, match="8 bytes for train are less than one block of 9"):
        PythonSource("train", context=8, root=str(tmp_path), eval_fraction=0.0)
    (tmp_path / "short.py").write_bytes(bytes(9))
    assert len(PythonSource("train", context=8, root=str(tmp_path), eval_fraction=0.0)) == 1


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="'test': must be train or eval"):
        PythonSource("test", context=8)


def test_the_standard_library_is_python():
    data = PythonSource("train", context=64, limit_bytes=200_000)
    text = text_of(data)
    assert len(data) == 199_999 // 64
    assert text.count(b"\ndef ") + text.count(b"\nclass ") > 50
    assert not any(name.startswith(("site-packages/", "test/")) for name in data.files)


def test_about_a_twentieth_of_the_standard_library_is_for_evaluation():
    sizes = [len(PythonSource(split, context=64, limit_bytes=1000).files) for split in ("train", "eval")]
    share = sizes[1] / sum(sizes)
    assert abs(share - 0.05) < 4 * np.sqrt(0.05 * 0.95 / sum(sizes))
