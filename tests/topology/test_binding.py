"""Ranks and CPUs."""

import itertools
import os

from mgpu.topology import Gpu, NumaNode, Topology
from mgpu.topology.binding import bind, bind_process
from mgpu.topology.cpulist import parse_list


def machine(nodes, cpus, allowed, cores=(), numa=()):
    gpus = tuple(
        Gpu(index, "", "", 0, numa=node, cpus=parse_list(near) if near is not None else None)
        for index, (node, near) in enumerate(zip(nodes, cpus, strict=True))
    )
    return Topology(gpus, parse_list(allowed), cores=cores, numa=numa)


def test_ranks_of_one_node_share_its_cores_by_whole_cores():
    """CPUs 0-3 are the first threads of four cores, 8-11 the second."""
    topology = machine([0, 0, 1], ["0-3,8-11", "0-3,8-11", "4-7,12-15"], "0-15")
    assert bind(topology, (0, 1, 2)) == ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert bind(topology, (2,)) == ((4, 5, 6, 7, 12, 13, 14, 15),)


def test_known_cores_are_never_split():
    cores = ((0, 1), (2, 3), (4, 5))
    topology = machine([0, 0], ["0-5", "0-5"], "0-5", cores=cores)
    assert bind(topology, (0, 1)) == ((0, 1), (2, 3, 4, 5))


def test_only_allowed_cpus_are_given():
    topology = machine([0, 1], ["0-3", "4-7"], "2-4")
    assert bind(topology, (0, 1)) == ((2, 3), (4,))


def test_unbound_where_near_cpus_are_unknown_or_forbidden():
    topology = machine([None, 1, 0], [None, "4-7", ""], "0-3")
    assert bind(topology, (0, 1, 2)) == ((), (), ())


def test_more_ranks_than_cores_share():
    topology = machine([0] * 3, ["0-1"] * 3, "0-1")
    assert bind(topology, (0, 1, 2)) == ((0, 1), (0, 1), (0, 1))


def test_the_nodes_own_list_counts_before_a_gpus():
    topology = machine([0], ["0"], "0-3", numa=(NumaNode(0, (0, 1, 2)),))
    assert bind(topology, (0,)) == ((0, 1, 2),)


def test_shares_are_disjoint_and_cover_the_node():
    topology = machine([0] * 5, ["0-12"] * 5, "0-12")
    shares = bind(topology, range(5))
    assert sorted(itertools.chain(*shares)) == list(range(13))
    assert {len(share) for share in shares} == {2, 3}


def test_a_process_is_bound_and_says_so():
    before = os.sched_getaffinity(0)
    child, parent = os.pipe()
    pid = os.fork()
    if pid == 0:
        told = bind_process((min(before),))
        os.write(parent, f"{sorted(os.sched_getaffinity(0))} {told}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(child, 1000).decode().startswith(f"[{min(before)}] bound to CPUs {min(before)}")
    assert os.sched_getaffinity(0) == before
    assert bind_process(()) == "not bound to CPUs"
