"""What a person should know about a machine before training on it, in plain sentences."""

from __future__ import annotations

import itertools
from collections import Counter

from mgpu.topology import links
from mgpu.topology.cpulist import format_list
from mgpu.topology.values import Topology


def warnings(topology: Topology) -> list[str]:
    """All that is odd about a machine, most telling first; the notes of its source come last."""
    found: list[str] = []
    if topology.gpus:
        found.extend(_fabric(topology))
        found.extend(_peer_access(topology))
        found.extend(_sockets(topology))
        found.extend(_affinity(topology))
        found.extend(_numbering(topology))
    return [*found, *topology.notes]


def _pairs(topology: Topology) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(len(topology.gpus)), 2))


def _label(topology: Topology, *positions: int) -> str:
    return ", ".join(f"GPU{topology.gpus[position].index}" for position in positions)


def _fabric(topology: Topology) -> list[str]:
    """GPUs without the NVLink that others have, and pairs that look like they miss their bridge."""
    joined = [(a, b) for a, b in _pairs(topology) if links.is_fabric(topology.link(a, b))]
    if not joined:
        return []
    on = {position for pair in joined for position in pair}
    off = [position for position in range(len(topology.gpus)) if position not in on]
    name = "XGMI" if topology.link(*joined[0]) == "XGMI" else "NVLink"
    found = []
    bridges = len(joined) * 2 == len(on)
    mates = [(a, b) for a, b in itertools.combinations(off, 2) if topology.domain(a) == topology.domain(b)]
    if bridges and mates and len(off) == 2:
        first, second = mates[0]
        example = f"{_label(topology, joined[0][0])}-{_label(topology, joined[0][1])}"
        found.append(
            f"{_label(topology, first)}-{_label(topology, second)} is {topology.link(first, second)} where {example} has "
            f"{topology.link(*joined[0])}: a bridge is missing or down"
        )
    elif off:
        found.append(f"{_label(topology, *off)} off the fabric: no {name}, the other GPUs have it")
    counts = Counter(topology.link(a, b) for a, b in joined)
    if len(joined) == len(_pairs(topology)) and len(counts) == 2 and min(counts.values()) < len(topology.gpus):
        odd, usual = counts.most_common()[-1][0], counts.most_common()[0][0]
        if links.strength(odd) < links.strength(usual) and counts[usual] > 2 * counts[odd]:
            a, b = next(pair for pair in joined if topology.link(*pair) == odd)
            found.append(
                f"{_label(topology, a)}-{_label(topology, b)} has {odd} where others have {usual}: a link is down"
            )
    return found


def _peer_access(topology: Topology) -> list[str]:
    refused = [(a, b) for a, b in _pairs(topology) if topology.refused(a, b)]
    if not refused:
        return []
    states = sorted({topology.p2p[a][b] or "" for a, b in refused})
    every = len(refused) == len(_pairs(topology))
    a, b = refused[0]
    rest = "" if len(refused) == 1 else f" and {len(refused) - 1} more pairs"
    which = "every pair" if every and len(refused) > 1 else f"{_label(topology, a)}-{_label(topology, b)}{rest}"
    return [
        f"P2P refused for {which} ({', '.join(f'{state}: {P2P_MEANING.get(state, state)}' for state in states)}): "
        "traffic goes through host memory"
    ]


P2P_MEANING = {
    "OK": "peer access works",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "DR": "disabled by a registry key",
    "NS": "not supported",
    "U": "unknown",
}
"""The answers of `nvidia-smi topo -p2p`."""


def _sockets(topology: Topology) -> list[str]:
    found = []
    kinds = {links.normal(topology.link(a, b) or "") for a, b in _pairs(topology)}
    pci_only = any("PCI-only" in note for note in topology.notes)
    if kinds == {"SYS"} and len(topology.gpus) > 2 and not pci_only:
        found.append("all pairs are SYS: no two GPUs share a switch or a host bridge that the driver knows of")
    within = [
        (a, b)
        for a, b in _pairs(topology)
        if links.normal(topology.link(a, b) or "") == "SYS"
        and topology.gpus[a].numa is not None
        and topology.gpus[a].numa == topology.gpus[b].numa
    ]
    if within:
        a, b = within[0]
        more = f" and {len(within) - 1} more pairs" if len(within) > 1 else ""
        found.append(f"{_label(topology, a)}-{_label(topology, b)}{more}: SYS within one NUMA node")
    nodes = Counter(gpu.numa for gpu in topology.gpus)
    alone = [place for place, gpu in enumerate(topology.gpus) if gpu.numa is not None and nodes[gpu.numa] == 1]
    if len(alone) == 1 and len(topology.gpus) > 2:
        found.append(f"{_label(topology, alone[0])} is alone on NUMA node {topology.gpus[alone[0]].numa}")
    far = [
        nic.name for nic in topology.nics if nic.links and all(links.normal(kind or "") == "SYS" for kind in nic.links)
    ]
    if far:
        shown = ", ".join(far[:4]) + (f" and {len(far) - 4} more NICs" if len(far) > 4 else "")
        found.append(f"no GPU near {shown}: SYS from all of them")
    return found


def _affinity(topology: Topology) -> list[str]:
    found = []
    hidden = [place for place, gpu in enumerate(topology.gpus) if gpu.cpus == ()]
    if hidden:
        found.append(f"{_label(topology, *hidden)}: CPU affinity hidden by a cpuset or a container (its cell is empty)")
    allowed = set(topology.cpus)
    outside = [place for place, gpu in enumerate(topology.gpus) if gpu.cpus and allowed and not allowed & set(gpu.cpus)]
    if outside:
        found.append(f"{_label(topology, *outside)}: none of the near CPUs are allowed here ({format_list(allowed)})")
    memory_only = {gpu.memory_node for gpu in topology.gpus if gpu.memory_node is not None} | {
        node.id for node in topology.numa if not node.cpus and node.memory
    }
    memory_only -= {gpu.numa for gpu in topology.gpus}
    if memory_only:
        found.append(f"NUMA nodes {format_list(memory_only)} only hold memory (of GPUs): no CPUs to bind to")
    return found


def _numbering(topology: Topology) -> list[str]:
    found = []
    nodes = [gpu.numa for gpu in topology.gpus if gpu.numa is not None]
    if len(nodes) > 2 and len(set(nodes)) == len(topology.gpus) and nodes == sorted(nodes, reverse=True):
        found.append("GPU indices and NUMA nodes run in opposite order: rank r is not near CPU socket r")
    names = {gpu.name for gpu in topology.gpus if gpu.name}
    if len(names) > 1:
        found.append(
            f"GPUs of several kinds ({', '.join(sorted(names))}): CUDA by default counts the fastest first, mgpu counts like "
            "nvidia-smi and hands UUIDs to the ranks"
        )
    busy = [place for place, gpu in enumerate(topology.gpus) if gpu.busy]
    if busy:
        found.append(f"{_label(topology, *busy)} in use already")
    return found
