"""From the spec's `data:` to what a rank reads: the feed of the training, and the evaluation data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from mgpu.data.feed import Agreement, Feed, IndexedFeed, SplitFeed, StreamFeed
from mgpu.data.loading import Course, EvaluationCourse, make_loader, make_stream_loader
from mgpu.data.position import BatchGrid, Position
from mgpu.data.sampling import SampleOrder, SamplerOrder, ShuffledOrder, why_not_layout_free
from mgpu.data.streams import EvaluationStream, FirstSamples, OwnStream, WholeStream
from mgpu.errors import DataError
from mgpu.spec import RunSpec
from mgpu.train.schedule import total_steps
from mgpu.train.targets import build


class Sources:
    """The data sets of a run, opened in this process.

    `grid` cuts an epoch; its `n` is 0 where the length is not known beforehand.
    """

    def __init__(self, spec: RunSpec) -> None:
        assert spec.data and spec.batch
        self.spec = spec
        self.data = spec.data
        self.train = build(spec.data.train, key=("data", "train"))
        self.evaluation = build(spec.data.eval, key=("data", "eval")) if spec.data.eval else None
        self.order = self._order() if is_indexed(self.train) else None
        self.samples = n = self.order.n if self.order else len(self.train) if hasattr(self.train, "__len__") else 0
        """Samples of an epoch; 0 where that is not known beforehand."""
        whole = BatchGrid(n=n, size=spec.batch.size, micro=spec.batch.micro_size, last=spec.batch.last)
        if n and whole.batches_per_epoch == 0:
            raise DataError(f"{n} samples are fewer than one batch of {spec.batch.size}, and batch.last is drop")
        self.steps_per_epoch = whole.batches_per_epoch if n else None
        """None where the length of the data is not known beforehand."""
        self.grid = self._whole = whole
        if spec.trace and spec.trace.samples:
            self.grid = dataclasses.replace(whole, n=min(n or spec.trace.samples, spec.trace.samples))
            if self.order is None:
                self.train = FirstSamples(self.train, spec.trace.samples)

    def total_steps(self, position: Position) -> int | None:
        """Steps of the whole training, which is at `position`; None where the length of the data is not known beforehand.

        Epochs count by samples: what is done with another batch size, or on other data, is done.
        """
        assert self.spec.duration
        if self.order is None or self.spec.duration.unit == "steps":
            return total_steps(self.spec, self.steps_per_epoch)
        return position.batches + self._whole.batches_left(self._whole.settle(position), self.spec.duration.count)

    def _order(self) -> SampleOrder:
        if self.data.sampler is None:
            return ShuffledOrder(len(self.train), self.spec.seed)
        sampler = build(self.data.sampler, self.train, key=("data", "sampler"))
        reason = why_not_layout_free(sampler, self.spec.seed)
        if reason:
            raise DataError(f"data.sampler: {reason}")
        return SamplerOrder(sampler, self.spec.seed)

    def feed(self, start: Position, epochs: int | None, agreement: Agreement, warn: Callable[[str], None]) -> Feed:
        """What this replica trains on from `start`. Its loader processes are started here."""
        replica, replicas = agreement.replica, agreement.replicas
        pin, workers, how = agreement.device.type == "cuda", self.data.workers, self.data.start
        if self.order is not None:
            course = Course(self.grid, self.order, start, replica, replicas, epochs)
            loader = make_loader(
                self.train, course, self.spec.seed, workers=workers, start=how, collate=self._collate(), pin=pin
            )
            return IndexedFeed(course, loader)
        collate = self._collate() or default_collate
        if self.data.sharded:
            own = OwnStream(self.train, self.spec.seed, self.grid.micro, replica, collate)
            loader = make_stream_loader(own, workers=workers, start=how, pin=pin)
            return SplitFeed(own, loader, self.grid, start, epochs, self.data.uneven, agreement, warn)
        whole = WholeStream(self.train, self.spec.seed, self.grid, start, replica, replicas, collate)
        loader = make_stream_loader(whole, workers=workers, start=how, pin=pin)
        return StreamFeed(loader, self.grid, start, epochs, agreement)

    def evaluation_feed(self, replica: int, replicas: int, device: torch.device) -> EvaluationFeed | None:
        """This replica's part of the evaluation data."""
        if self.evaluation is None:
            return None
        micro, pin = self.grid.micro, device.type == "cuda"
        if is_indexed(self.evaluation):
            course = EvaluationCourse(len(self.evaluation), micro, replica, replicas)
            indexed = make_loader(
                self.evaluation, course, self.spec.seed, workers=0, start=self.data.start, collate=self._collate(),
                pin=pin,
            )  # fmt: skip
            return EvaluationFeed(indexed, course.indices.start, 1, course.counts)
        collate = self._collate() or default_collate
        stream = EvaluationStream(self.evaluation, self.spec.seed, micro, replica, replicas, collate)
        return EvaluationFeed(make_stream_loader(stream, workers=0, start=self.data.start, pin=pin), replica, replicas)

    def _collate(self) -> Any:
        return build(self.data.collate, key=("data", "collate")) if self.data.collate else None


class EvaluationFeed:
    """(index, batch) of this replica's micro batches, as often as it is iterated.

    `counts` says how many every replica has; None for a stream, whose length is not known beforehand.
    """

    def __init__(self, loader: DataLoader[Any], first: int, stride: int, counts: tuple[int, ...] | None = None) -> None:
        self.counts = counts
        self._loader = loader
        self._first = first
        self._stride = stride

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for number, batch in enumerate(self._loader):
            yield self._first + number * self._stride, batch


def is_indexed(samples: Any) -> bool:
    """Whether samples can be asked for by number."""
    return hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
