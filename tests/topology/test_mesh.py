"""Splitting GPUs into the innermost groups of a mesh."""

import itertools
import random

from mgpu.topology.mesh import group
from mgpu.topology.ring import best_ring


def random_strengths(count, seed):
    source = random.Random(seed)
    values = [[0] * count for _ in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        values[a][b] = values[b][a] = source.randint(1, 6)
    return values


def test_groups_of_two_equal_the_best_matching():
    for seed in range(10):
        values = random_strengths(6, seed)
        found = group(range(6), 2, values)
        pairs = [found.order[place : place + 2] for place in range(0, 6, 2)]
        value = (min(values[a][b] for a, b in pairs), sum(values[a][b] for a, b in pairs))
        best = max(
            (min(values[a][b] for a, b in zip(order[::2], order[1::2], strict=True)),
             sum(values[a][b] for a, b in zip(order[::2], order[1::2], strict=True)))
            for order in itertools.permutations(range(6))
        )  # fmt: skip
        assert value == best == (found.weakest, found.total)


def test_members_in_the_same_place_are_near_for_the_outer_dimension():
    """Two islands of four; member k of the one is joined to member 3-k of the other by the better link."""
    values = [[9 if a // 4 == b // 4 else 5 if a + b == 7 else 1 for b in range(8)] for a in range(8)]
    order = group(range(8), 4, values).order
    assert {frozenset(order[:4]), frozenset(order[4:])} == {frozenset(range(4)), frozenset(range(4, 8))}
    assert [values[a][b] for a, b in zip(order[:4], order[4:], strict=True)] == [5, 5, 5, 5]


def test_large_machines_are_split_greedily_but_wholly():
    values = [[9 if a // 4 == b // 4 else 1 for b in range(16)] for a in range(16)]
    found = group(range(16), 4, values)
    assert sorted(found.order) == list(range(16))
    assert found.weakest == 9
    assert best_ring(found.order[:4], values).weakest == 9
