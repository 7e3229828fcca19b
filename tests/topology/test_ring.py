"""Rings: exact on small sets, bounded on all."""

import itertools
import random

import pytest

from mgpu.topology.ring import best_ring, improved_ring, measure, ring_above, ring_links, weakest_bound


def strengths(count, seed, most=5):
    source = random.Random(seed)
    values = [[0] * count for _ in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        values[a][b] = values[b][a] = source.randint(1, most)
    return values


def best_by_force(members, values):
    first, *rest = members
    return max(
        (measure((first, *order), values).weakest, measure((first, *order), values).total)
        for order in itertools.permutations(rest)
    )


def test_the_hops_of_small_rings():
    assert ring_links([3]) == []
    assert ring_links([3, 5]) == [(3, 5)]
    assert ring_links([1, 2, 3]) == [(1, 2), (2, 3), (3, 1)]


@pytest.mark.parametrize("seed", range(40))
def test_the_best_ring_equals_brute_force(seed):
    count = 3 + seed % 5
    values = strengths(count, seed)
    ring = best_ring(range(count), values)
    assert sorted(ring.order) == list(range(count))
    assert ring == measure(ring.order, values)
    assert (ring.weakest, ring.total) == best_by_force(range(count), values)
    assert weakest_bound(range(count), count, values) >= ring.weakest


@pytest.mark.parametrize("seed", range(10))
def test_an_improved_ring_is_a_ring_and_no_better_than_the_bound(seed):
    values = strengths(12, seed)
    ring = improved_ring(range(12), values)
    assert sorted(ring.order) == list(range(12))
    assert measure(range(12), values).weakest <= ring.weakest <= weakest_bound(range(12), 12, values)


def test_a_ring_above_a_limit():
    values = strengths(8, 3)
    best = best_ring(range(8), values)
    order, _ = ring_above(range(8), 8, best.weakest, values, [0] * 8)
    assert measure(order, values).weakest >= best.weakest
    assert ring_above(range(8), 8, best.weakest + 1, values, [0] * 8) == ((), True)


def test_the_bound_sees_islands():
    """Two triangles of strong links: no ring of four has one."""
    values = [[9 if a // 3 == b // 3 else 1 for b in range(6)] for a in range(6)]
    assert weakest_bound(range(6), 3, values) == 9
    assert weakest_bound(range(6), 4, values) == 1
