"""Digits: the set that scikit-learn ships, split and shifted."""

import sys
from pathlib import Path

import pytest
import torch

sklearn_datasets = pytest.importorskip("sklearn.datasets")

from mgpu.zoo import Digits  # noqa: E402


def test_both_splits_together_are_the_whole_set():
    train, evaluation = Digits("train"), Digits("eval")
    pixels, labels = sklearn_datasets.load_digits(return_X_y=True)
    assert sorted([*train.numbers.tolist(), *evaluation.numbers.tolist()]) == list(range(1797))
    for data in (train, evaluation):
        assert len(data) == len(data.numbers)
        for index in (0, 100, len(data) - 1):
            image, label = data[index]
            number = data.numbers[index]
            assert image.shape == (1, 8, 8)
            assert image.dtype == torch.float32
            assert (image.flatten() * 16).tolist() == pixels[number].tolist()
            assert label.dtype == torch.int64
            assert label.item() == labels[number]


def test_a_fifth_of_every_digit_is_for_evaluation():
    evaluation, train = Digits("eval"), Digits("train")
    assert len(evaluation) / 1797 == pytest.approx(0.2, abs=0.03)
    shares = torch.bincount(evaluation.labels) / torch.bincount(torch.cat([evaluation.labels, train.labels]))
    # About 180 of each digit: three standard deviations of the share are 0.09.
    assert all(abs(share - 0.2) < 0.09 for share in shares.tolist())


def test_pixels_are_between_zero_and_one():
    images = Digits("train").images
    assert images.min() == 0
    assert images.max() == 1


def test_a_shifted_image_is_one_of_nine_and_all_nine_come():
    plain, shifted = Digits("train"), Digits("train", augment=True)
    image = plain[0][0][0]
    expected = {}
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            moved = torch.zeros(8, 8)
            for row in range(8):
                for column in range(8):
                    if 0 <= row - down < 8 and 0 <= column - right < 8:
                        moved[row, column] = image[row - down, column - right]
            expected[tuple(moved.flatten().tolist())] = (down, right)
    torch.manual_seed(0)
    seen = {expected[tuple(shifted[0][0].flatten().tolist())] for _ in range(200)}
    assert len(seen) == len(expected) == 9


def test_a_shift_is_drawn_from_torchs_seed():
    data = Digits("train", augment=True)

    def draws(seed):
        torch.manual_seed(seed)
        return torch.stack([data[index][0] for index in range(50)])

    assert torch.equal(draws(3), draws(3))
    assert not torch.equal(draws(3), draws(4))


def test_without_augmentation_nothing_is_drawn():
    data, state = Digits("train"), torch.get_rng_state()
    assert torch.equal(data[5][0], data[5][0])
    assert torch.equal(state, torch.get_rng_state())


def test_augmented_evaluation_is_refused():
    with pytest.raises(ValueError, match="augment is for the train split"):
        Digits("eval", augment=True)


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="'test': must be train or eval"):
        Digits("test")


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "mgpu-run\[examples\]"'):
        Digits("train")


def test_a_folder_with_the_table_serves_without_scikit_learn(monkeypatch, tmp_path):
    folder = Path(sklearn_datasets.__file__).parent / "data"
    expected = Digits("eval")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    found = Digits("eval", root=str(folder))
    assert torch.equal(found.images, expected.images)
    assert torch.equal(found.labels, expected.labels)
    with pytest.raises(FileNotFoundError, match=r"digits\.csv\.gz"):
        Digits("eval", root=str(tmp_path))
