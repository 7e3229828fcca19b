"""The numbers that sets of GPUs are compared by."""

from __future__ import annotations

import itertools

from mgpu.topology.mesh import Groups, group
from mgpu.topology.ring import Ring
from mgpu.topology.values import Topology

SCALE = 10_000
"""Strengths are compared as whole numbers of 1/SCALE, so that sums do not depend on their order."""


class Scale:
    """A machine's links as whole numbers, and the key of a set of GPUs."""

    def __init__(self, topology: Topology, inner: int) -> None:
        count = len(topology.gpus)
        self.topology = topology
        self.inner = inner
        self.strengths = [
            [round(topology.strength(a, b) * SCALE) if a != b else 0 for b in range(count)] for a in range(count)
        ]
        self.domains = [topology.domain(position) for position in range(count)]
        self.busy = [gpu.busy for gpu in topology.gpus]
        self._worth = [
            [self.strengths[a][b] + SCALE * (self.domains[a] == self.domains[b]) for b in range(count)]
            for a in range(count)
        ]

    def key(self, members: tuple[int, ...], ring: Ring, grouped: Groups | None) -> tuple[int, ...]:
        """Larger is better; `members` ascending."""
        pairs = sum(self.strengths[a][b] for a, b in itertools.combinations(members, 2))
        first = (-sum(self.busy[member] for member in members),)
        inside = (grouped.weakest, grouped.total) if grouped else ()
        return (
            *first, *inside, ring.weakest, -len({self.domains[member] for member in members}), ring.total, pairs,
            self._left(members), *(-member for member in members),
        )  # fmt: skip

    def _left(self, members: tuple[int, ...]) -> int:
        """What the GPUs that stay free are worth to the next job: their links, and the NUMA nodes they share."""
        rest = [place for place in range(len(self.busy)) if place not in members and not self.busy[place]]
        return sum(self._worth[a][b] for a, b in itertools.combinations(rest, 2))

    def grouped(self, members: tuple[int, ...]) -> Groups | None:
        """The best split into innermost groups, where there are such groups smaller than the whole."""
        return group(members, self.inner, self.strengths) if 1 < self.inner < len(members) else None

    def preferred(self, count: int) -> list[int]:
        """The GPUs a choice may come from: the free ones if they are enough, else all."""
        free = [place for place, busy in enumerate(self.busy) if not busy]
        return free if len(free) >= count else list(range(len(self.busy)))
