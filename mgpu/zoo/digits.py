"""The 1,797 handwritten digits of 8 x 8 pixels that scikit-learn ships."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

_EVAL_FRACTION = 0.2


class Digits:
    """Sample i is (image (1, 8, 8) float32 in [0, 1], label int64 scalar). A hash of a digit's number in the whole set
    puts about a fifth into `eval`, the others into `train`.

    `augment` shifts a training image by up to one pixel each way, drawn from torch's global generator, which mgpu seeds
    for each sample. `root` is a folder with scikit-learn's `digits.csv.gz` for machines without scikit-learn.
    ImportError where neither is there, FileNotFoundError where `root` does not hold the file.
    """

    def __init__(self, split: Literal["train", "eval"], augment: bool = False, root: str | None = None) -> None:
        if split not in ("train", "eval"):
            raise ValueError(f"split {split!r}: must be train or eval")
        if augment and split == "eval":
            raise ValueError("augment is for the train split: evaluation would no longer be of the same images")
        pixels, labels = _from_package() if root is None else _from_folder(Path(root))
        chosen = np.array([_is_eval(number) for number in range(len(labels))]) == (split == "eval")
        self.numbers = np.flatnonzero(chosen)
        self.labels = torch.from_numpy(labels[chosen].astype(np.int64))
        self.images = torch.from_numpy((pixels[chosen].reshape(-1, 1, 8, 8) / 16).astype(np.float32))
        self._framed = torch.nn.functional.pad(self.images, (1, 1, 1, 1)) if augment else None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._framed is None:
            return self.images[index], self.labels[index]
        top, left = torch.randint(0, 3, (2,)).tolist()
        return self._framed[index, :, top : top + 8, left : left + 8], self.labels[index]


Table = tuple["np.ndarray[tuple[int, ...], np.dtype[np.float64]]", "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"]


def _from_package() -> Table:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('Digits needs scikit-learn: pip install "mgpu-run[examples]"') from error
    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels.astype(np.int64)


def _from_folder(folder: Path) -> Table:
    path = folder / "digits.csv.gz"
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)


def _is_eval(number: int) -> bool:
    digest = hashlib.blake2b(number.to_bytes(8), digest_size=6, key=b"mgpu.zoo:Digits").digest()
    return int.from_bytes(digest) < _EVAL_FRACTION * 2**48
