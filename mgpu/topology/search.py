"""Choosing GPUs where there are too many sets to try them all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from mgpu.topology.ring import improved_ring, ring_above, weakest_bound
from mgpu.topology.scale import Scale

_MOST_SETS = 250


def search(scale: Scale, count: int) -> tuple[list[tuple[int, ...]], int]:
    """A few good sets of a large machine, and a bound on the weakest link of any.

    Sets are grown from each GPU, and taken from a ring of the strongest links that close one; the best is then bettered one
    exchange at a time.
    """
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}

    def value(members: Iterable[int]) -> tuple[int, ...]:
        chosen = tuple(sorted(members))
        if chosen not in seen:
            seen[chosen] = scale.key(chosen, improved_ring(chosen, scale.strengths), None)
        return seen[chosen]

    everyone = range(len(scale.busy))
    candidates = scale.preferred(count)
    closed, bound = _strongest_ring(scale, candidates, count)
    seeds = {_grown(scale, seed, count) for seed in candidates}
    best = max({*seeds, tuple(sorted(closed))} if closed else seeds, key=value)
    while len(seen) < _MOST_SETS:
        moves = [
            tuple(sorted({*best, entering} - {leaving}))
            for leaving in best
            for entering in everyone
            if entering not in best
        ]
        moves.sort(key=lambda members: _quick(scale, members), reverse=True)
        better = next((move for move in moves[: _MOST_SETS // 5] if value(move) > value(best)), None)
        if better is None:
            break
        best = better
    return sorted(seen, key=lambda members: seen[members], reverse=True)[:4], bound


def _strongest_ring(scale: Scale, candidates: list[int], count: int) -> tuple[tuple[int, ...], int]:
    """A ring of the strongest links for which one was found, and the strength above which there is none."""
    bound = weakest_bound(candidates, count, scale.strengths)
    values = {scale.strengths[a][b] for a in candidates for b in candidates if a != b}
    for limit in sorted((value for value in values if value <= bound), reverse=True):
        order, tried_all = ring_above(candidates, count, limit, scale.strengths, scale.domains)
        if order:
            return order, bound
        if tried_all and bound == limit:
            bound = max((value for value in values if value < limit), default=0)
    return (), bound


def _grown(scale: Scale, seed: int, count: int) -> tuple[int, ...]:
    """A set grown from one GPU by the GPU with the best links into it; of equals, one of its NUMA nodes."""
    members = [seed]
    rest = [place for place in range(len(scale.busy)) if place != seed]
    while len(members) < count:
        nodes = {scale.domains[member] for member in members}

        def fits(place: int, members: list[int] = members, nodes: set[object] = nodes) -> tuple[int, ...]:
            into = sorted((scale.strengths[place][member] for member in members), reverse=True)
            return (-scale.busy[place], sum(into[:2]), scale.domains[place] in nodes, sum(into), -place)

        members.append(rest.pop(rest.index(max(rest, key=fits))))
    return tuple(sorted(members))


def _quick(scale: Scale, members: tuple[int, ...]) -> tuple[int, ...]:
    """An estimate of a set's key without its ring."""
    second = min(sorted((scale.strengths[a][b] for b in members if b != a), reverse=True)[:2][-1] for a in members)
    nodes = len({scale.domains[member] for member in members})
    pairs = sum(scale.strengths[a][b] for a, b in itertools.combinations(members, 2))
    return (-sum(scale.busy[member] for member in members), second, -nodes, pairs)
