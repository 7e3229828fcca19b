"""Choosing GPUs: against brute force on small machines, against known machines, within its bound on large ones."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import BRIDGED, DGX1V, matrix, render

from mgpu.errors import TopologyError
from mgpu.topology import Gpu, Topology
from mgpu.topology.placement import pick, weaker_order
from mgpu.topology.presets import preset

GIB = 1024**3
ORDER = {"SYS": 1, "NODE": 2, "PHB": 3, "PXB": 4, "PIX": 5, "NV1": 35, "NV2": 60, "NV4": 110, "NV12": 310}
"""Strengths by hand: PCIe classes in their order, NVLink 10 + 25 GB/s a link."""


def machine(rows, numa=None, busy=()):
    count = len(rows)
    gpus = tuple(
        Gpu(place, f"GPU-{place}", "", 80 * GIB, numa=numa[place] if numa else None, processes=int(place in busy))
        for place in range(count)
    )
    return Topology(gpus, tuple(range(8)), links=tuple(map(tuple, rows)))


def rings_of(members):
    """All rings through `members`, each once in each direction."""
    first, *rest = members
    return [(first, *order) for order in itertools.permutations(rest)]


def hops(order):
    pairs = {frozenset(pair) for pair in zip(order, (*order[1:], order[0]), strict=True)}
    return [tuple(pair) for pair in pairs if len(pair) == 2]


def brute_force(rows, numa, count):
    """(weakest, -nodes, ring sum, all-pairs sum) of the best set, by trying everything."""
    worth = [[ORDER.get(cell, 0) for cell in row] for row in rows]
    best = None
    for members in itertools.combinations(range(len(rows)), count):
        ring = max(
            (min((worth[a][b] for a, b in hops(order)), default=0), sum(worth[a][b] for a, b in hops(order)))
            for order in rings_of(members)
        )
        pairs = sum(worth[a][b] for a, b in itertools.combinations(members, 2))
        value = (ring[0], -len({numa[member] for member in members}), ring[1], pairs)
        best = value if best is None else max(best, value)
    return best


@st.composite
def small_machines(draw):
    count = draw(st.integers(2, 8))
    few = draw(st.sampled_from([["SYS", "NV1"], ["SYS", "NODE", "PHB", "PIX"], list(ORDER), ["NV12"]]))
    rows = [["X"] * count for _ in range(count)]
    for row in range(count):
        for column in range(row):
            rows[row][column] = rows[column][row] = draw(st.sampled_from(few))
    return rows, [draw(st.integers(0, 2)) for _ in range(count)], draw(st.integers(1, count))


@settings(deadline=None, max_examples=120)
@given(small_machines())
def test_the_choice_equals_brute_force(case):
    """Must show 2."""
    rows, numa, count = case
    chosen = pick(machine(rows, numa), count)
    worth = [[ORDER.get(cell, 0) for cell in row] for row in rows]
    links = hops(chosen.positions)
    found = (
        min((worth[a][b] for a, b in links), default=0),
        -len({numa[member] for member in chosen.positions}),
        sum(worth[a][b] for a, b in links),
        sum(worth[a][b] for a, b in itertools.combinations(chosen.positions, 2)),
    )
    assert found == brute_force(rows, numa, count)
    assert chosen.proven
    assert chosen.weakest == (min((rows[a][b] for a, b in links), key=ORDER.__getitem__) if links else None)


def test_dgx1v_has_a_ring_of_double_links():
    """Worked out by hand in NVIDIA's DGX-1 paper: 0-3-2-1-5-6-7-4."""
    chosen = pick(Topology.parse(render(DGX1V)), 8)
    assert chosen.ring == (0, 3, 2, 1, 5, 6, 7, 4)
    assert (chosen.weakest, chosen.bandwidth) == ("NV2", 50.0)
    assert "index order would have SYS" in chosen.reason


def test_the_bridged_pair_not_the_first_two():
    """The example of the project: GPU 0 sits alone on the other socket, the bridge is 1-2."""
    topology = Topology.parse(render(BRIDGED))
    assert pick(topology, 2).gpus == (1, 2)
    assert "the first 2 by index would have SYS" in pick(topology, 2).reason
    assert pick(topology, 3).gpus == (1, 2, 3)


def test_numa_nodes_break_ties():
    rows = [["X" if a == b else "SYS" for b in range(8)] for a in range(8)]
    assert pick(machine(rows, [0, 1] * 4), 4).gpus == (0, 2, 4, 6)


def test_free_gpus_come_first():
    rows = matrix("- NV4 SYS SYS / NV4 - SYS SYS / SYS SYS - PHB / SYS SYS PHB -")
    assert pick(machine(rows), 2).gpus == (0, 1)
    assert pick(machine(rows, busy=(1,)), 2).gpus == (2, 3)
    forced = pick(machine(rows, busy=(1, 2)), 3)
    assert {0, 3} < set(forced.gpus)
    assert "in use already" in forced.reason


def test_good_sets_are_left_for_the_next_job():
    rows = matrix("- NV4 SYS / NV4 - SYS / SYS SYS -")
    assert pick(machine(rows), 1).gpus == (2,)
    two_nodes = [["X" if a == b else "NV12" for b in range(8)] for a in range(8)]
    assert pick(machine(two_nodes, [0] * 4 + [1] * 4, busy=(0, 1)), 2).gpus == (2, 3)


def test_the_innermost_groups_of_a_mesh_get_the_best_links():
    rows = matrix("- SYS NV4 SYS / SYS - SYS NV4 / NV4 SYS - SYS / SYS NV4 SYS -")
    order = pick(machine(rows), 4, inner=2).positions
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset((0, 2)), frozenset((1, 3))}
    with pytest.raises(TopologyError, match="do not divide into groups of 3"):
        pick(machine(rows), 4, inner=3)


def test_a_refused_pair_ranks_below_every_pair_with_peer_access():
    rows = matrix("- PIX SYS / PIX - SYS / SYS SYS -")
    topology = machine(rows)
    refused = (("X", "CNS", "OK"), ("CNS", "X", "OK"), ("OK", "OK", "X"))
    assert pick(topology, 2).gpus == (0, 1)
    assert pick(Topology(topology.gpus, (), links=topology.links, p2p=refused), 2).gpus != (0, 1)


def test_more_gpus_than_there_are():
    with pytest.raises(TopologyError, match="5 GPUs asked for, this machine has 4 GPUs"):
        pick(Topology.parse(render(BRIDGED)), 5)
    with pytest.raises(TopologyError, match=r"0 GPUs \(no driver\)"):
        pick(Topology((), (), trouble="no driver"), 1)


def test_without_links_the_first_are_taken():
    gpus = tuple(Gpu(index, f"GPU-{index}", "", 0) for index in (4, 5, 6, 7))
    chosen = pick(Topology(gpus, ()), 2)
    assert (chosen.gpus, chosen.devices, chosen.weakest) == ((4, 5), ("GPU-4", "GPU-5"), None)


@pytest.mark.parametrize("seed", range(6))
def test_large_machines_stay_within_their_bound(seed):
    """16 GPUs: a valid ring, a bound that holds, and never worse than the index order."""
    source = random.Random(seed)
    kinds = ["SYS", "PIX", "NV1", "NV2"]
    rows = [["X"] * 16 for _ in range(16)]
    for row in range(16):
        for column in range(row):
            rows[row][column] = rows[column][row] = source.choice(kinds)
    chosen = pick(machine(rows, [place // 8 for place in range(16)]), 8)
    assert len(set(chosen.ring)) == 8
    weakest = min((rows[a][b] for a, b in hops(chosen.positions)), key=ORDER.__getitem__)
    assert weakest == chosen.weakest
    assert ORDER[chosen.bound] >= ORDER[weakest]
    assert chosen.proven == (chosen.bound == weakest)
    assert ORDER[weakest] >= min(ORDER[rows[a][b]] for a, b in hops(range(8)))


def test_a_planted_ring_on_a_large_machine_is_found():
    planted = [1, 14, 3, 9, 12, 6, 10, 5]
    rows = [["X" if a == b else "SYS" for b in range(16)] for a in range(16)]
    for a, b in zip(planted, [*planted[1:], planted[0]], strict=True):
        rows[a][b] = rows[b][a] = "NV2"
    chosen = pick(machine(rows), 8)
    assert (sorted(chosen.gpus), chosen.weakest, chosen.proven) == (sorted(planted), "NV2", True)


def test_uniform_large_machine_takes_one_numa_node():
    chosen = pick(preset("dgx-2"), 8)
    assert (chosen.gpus, chosen.weakest, chosen.proven) == (tuple(range(8)), "NV6", True)


def test_a_list_in_a_weak_order_is_told():
    topology = Topology.parse(render(DGX1V))
    assert weaker_order(topology, (0, 3, 2, 1, 5, 6, 7, 4)) == ""
    told = weaker_order(topology, tuple(range(8)))
    assert "SYS" in told and "[0, 3, 2, 1, 5, 6, 7, 4] would have NV2" in told
