"""Mangled texts: a Topology or a TopologyError, never anything else."""

import random

import pytest
from matrices import BRIDGED, CASE, DESKTOP, SINGLE, TRAY, render

from mgpu.errors import TopologyError
from mgpu.topology import Topology
from mgpu.topology.placement import pick

ROCM = """\
========================= Weight between two GPUs =========================
       GPU0         GPU1
GPU0   0            15
GPU1   15           0
======================= Link Type between two GPUs ========================
       GPU0         GPU1
GPU0   0            XGMI
GPU1   XGMI         0
=============================== Numa Nodes ================================
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[0]\t\t: (Topology) Numa Affinity: 0
GPU[1]\t\t: (Topology) Numa Node: -1
"""
P2P = " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tOK\tX\t\n"
SEEDS = [
    render(BRIDGED, legend=False),
    render(DESKTOP, "blanks"),
    render(CASE, "tabs", nics_first=True, ansi="codes"),
    render(TRAY, "blanks", legend=False),
    render(SINGLE, "single", legend=False),
    render(DESKTOP, legend=False) + P2P,
    ROCM,
]
PIECES = [
    "GPU0", "GPU1", "GPU7", "GPU999", "GPU", "X", "NV4", "NV999", "SYS", "NODEPIX", "OK", "GNS", "\t", "\n", "  ", "\x1b[4m",
    "[0m", "N/A", "0-31", "5-2", "99999-1", "0-99999", "-1", ",", "1e9", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID", "NIC0",
    "mlx5_0", "Legend:", "=", "\x00", "\u00a0", "é", "|", "#", "GPU[3]: Numa Node: 1", "XGMI", "between two GPUs", "\r", "\x0b",
]  # fmt: skip


def mangle(text, random_source):
    """One to four wounds: cut, deleted, doubled, exchanged or foreign pieces."""
    for _ in range(random_source.randint(1, 4)):
        start = random_source.randrange(len(text) + 1)
        end = min(len(text), start + random_source.choice((1, 1, 3, 8, 40)))
        way = random_source.randrange(6)
        if way == 0:
            text = text[:start]
        elif way == 1:
            text = text[:start] + text[end:]
        elif way == 2:
            text = text[:end] + text[start:]
        elif way == 3:
            text = text[:start] + random_source.choice(PIECES) + text[end:]
        elif way == 4:
            text = text[:start] + random_source.choice(PIECES) + text[start:]
        else:
            lines = text.splitlines()
            random_source.shuffle(lines)
            text = "\n".join(lines)
    return text


def check(count, seed):
    """Parse `count` mangled texts; the number that still described a machine."""
    random_source = random.Random(seed)
    read = 0
    for number in range(count):
        text = mangle(SEEDS[number % len(SEEDS)], random_source)
        try:
            topology = Topology.parse(text)
        except TopologyError:
            continue
        read += 1
        size = len(topology.gpus)
        assert size >= 1, text
        assert not topology.links or [len(row) for row in topology.links] == [size] * size, text
        assert all(len(nic.links) == size for nic in topology.nics), text
        if number % 50 == 0 and size <= 8:
            assert len(pick(topology, size).ring) == size
    return read


def test_ten_thousand_mangled_texts():
    assert 1_000 < check(10_000, seed=1) < 9_000


@pytest.mark.slow
def test_a_hundred_thousand_mangled_texts():
    """Must show 3."""
    assert 10_000 < check(100_000, seed=2) < 90_000
