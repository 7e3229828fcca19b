"""Splitting chosen GPUs into the innermost groups of a device mesh, which talk most and get the best links."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mgpu.topology.ring import Ring, Strengths, best_ring

_MOST_SPLITS = 500
_MOST_ORDERS = 24


@dataclass(frozen=True)
class Groups:
    """A split: `weakest` and `total` over the rings of its groups, `order` all members, group after group in rank order."""

    weakest: int
    total: int
    order: tuple[int, ...]


def group(members: Sequence[int], size: int, strengths: Strengths) -> Groups:
    """The split of `members` into groups of `size` with the best weakest link, then the best sum.

    Every split is tried while there are few (all for 8 GPUs), else the best group is taken off again and again. Groups that
    follow each other, and the members in the same place of them, are chosen to be near, for the outer dimensions.
    """
    rings: dict[tuple[int, ...], Ring] = {}

    def ring(part: tuple[int, ...]) -> Ring:
        if part not in rings:
            rings[part] = best_ring(part, strengths)
        return rings[part]

    def value(split: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
        found = [ring(part) for part in split]
        return min(one.weakest for one in found), sum(one.total for one in found)

    ordered = tuple(sorted(members))
    count = math.factorial(len(ordered)) // (
        math.factorial(size) ** (len(ordered) // size) * math.factorial(len(ordered) // size)
    )
    splits = list(_splits(ordered, size)) if count <= _MOST_SPLITS else [_greedy(ordered, size, strengths)]
    best = max(splits, key=value)
    weakest, total = value(best)
    return Groups(weakest, total, _chain([ring(part).order for part in best], strengths))


def _splits(members: tuple[int, ...], size: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All splits of ascending `members`, each once."""
    if not members:
        yield ()
        return
    for others in itertools.combinations(members[1:], size - 1):
        part = (members[0], *others)
        rest = tuple(member for member in members if member not in part)
        for tail in _splits(rest, size):
            yield (part, *tail)


def _greedy(members: tuple[int, ...], size: int, strengths: Strengths) -> tuple[tuple[int, ...], ...]:
    rest, parts = list(members), []
    while rest:
        part = [rest.pop(0)]
        while len(part) < size:
            near = max(rest, key=lambda place: (min(strengths[place][m] for m in part), -place))
            rest.remove(near)
            part.append(near)
        parts.append(tuple(sorted(part)))
    return tuple(parts)


def _chain(rings: list[tuple[int, ...]], strengths: Strengths) -> tuple[int, ...]:
    """The groups one after the other, each turned so that its members stand beside near ones of the group before."""
    first, others = rings[0], rings[1:]
    orders = itertools.permutations(others) if math.factorial(len(others)) <= _MOST_ORDERS else iter([tuple(others)])

    def turned(order: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, int], list[tuple[int, ...]]]:
        chain, worth = [first], (2**62, 0)
        for part in order:
            turn = max(_turns(part), key=lambda candidate: _between(chain[-1], candidate, strengths))
            least, total = _between(chain[-1], turn, strengths)
            worth = (min(worth[0], least), worth[1] + total)
            chain.append(turn)
        return worth, chain

    _, chain = max((turned(order) for order in orders), key=lambda found: found[0])
    return tuple(member for part in chain for member in part)


def _turns(part: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All rotations of a ring, both ways round: the same ring each."""
    return [(*way[cut:], *way[:cut]) for way in (part, part[::-1]) for cut in range(len(part))]


def _between(before: Sequence[int], after: Sequence[int], strengths: Strengths) -> tuple[int, int]:
    """The least and the sum of the links between members in the same place."""
    values = [strengths[a][b] for a, b in zip(before, after, strict=True)]
    return min(values), sum(values)
