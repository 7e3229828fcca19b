"""The installed Python's standard library as text to learn: real data that every machine already has."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

# Packages that were added, tests, and generated tables: not the text that a person wrote.
_FOLDERS_LEFT_OUT = {
    *("site-packages", "dist-packages", "test", "tests", "__pycache__"),
    *("encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo"),
}
# Files that differ between two installations of one release.
_FILES_LEFT_OUT = ("_sysconfigdata", "sitecustomize", "usercustomize")

Sample = tuple[Tensor, Tensor]


class PythonSource:
    """Blocks of bytes: sample i is (x, y), both (context,) int64, with y one byte further on than x.

    A hash of a file's relative path orders the files and puts about `eval_fraction` of them into `eval`, the others
    into `train`. The text is the same wherever the same Python release is installed. `limit_bytes` keeps the beginning
    of a split (None: all of it). `root` is a folder to read *.py files from in place of the standard library;
    FileNotFoundError where it is none, ValueError where the split holds less than one block.
    """

    def __init__(
        self,
        split: Literal["train", "eval"],
        context: int,
        root: str | None = None,
        eval_fraction: float = 0.05,
        limit_bytes: int | None = 4_000_000,
    ) -> None:
        if split not in ("train", "eval"):
            raise ValueError(f"split {split!r}: must be train or eval")
        folder = Path(root or sysconfig.get_paths()["stdlib"])
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder} to read Python source from")
        ranked = sorted((_rank(name), name) for name in _source_files(folder))
        files = [name for rank, name in ranked if (rank < eval_fraction) == (split == "eval")]
        text = _read(folder, files, limit_bytes)
        if len(text) <= context:
            raise ValueError(f"{folder}: {len(text)} bytes for {split} are less than one block of {context + 1}")
        self.files = files
        self._blocks = np.lib.stride_tricks.sliding_window_view(text, context + 1)[::context]

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> Sample:
        block = torch.from_numpy(self._blocks[index].astype(np.int64))
        return block[:-1], block[1:]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """A whole batch in one gather."""
        blocks = torch.from_numpy(self._blocks[indices].astype(np.int64))
        return list(zip(blocks[:, :-1].unbind(), blocks[:, 1:].unbind(), strict=True))


def _source_files(folder: Path) -> Iterator[str]:
    """Relative paths of the *.py files; folders left out are not even listed, site-packages may hold thousands."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _FOLDERS_LEFT_OUT]
        for name in files:
            if name.endswith(".py") and not name.startswith(_FILES_LEFT_OUT):
                yield (Path(place) / name).relative_to(folder).as_posix()


def _rank(name: str) -> float:
    """A number in [0, 1) that depends on the path alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=6, key=b"mgpu.zoo:PythonSource").digest()
    return int.from_bytes(digest) / 2**48


def _read(folder: Path, files: list[str], limit: int | None) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The files' bytes one after another, up to `limit`."""
    text = bytearray()
    for name in files:
        if limit is not None and len(text) >= limit:
            break
        text += (folder / name).read_bytes()
    return np.frombuffer(bytes(text[:limit]), dtype=np.uint8)
