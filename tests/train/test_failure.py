"""What a rank records of its error: own or echo, type, text and place, by where it was raised."""

import json

import pytest
import torch
import torch.distributed as dist

from mgpu.errors import DataError
from mgpu.train.failure import write_failure


@pytest.fixture
def record(tmp_path):
    def write(action):
        try:
            action()
        except BaseException as error:
            write_failure(tmp_path / "rank-1.json", error, rank=1, step=4, phase="training", monotonic_ns=5)
        return json.loads((tmp_path / "rank-1.json").read_text())

    return write


def collective():
    raise dist.DistBackendError("connection closed")


def own():
    raise ValueError("bad sample 17")


def test_an_own_error_is_told_with_its_place(record):
    told = record(own)
    assert (told["type"], told["message"], told["echo"]) == ("ValueError", "bad sample 17", False)
    assert told["place"].startswith(f"{__file__}:") and told["place"].endswith("in own")
    assert (told["rank"], told["step"], told["monotonic_ns"], told["deterministic"]) == (1, 4, 5, False)


def test_an_error_of_torch_that_is_no_collective_is_the_ranks_own(record):
    told = record(lambda: torch.nn.Linear(2, 2)(torch.zeros(3)))
    assert (told["type"], told["echo"]) == ("RuntimeError", False)
    assert told["place"].startswith(f"{__file__}:")


def test_what_comes_out_of_a_collective_or_after_one_is_an_echo(record):
    assert record(collective)["echo"]

    def after():
        try:
            collective()
        except RuntimeError as error:
            raise KeyError("state") from error

    told = record(after)
    assert told["echo"] and told["type"] == "KeyError"

    def backward():
        torch.zeros(1).sum().backward()

    assert record(backward)["echo"]  # no gradient: by its place it might be of DDP's hooks; alone, it is still named


def test_a_collective_that_fails_while_an_own_error_is_on_its_way_hides_nothing(record):
    def failing():
        try:
            own()
        finally:
            collective()

    told = record(failing)
    assert (told["type"], told["message"], told["echo"]) == ("ValueError", "bad sample 17", False)


def test_what_would_come_again_is_marked(record):
    def missing():
        import a_module_that_is_not_there  # noqa: F401

    assert record(missing)["deterministic"]

    def data():
        raise DataError("no samples")

    assert record(data)["deterministic"]


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        own()


def test_an_error_of_a_loader_process_is_placed_in_the_data_set(record):
    loader = torch.utils.data.DataLoader(Broken(), num_workers=1)
    told = record(lambda: list(loader))
    assert (told["type"], told["message"], told["loader"], told["echo"]) == ("ValueError", "bad sample 17", True, False)
    assert told["place"].endswith("in own")


def test_an_error_whose_text_cannot_be_made_is_recorded_all_the_same(record):
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    def failing():
        raise Unprintable

    assert record(failing)["type"] == "Unprintable"


def test_what_an_error_was_raised_from_and_what_a_group_holds_is_told(record):
    def wrapped():
        try:
            own()
        except ValueError as error:
            raise RuntimeError("step failed") from error

    told = record(wrapped)
    assert (told["type"], told["message"]) == ("RuntimeError", "step failed")
    (cause,) = told["causes"]
    assert cause.startswith("ValueError: bad sample 17, at ") and cause.endswith("in own")

    def several():
        raise ExceptionGroup("two", [ValueError("one"), KeyError("other")])

    assert record(several)["causes"] == ["ValueError: one", "KeyError: 'other'"]

    def hidden():
        try:
            own()
        except ValueError:
            raise RuntimeError("step failed") from None

    assert record(hidden)["causes"] == []
