"""From a position in the training to micro batches on the device, the same ones in every layout."""

from __future__ import annotations

import atexit
import faulthandler
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data._utils import signal_handling

from mgpu.data.position import BatchGrid, Position
from mgpu.data.sampling import SampleOrder
from mgpu.data.seeding import sample_seed, seed_everything
from mgpu.runs.helpers import be_deaf_to_stops, die_with_parent, stops_held_back

Key = tuple[int, int]


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
    order: SampleOrder
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
        for share in self.shares():
            for index in share.micro_indices:
                yield [(share.position.epoch, sample) for sample in self.samples(share.position, index)]

    def samples(self, position: Position, index: int) -> list[int]:
        """The ids of the samples in micro batch `index` of the global batch at `position`."""
        return self.order.samples(position.epoch, *self.grid.micro_batches(position.offset)[index])


class Loader(DataLoader[Any]):
    """A DataLoader whose processes are there until their work is done, and end when the rank does."""

    def __iter__(self) -> Any:
        if self.num_workers and self.multiprocessing_context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # its start would let the signals through
        with stops_held_back():
            batches = super().__iter__()
        if self.num_workers:
            _open.add(batches)
        return batches


_open: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register  # so before multiprocessing waits for its children, whom its SIGTERM does not end
def _close_loaders() -> None:
    for batches in list(_open):
        batches._shutdown_workers()


def _start_loader(_worker: int) -> None:
    """A loader dies with its rank, at once, and leaves the stopping to it."""
    die_with_parent()
    # torch's handlers of a crash, which hint at too little shared memory, have taken the place of those that tell the line.
    faulthandler.disable()
    signal_handling._set_worker_signal_handlers()
    faulthandler.enable(file=2)
    be_deaf_to_stops()


def make_loader(
    samples: Any, keys: Sampler[list[Key]], seed: int, *, workers: int, start: str, collate: Any, pin: bool
) -> DataLoader[Any]:
    """A loader that yields one batch for each list of keys."""
    return Loader(
        SeededSamples(samples, seed),
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin,
        worker_init_fn=_start_loader if workers else None,
        multiprocessing_context=start if workers else None,
    )


def make_stream_loader(stream: IterableDataset[Any], *, workers: int, start: str, pin: bool) -> DataLoader[Any]:
    """A loader that passes on what `stream` makes, which is whole batches already."""
    return Loader(
        stream,
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,
        pin_memory=pin,
        worker_init_fn=_start_loader if workers else None,
        multiprocessing_context=start if workers else None,
        persistent_workers=workers > 0,
    )


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class EvaluationCourse(Sampler[list[Key]]):
    """One replica's part of the evaluation data: every sample once over all replicas, nothing padded."""

    count: int
    micro: int
    replica: int
    replicas: int

    @property
    def indices(self) -> range:
        """The micro batches of this replica."""
        return self._shares[self.replica]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many micro batches each replica has."""
        return tuple(map(len, self._shares))

    def __iter__(self) -> Iterator[list[Key]]:
        ranges = self._grid.micro_batches(0)
        for index in self.indices:
            yield [(0, sample) for sample in range(*ranges[index])]

    @property
    def _grid(self) -> BatchGrid:
        return BatchGrid(n=self.count, size=self.count, micro=self.micro, last="keep")

    @property
    def _shares(self) -> list[range]:
        return self._grid.shares(len(self._grid.micro_batches(0)), self.replicas)


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move every tensor in nested tuples, lists and mappings; copies from pinned memory do not wait.

    With `dtype`, floating-point tensors become that.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device, dtype) for item in value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return type(value)(to_device(item, device, dtype) for item in value)  # type: ignore[call-arg]
    return value
