"""Which sample stands at which position of an epoch: mgpu's own order, or that of the user's sampler."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from mgpu.data.order import EpochOrder
from mgpu.data.seeding import order_seed, seed_everything
from mgpu.errors import DataError


class SampleOrder(Protocol):
    """Positions to sample ids, alike on every rank. `n` positions an epoch."""

    n: int

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        """Sample ids at the positions [start, stop) of `epoch`."""


class ShuffledOrder:
    """`EpochOrder`, worked out in blocks: one position costs as much as a thousand."""

    BLOCK = 4096

    def __init__(self, n: int, seed: int) -> None:
        self.n = n
        self._seed = seed
        self._order = EpochOrder(n, seed, 0)
        self._start = 0
        self._block: list[int] = []

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        if epoch != self._order.epoch:
            self._order, self._block = EpochOrder(self.n, self._seed, epoch), []
        if start < self._start or stop > self._start + len(self._block):
            end = min(self.n, start + max(self.BLOCK, stop - start))
            self._start, self._block = start, self._order.at(np.arange(start, end)).tolist()
        return self._block[start - self._start : stop - self._start]


class SamplerOrder:
    """The order that a torch sampler gives, listed once an epoch after seeding from (seed, epoch)."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self.n = len(sampler)
        self._sampler = sampler
        self._seed = seed
        self._epoch = -1
        self._listed: list[int] = []

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        if epoch != self._epoch:
            self._epoch, self._listed = epoch, self._list(epoch)
        return self._listed[start:stop]

    def _list(self, epoch: int) -> list[int]:
        seed_everything(order_seed(self._seed, epoch))
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        listed = list(self._sampler)
        if len(listed) != self.n:
            raise DataError(f"the sampler has length {self.n} and gave {len(listed)} samples in epoch {epoch}")
        return [int(index) for index in listed]


def why_not_layout_free(sampler: Any, seed: int) -> str:
    """Why the order of `sampler` would depend on the layout or on chance; empty if it does not.

    Lists the sampler twice, from the same seeds: two ranks, or a run and its resume, must see the same.
    """
    if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
        return "it splits the data over ranks by itself, which mgpu does: give the sampler it is made from, or none"
    if not hasattr(sampler, "__len__"):
        return "it has no length, so no place in an epoch can be found again: give it __len__"
    order = SamplerOrder(sampler, seed)
    if order.n == 0:
        return "it is empty"
    try:
        first, again = order.samples(0, 0, order.n), SamplerOrder(sampler, seed).samples(0, 0, order.n)
    except (TypeError, ValueError):
        return "it gives something else than sample numbers (a batch sampler?): batches are cut by batch.size and micro"
    except DataError as error:
        return error.message
    if first != again:
        return "two listings from the same seed differ: it has random numbers of its own; draw from torch's global ones"
    return ""
