"""The text of rocm-smi."""

import pytest

from mgpu.errors import TopologyError
from mgpu.topology import Topology
from mgpu.topology.placement import pick


def table(title, count, cell):
    rows = "\n".join(
        f"GPU{a}   " + "  ".join("0" if a == b else cell(a, b) for b in range(count)) for a in range(count)
    )
    return f"====== {title} ======\n       {'  '.join(f'GPU{a}' for a in range(count))}\n{rows}\n\n"


def hives(a, b):
    return "XGMI" if a // 4 == b // 4 else "PCIE"


def test_two_hives():
    nodes = "".join(
        f"GPU[{a}]\t\t: (Topology) Numa Node: {a // 4}\nGPU[{a}]\t\t: (Topology) Numa Affinity: {a // 4}\n"
        for a in range(8)
    )
    text = (
        table("Weight between two GPUs", 8, lambda a, b: "15" if a // 4 == b // 4 else "72")
        + table("Hops between two GPUs", 8, lambda a, b: "1" if a // 4 == b // 4 else "3")
        + table("Link Type between two GPUs", 8, hives)
        + f"====== Numa Nodes ======\n{nodes}"
    )
    topology = Topology.parse(text)
    assert topology.links[0] == ("X", "XGMI", "XGMI", "XGMI", "PCIE", "PCIE", "PCIE", "PCIE")
    assert [gpu.numa for gpu in topology.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert pick(topology, 4).gpus == (0, 1, 2, 3)
    assert pick(topology, 8).weakest == "SYS"


def test_access_is_peer_access():
    text = table("Link Type between two GPUs", 2, lambda a, b: "PCIE") + table(
        "Link accessibility between two GPUs", 2, lambda a, b: "False"
    )
    assert Topology.parse(text).p2p == (("X", "NS"), ("NS", "X"))


def test_numa_nodes_alone():
    topology = Topology.parse("GPU[0]\t\t: (Topology) Numa Node: 0\nGPU[1]\t\t: (Topology) Numa Node: -1\n")
    assert [gpu.numa for gpu in topology.gpus] == [0, None]
    assert topology.links == ()


def test_what_cannot_be_read():
    whole = table("Link Type between two GPUs", 3, hives)
    with pytest.raises(TopologyError, match="incomplete table of 3 GPUs: the link GPU1-GPU2 is missing"):
        Topology.parse("\n".join(whole.splitlines()[:3]))
    with pytest.raises(TopologyError, match="'FAST' is no link type"):
        Topology.parse(whole.replace("XGMI", "FAST"))
    with pytest.raises(TopologyError, match="names no GPU"):
        Topology.parse("ROCm System Management Interface\n")
