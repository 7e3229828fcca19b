"""The best ring through a set of GPUs: weakest link first, then the sum of its links.

NCCL's ring all-reduce runs at the pace of its slowest hop (Patarasuk and Yuan, 2009), so a ring is worth its weakest link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Strengths = Sequence[Sequence[int]]
"""Square matrix over positions: larger is better, whole numbers so that sums compare exactly."""

EXACT_UP_TO = 8
_MOST_STEPS = 40_000


@dataclass(frozen=True)
class Ring:
    """`order` are positions; `weakest` and `total` the least and the sum of its links, each counted once."""

    weakest: int
    total: int
    order: tuple[int, ...]


def ring_links(order: Sequence[int]) -> list[tuple[int, int]]:
    """The hops of a ring, each once: none for one GPU, one for two."""
    if len(order) < 3:
        return [(order[0], order[1])] if len(order) == 2 else []
    return list(zip(order, [*order[1:], order[0]], strict=True))


def measure(order: Sequence[int], strengths: Strengths) -> Ring:
    """The ring in a given order. One GPU has no link and nothing to wait for: its weakest is 0."""
    values = [strengths[first][second] for first, second in ring_links(order)]
    return Ring(min(values, default=0), sum(values), tuple(order))


def best_ring(members: Sequence[int], strengths: Strengths) -> Ring:
    """The best ring through `members`: exact up to 8 of them, above by nearest neighbours and 2-opt. Of equals, the first
    in the order of positions; it starts at the lowest."""
    members = sorted(members)
    values = {strengths[a][b] for a in members for b in members if a != b}
    if len(members) < 4 or len(values) == 1:
        return measure(members, strengths)
    return _exact(members, strengths) if len(members) <= EXACT_UP_TO else improved_ring(members, strengths)


def _exact(members: list[int], strengths: Strengths) -> Ring:
    """Depth first over all rings from the lowest member, cut where no ring can beat the best so far."""
    best = measure(members, strengths)
    start, size = members[0], len(members)
    widest = max(strengths[a][b] for a in members for b in members if a != b)
    path = [start]

    def extend(rest: tuple[int, ...], weakest: int, total: int) -> None:
        nonlocal best
        last = path[-1]
        if not rest:
            if path[1] > last:
                return
            closing = strengths[last][start]
            found = (min(weakest, closing), total + closing)
            if found > (best.weakest, best.total):
                best = Ring(*found, tuple(path))
            return
        if weakest < best.weakest or (
            weakest == best.weakest and total + (size - len(path) + 1) * widest <= best.total
        ):
            return
        for place, member in enumerate(rest):
            hop = strengths[last][member]
            if hop < best.weakest:
                continue
            path.append(member)
            extend(rest[:place] + rest[place + 1 :], min(weakest, hop), total + hop)
            path.pop()

    extend(tuple(members[1:]), widest, 0)
    return best


def improved_ring(members: Sequence[int], strengths: Strengths) -> Ring:
    """A good ring: nearest neighbours from the lowest member, then segments reversed as long as that helps."""
    rest = sorted(members)
    order = [rest.pop(0)]
    while rest:
        row = strengths[order[-1]]
        order.append(rest.pop(max(range(len(rest)), key=lambda place: (row[rest[place]], -place))))
    best = measure(order, strengths)
    improved = True
    while improved:
        improved = False
        for low in range(1, len(order) - 1):
            for high in range(low + 1, len(order)):
                a, b, c = best.order[low - 1], best.order[low], best.order[high]
                d = best.order[(high + 1) % len(order)]
                old, new = (strengths[a][b], strengths[c][d]), (strengths[a][c], strengths[b][d])
                if min(old) > best.weakest and sum(new) <= sum(old):
                    continue
                turned = (*best.order[:low], *reversed(best.order[low : high + 1]), *best.order[high + 1 :])
                found = measure(turned, strengths)
                if (found.weakest, found.total) > (best.weakest, best.total):
                    best, improved = found, True
    return best


def ring_above(
    members: Sequence[int], size: int, limit: int, strengths: Strengths, domains: Sequence[object]
) -> tuple[tuple[int, ...], bool]:
    """A ring of `size` of the `members` with no link below `limit`, or none, and whether all were tried within the budget.

    Depth first from each member to later ones; members of one NUMA node (`domains`) first.
    """
    near = {
        a: sorted(
            (b for b in members if b != a and strengths[a][b] >= limit),
            key=lambda b, a=a: (domains[b] != domains[a], -strengths[a][b], b),  # type: ignore[misc]
        )
        for a in members
    }
    steps = 0

    def extend(path: list[int]) -> bool:
        nonlocal steps
        if len(path) == size:
            return path[0] in near[path[-1]]
        for member in near[path[-1]]:
            if member > path[0] and member not in path and steps < _MOST_STEPS:
                steps += 1
                path.append(member)
                if extend(path):
                    return True
                path.pop()
        return False

    for start in sorted(members):
        path = [start]
        if extend(path):
            return tuple(path), True
    return (), steps < _MOST_STEPS


def weakest_bound(members: Sequence[int], size: int, strengths: Strengths) -> int:
    """No ring of `size` GPUs out of `members` can have a weakest link above this: each GPU of a ring needs two links that
    good (one in a pair), and all of them must be joined by such links."""
    needed = min(2, size - 1)
    for limit in sorted({strengths[a][b] for a in members for b in members if a != b}, reverse=True):
        near = {a: {b for b in members if a != b and strengths[a][b] >= limit} for a in members}
        while lonely := [a for a, others in near.items() if len(others) < needed]:
            for gone in lonely:
                del near[gone]
            near = {a: others & near.keys() for a, others in near.items()}
        while near:
            island, border = set(), [next(iter(near))]
            while border:
                member = border.pop()
                if member not in island:
                    island.add(member)
                    border.extend(near[member] - island)
            if len(island) >= size:
                return limit
            near = {a: others for a, others in near.items() if a not in island}
    return 0
