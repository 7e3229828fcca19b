"""Binding ranks to the CPUs and the memory near their GPUs."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from mgpu.topology import sysfs
from mgpu.topology.cpulist import format_list, runs
from mgpu.topology.values import Topology

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261}
"""System call numbers (arch/*/entry/syscalls of Linux); the C library has no function for it, libnuma has."""
_PREFERRED = 1
_MASK_BITS = 64


def bind(topology: Topology, positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The CPUs of each rank, whose GPUs are at `positions`; empty where a rank is better left unbound.

    A rank gets the CPUs of its GPU's NUMA node that this process may use, in whole cores, shared out among the ranks of that
    node. It stays unbound where that node is unknown, or all its CPUs are outside the cpuset. With fewer cores than ranks
    they share.
    """
    near = [_near(topology, position) for position in positions]
    shares: list[tuple[int, ...]] = []
    for rank, cpus in enumerate(near):
        peers = [other for other, theirs in enumerate(near) if theirs == cpus]
        units = _units(cpus, topology.cores)
        if not cpus or len(units) < len(peers):
            shares.append(cpus)
            continue
        place = peers.index(rank)
        first, last = place * len(units) // len(peers), (place + 1) * len(units) // len(peers)
        shares.append(tuple(sorted(cpu for unit in units[first:last] for cpu in unit)))
    return tuple(shares)


def _near(topology: Topology, position: int) -> tuple[int, ...]:
    gpu = topology.gpus[position]
    node = next((node.cpus for node in topology.numa if node.id == gpu.numa), ())
    return tuple(sorted(set(node or gpu.cpus or ()) & set(topology.cpus)))


def _units(cpus: tuple[int, ...], cores: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """The CPUs by physical core. Where cores are unknown, two runs of one length (`0-31,64-95`) are taken for the first and
    the second threads of the same cores, as Linux numbers them."""
    if cores:
        known = [tuple(sorted(set(core) & set(cpus))) for core in cores]
        return [core for core in known if core] + [(cpu,) for cpu in cpus if not any(cpu in core for core in known)]
    stretches = runs(cpus)
    if len(stretches) == 2 and len(stretches[0]) == len(stretches[1]):
        return [tuple(pair) for pair in zip(*stretches, strict=True)]
    return [(cpu,) for cpu in cpus]


def bind_process(cpus: Sequence[int], root: Path = sysfs.SYS) -> str:
    """Bind the calling process, and all it starts, to `cpus`, and have its memory come from their NUMA node first.

    Call it before any thread is started: threads keep the CPUs of their birth. Nothing happens for no CPUs. Returns what took
    effect, for the log: a container may forbid either, which costs speed and nothing else.
    """
    if not cpus:
        return "not bound to CPUs"
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        return f"not bound to CPUs {format_list(cpus)}: {error.strerror}"
    nodes = [node.id for node in sysfs.numa_nodes(root) if set(cpus) <= set(node.cpus)]
    memory = f", memory from NUMA node {nodes[0]} first" if nodes and _prefer_memory(nodes[0]) else ""
    return f"bound to CPUs {format_list(cpus)}{memory}"


def _prefer_memory(node: int) -> bool:
    """set_mempolicy(MPOL_PREFERRED, {node}): from that node while it has room, then from any."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    words = (ctypes.c_ulong * (node // _MASK_BITS + 1))()
    words[node // _MASK_BITS] = 1 << node % _MASK_BITS
    call = ctypes.CDLL(None, use_errno=True).syscall
    # The kernel reads one bit less than it is told.
    return bool(call(number, _PREFERRED, ctypes.byref(words), len(words) * _MASK_BITS + 1) == 0)
