"""From a position in the training to micro batches on the device, the same ones in every layout."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from mgpu.data.order import EpochOrder
from mgpu.data.position import BatchGrid, Position
from mgpu.data.seeding import sample_seed, seed_everything

Key = tuple[int, int]
PR_SET_PDEATHSIG = 1


class SeededSamples(Dataset[Any]):
    """A data set whose every sample is read after seeding from (seed, epoch, sample id): workers do not matter.

    A data set with `__getitems__` is asked for a whole micro batch at once, seeded from its first sample.
    """

    def __init__(self, samples: Any, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __getitem__(self, key: Key) -> Any:
        seed_everything(sample_seed(self.seed, *key))
        return self.samples[key[1]]

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        if hasattr(self.samples, "__getitems__"):
            seed_everything(sample_seed(self.seed, *keys[0]))
            return list(self.samples.__getitems__([index for _, index in keys]))
        return [self[key] for key in keys]


@dataclass(frozen=True)
class Share:
    """One replica's part of the global batch at `position`: indices of its micro batches, and everybody's counts."""

    position: Position
    after: Position
    micro_indices: range
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Course(Sampler[list[Key]]):
    """The way of one replica through the data from `start` on, up to `epochs` (None: without end)."""

    grid: BatchGrid
    seed: int
    start: Position
    replica: int
    replicas: int
    epochs: int | None

    def shares(self) -> Iterator[Share]:
        """The global batches to come."""
        position = self.grid.settle(self.start)
        while self.epochs is None or position.epoch < self.epochs:
            count = len(self.grid.micro_batches(position.offset))
            runs = self.grid.shares(count, self.replicas)
            after = self.grid.advance(position)
            yield Share(position, after, runs[self.replica], tuple(len(run) for run in runs))
            position = after

    def __iter__(self) -> Iterator[list[Key]]:
        order = _BlockwiseOrder(self.grid.n, self.seed)
        for share in self.shares():
            epoch = share.position.epoch
            ranges = self.grid.micro_batches(share.position.offset)
            for index in share.micro_indices:
                yield [(epoch, sample) for sample in order.samples(epoch, *ranges[index])]


class _BlockwiseOrder:
    """The order of an epoch, worked out in blocks: one position costs as much as a thousand."""

    BLOCK = 4096

    def __init__(self, n: int, seed: int) -> None:
        self._n = n
        self._seed = seed
        self._order = EpochOrder(n, seed, 0)
        self._start = 0
        self._block: list[int] = []

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        """Sample ids at the positions [start, stop) of `epoch`."""
        if epoch != self._order.epoch:
            self._order, self._block = EpochOrder(self._n, self._seed, epoch), []
        if start < self._start or stop > self._start + len(self._block):
            end = min(self._n, start + max(self.BLOCK, stop - start))
            self._start, self._block = start, self._order.at(np.arange(start, end)).tolist()
        return self._block[start - self._start : stop - self._start]


def _start_loader(_worker: int) -> None:
    """A loader dies with its rank, at once, and leaves the stopping to it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def make_loader(
    samples: Any, keys: Sampler[list[Key]], seed: int, *, workers: int, start: str, collate: Any, pin: bool
) -> DataLoader[Any]:
    """A loader that yields one batch for each list of keys."""
    return DataLoader(
        SeededSamples(samples, seed),
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin,
        worker_init_fn=_start_loader if workers else None,
        multiprocessing_context=start if workers else None,
    )


@dataclass(frozen=True)
class EvaluationCourse(Sampler[list[Key]]):
    """One replica's part of the evaluation data: every sample once over all replicas, nothing padded."""

    count: int
    micro: int
    replica: int
    replicas: int

    @property
    def counts(self) -> tuple[int, ...]:
        """How many batches each replica has."""
        grid = BatchGrid(n=self.count, size=self.count, micro=self.micro, last="keep")
        return tuple(map(len, grid.shares(len(grid.micro_batches(0)), self.replicas)))

    def __iter__(self) -> Iterator[list[Key]]:
        grid = BatchGrid(n=self.count, size=self.count, micro=self.micro, last="keep")
        ranges = grid.micro_batches(0)
        for index in grid.shares(len(ranges), self.replicas)[self.replica]:
            yield [(0, sample) for sample in range(*ranges[index])]


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in nested tuples, lists and mappings; copies from pinned memory do not wait."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return type(value)(to_device(item, device) for item in value)  # type: ignore[call-arg]
    return value
