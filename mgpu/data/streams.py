"""Data sets that can only be iterated: samples in the order of the stream, the same global batches in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import RawValue
from typing import Any, NamedTuple

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, get_worker_info

from mgpu.data.position import BatchGrid, Position
from mgpu.data.seeding import sample_seed, seed_everything
from mgpu.errors import DataError

Collate = Callable[[list[Any]], Any]


class Part(NamedTuple):
    """One replica's part of one global batch: its micro batches, the samples of the whole, whether an epoch ends here."""

    batches: list[Any]
    samples: int
    last: bool


class FirstSamples(IterableDataset[Any]):
    """The beginning of a stream."""

    def __init__(self, samples: Any, count: int) -> None:
        self.samples = samples
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.samples), self.count)


class WholeStream(IterableDataset[Any]):
    """A stream that every replica and every loader worker goes through from its start, each keeping its own share.

    So an epoch holds every sample once whatever the layout, and its end is known to all without asking. What lies before
    `start` is passed over: by the data set's own `skip(count)` where it has one, else sample by sample.
    """

    def __init__(
        self, samples: Any, seed: int, grid: BatchGrid, start: Position, replica: int, replicas: int, collate: Collate
    ) -> None:
        self.samples = samples
        self.seed = seed
        self.grid = grid
        self.start = start
        self.replica = replica
        self.replicas = replicas
        self.collate = collate

    def __iter__(self) -> Iterator[Part]:
        worker, workers = _worker_of_many()
        numbers = itertools.count()
        epoch, offset = self.start.epoch, self.start.offset
        while True:
            for chunk, last in self._global_batches(epoch, offset):
                if next(numbers) % workers == worker:
                    yield Part(self._own(chunk), len(chunk), last)
            epoch, offset = epoch + 1, 0

    def _global_batches(self, epoch: int, offset: int) -> Iterator[tuple[list[Any], bool]]:
        """The rest of an epoch in global batches; each is held back until it is known whether it is the last."""
        items = seeded_items(self.samples, self.seed, epoch, offset)
        waiting = self._next(items)
        if not waiting and offset == 0:
            raise DataError(f"epoch {epoch}: the data set gave fewer samples than one batch holds, {self.grid.size}")
        while waiting:
            following = self._next(items)
            yield waiting, not following
            waiting = following

    def _next(self, items: Iterator[Any]) -> list[Any]:
        chunk = list(itertools.islice(items, self.grid.size))
        return [] if self.grid.last == "drop" and len(chunk) < self.grid.size else chunk

    def _own(self, chunk: list[Any]) -> list[Any]:
        micro = self.grid.micro
        indices = self.grid.shares(-(-len(chunk) // micro), self.replicas)[self.replica]
        return [self.collate(chunk[index * micro : (index + 1) * micro]) for index in indices]


class EvaluationStream(IterableDataset[Any]):
    """Micro batch m of a stream goes to replica m modulo their number; nothing is padded."""

    def __init__(self, samples: Any, seed: int, micro: int, replica: int, replicas: int, collate: Collate) -> None:
        self.samples = samples
        self.seed = seed
        self.micro = micro
        self.replica = replica
        self.replicas = replicas
        self.collate = collate

    def __iter__(self) -> Iterator[Any]:
        items = seeded_items(self.samples, self.seed, 0, 0)
        for index in itertools.count():
            chunk = list(itertools.islice(items, self.micro))
            if not chunk:
                return
            if index % self.replicas == self.replica:
                yield self.collate(chunk)


class OwnStream(IterableDataset[Any]):
    """A stream that gives each rank (and each loader worker) another part by itself, in micro batches."""

    def __init__(self, samples: Any, seed: int, micro: int, rank: int, collate: Collate) -> None:
        self.samples = samples
        self.seed = seed
        self.micro = micro
        self.rank = rank
        self.collate = collate
        self.epoch = RawValue("q", 0)  # seen by loader processes that live for several epochs

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        part = self.rank * 4096 + (info.id if info else 0)
        epoch = int(self.epoch.value)
        items = seeded_items(self.samples, sample_seed(self.seed, epoch, part), epoch, 0)
        while chunk := list(itertools.islice(items, self.micro)):
            yield self.collate(chunk)


def seeded_items(samples: Any, seed: int, epoch: int, offset: int) -> Iterator[Any]:
    """The items of one epoch from number `offset` on; before item k is drawn, all generators are seeded from k."""
    if hasattr(samples, "set_epoch"):
        samples.set_epoch(epoch)
    first = 0
    if offset and hasattr(samples, "skip"):
        samples, first = samples.skip(offset), offset
    seed_everything(sample_seed(seed, epoch, first))
    items = iter(samples)
    for number in itertools.count(first):
        seed_everything(sample_seed(seed, epoch, number))
        try:
            item = next(items)
        except StopIteration:
            return
        if number >= offset:
            yield item


def _worker_of_many() -> tuple[int, int]:
    """This loader worker and their number. From here on a data set that asks sees none: it is to give the whole stream."""
    info = get_worker_info()
    torch_worker._worker_info = None
    return (info.id, info.num_workers) if info else (0, 1)
