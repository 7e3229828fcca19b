"""From a data set to the turns of a training: for each global batch, one replica's micro batches and everybody's counts."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from mgpu.data.loading import Course
from mgpu.data.position import BatchGrid, Position
from mgpu.data.streams import OwnStream, Part
from mgpu.errors import DataError

Uneven = Literal["use_all", "shortest", "error"]
COUNTING_SECONDS = 5.0


@dataclass(frozen=True)
class Turn:
    """One replica's part of the global batch at `position`.

    `micro_batches` gives (index in the global batch, batch on the host), once. `samples(index)` are the ids in that micro
    batch, empty where the data set has none.
    """

    position: Position
    after: Position
    counts: tuple[int, ...]
    micro_batches: Iterator[tuple[int, Any]]
    samples: Callable[[int], list[int]]


class Feed(Protocol):
    """Where a replica's turns come from. Ends with the last epoch."""

    def turns(self) -> Iterator[Turn]: ...

    def first(self) -> Any:
        """A micro batch to come, which still comes; None where there is none. Before the first turn, in any one rank."""


class IndexedFeed:
    """A data set with `__len__` and `__getitem__`: all is known beforehand."""

    def __init__(self, course: Course, loader: DataLoader[Any]) -> None:
        self._course = course
        self._batches: Iterator[Any] = iter(loader)

    def first(self) -> Any:
        batch, self._batches = _ahead(self._batches)
        return batch

    def turns(self) -> Iterator[Turn]:
        for share in self._course.shares():
            micro_batches = ((index, next(self._batches)) for index in share.micro_indices)
            samples = functools.partial(self._course.samples, share.position)
            yield Turn(share.position, share.after, share.counts, micro_batches, samples)


@dataclass(frozen=True)
class Agreement:
    """What the replicas tell each other before a turn of a stream."""

    replica: int
    replicas: int
    world: int
    device: torch.device

    def exchange(self, *values: int) -> list[tuple[int, ...]]:
        """The values of every replica. Called by all ranks together."""
        if self.world == 1:
            return [values]
        mine = torch.tensor([self.replica, *values], dtype=torch.int64, device=self.device)
        told = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(told, mine)
        rows = {row[0]: tuple(row[1:]) for row in torch.stack(told).tolist()}
        return [rows[replica] for replica in range(self.replicas)]


class StreamFeed:
    """A stream that every replica reads whole (see `WholeStream`)."""

    def __init__(
        self, loader: DataLoader[Any], grid: BatchGrid, start: Position, epochs: int | None, agreement: Agreement
    ) -> None:
        self._parts: Iterator[Part] = iter(loader)
        self._grid = grid
        self._start = start
        self._epochs = epochs
        self._agreement = agreement

    def first(self) -> Any:
        part, self._parts = _ahead(self._parts)
        return next(iter(part.batches), None) if part is not None else None

    def turns(self) -> Iterator[Turn]:
        position, grid = self._start, self._grid
        while self._epochs is None or position.epoch < self._epochs:
            part = next(self._parts)
            self._check_alike(part, position)
            runs = grid.shares(-(-part.samples // grid.micro), self._agreement.replicas)
            after = Position(
                epoch=position.epoch + part.last,
                offset=0 if part.last else position.offset + part.samples,
                samples=position.samples + part.samples,
                batches=position.batches + 1,
                step=position.step,
            )
            micro_batches = zip(runs[self._agreement.replica], part.batches, strict=True)
            numbers = functools.partial(_numbers, position.offset, part.samples, grid.micro)
            yield Turn(position, after, tuple(map(len, runs)), micro_batches, numbers)
            position = after

    def _check_alike(self, part: Part, position: Position) -> None:
        told = self._agreement.exchange(part.samples, int(part.last))
        if len(set(told)) > 1:
            seen = ", ".join(f"replica {replica} {row[0]}" for replica, row in enumerate(told))
            raise DataError(
                f"epoch {position.epoch}, from sample {position.offset} on: the replicas see streams of different lengths "
                f"({seen} samples in this batch)",
                hint="a data set that splits itself over ranks needs data.sharded: true",
            )


def _numbers(first: int, count: int, micro: int, index: int) -> list[int]:
    """The places in the stream of micro batch `index` of a global batch of `count` samples from `first` on."""
    return list(range(first + index * micro, first + min(count, (index + 1) * micro)))


class SplitFeed:
    """A stream that gives each replica its own part. Ends that are uneven are agreed on, never waited for."""

    def __init__(
        self, stream: OwnStream, loader: DataLoader[Any], grid: BatchGrid, start: Position, epochs: int | None,
        uneven: Uneven, agreement: Agreement, warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._stream = stream
        self._loader = loader
        self._grid = grid
        self._start = start
        self._epochs = epochs
        self._uneven = uneven
        self._agreement = agreement
        self._warn = warn
        if start.parts and len(start.parts) != agreement.replicas:
            raise DataError(
                f"the checkpoint lies in the middle of an epoch that the data set had split over {len(start.parts)} replicas",
                hint=f"resume on {len(start.parts)}, or from the end of an epoch",
            )
        self._batches: Iterator[Any] = self._open(start.epoch, start.parts[agreement.replica] if start.parts else 0)

    def _open(self, epoch: int, passed: int) -> Iterator[Any]:
        self._stream.epoch.value = epoch
        return itertools.islice(iter(self._loader), passed, None)

    def first(self) -> Any:
        batch, self._batches = _ahead(self._batches)
        return batch

    def turns(self) -> Iterator[Turn]:
        position, replica, replicas = self._start, self._agreement.replica, self._agreement.replicas
        wanted = [len(run) for run in self._grid.shares(self._grid.size // self._grid.micro, replicas)]
        consumed = list(position.parts or (0,) * replicas)
        ahead = self._take(wanted[replica])
        while self._epochs is None or position.epoch < self._epochs:
            mine, ahead = ahead, self._take(wanted[replica])
            told = self._agreement.exchange(len(mine), sum(map(_length, mine)), len(ahead))
            counts = [row[0] for row in told]
            if not any(counts):
                raise DataError(f"epoch {position.epoch}: the data set gave no replica a sample")
            consumed = [done + count for done, count in zip(consumed, counts, strict=True)]
            over = self._is_over(position.epoch, wanted, [row[2] for row in told], consumed, ahead)
            samples = sum(row[1] for row in told)
            after = Position(
                epoch=position.epoch + over,
                offset=0 if over else position.offset + samples,
                samples=position.samples + samples,
                batches=position.batches + 1,
                step=position.step,
                parts=() if over else tuple(consumed),
            )
            first = sum(counts[:replica])
            yield Turn(position, after, tuple(counts), iter(list(enumerate(mine, first))), lambda index: [])
            position = after
            if over:
                self._batches, consumed = self._open(position.epoch, 0), [0] * replicas
                ahead = self._take(wanted[replica])

    def _take(self, count: int) -> list[Any]:
        return list(itertools.islice(self._batches, count))

    def _is_over(self, epoch: int, wanted: list[int], ahead: list[int], consumed: list[int], own: list[Any]) -> bool:
        """Whether the epoch ends with this turn, by the policy for uneven ends. All replicas come to the same answer."""
        if not any(ahead):
            return True
        if self._uneven == "use_all" or ahead == wanted:
            return False
        rest = _until(self._batches, time.monotonic() + COUNTING_SECONDS)
        self._batches = itertools.chain(rest, self._batches)
        left = self._agreement.exchange(len(own) + len(rest))
        total = [done + row[0] for row, done in zip(left, consumed, strict=True)]
        turns = {-(-count // share) for count, share in zip(total, wanted, strict=True)}
        if len(turns) == 1:
            return False
        text = f"the replicas have {', '.join(map(str, total))} micro batches"
        if self._uneven == "error":
            raise DataError(f"epoch {epoch}: {text}", hint="data.uneven: use_all or shortest accepts that")
        self._warn(f"epoch {epoch}: {text}; it ends with the shortest (data.uneven)")
        return True


def _ahead(items: Iterator[Any]) -> tuple[Any, Iterator[Any]]:
    """The next item, None where there is none, and an iterator that still has it."""
    taken = list(itertools.islice(items, 1))
    return (taken[0] if taken else None), itertools.chain(taken, items)


def _until(batches: Iterator[Any], deadline: float) -> list[Any]:
    """The batches that are left, or as many as come before `deadline`: a stream may have no end."""
    taken = []
    for batch in batches:
        taken.append(batch)
        if time.monotonic() >= deadline:
            break
    return taken


def _length(batch: Any) -> int:
    """Samples in a collated batch: the first dimension of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return len(batch)
    parts = batch.values() if isinstance(batch, dict) else batch
    return next((_length(part) for part in parts if isinstance(part, torch.Tensor | dict | list | tuple)), 1)
