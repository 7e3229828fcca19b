"""Where each part of a machine stands in its picture: sockets side by side, GPUs in a row, what they hang from above them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mgpu.topology import links
from mgpu.topology.values import Topology

GPU_WIDTH, GPU_GAP, PAD = 96, 16, 18
NIC_HEIGHT, NIC_COLUMN = 20, 122
CPU_TOP, CPU_HEIGHT = 64, 46
SWITCH_TOP, SWITCH_HEIGHT = 146, 22
ON_SWITCH = ("PIX", "PXB", "PSB", "INTE")


@dataclass(frozen=True)
class Port:
    """One NIC, or several that are alike, in a box of its own."""

    label: str
    x: float
    y: float
    width: float


@dataclass
class Switch:
    """GPUs and NICs that reach each other without the CPU."""

    gpus: list[int]
    nics: list[str]
    x: float = 0.0
    width: float = 0.0


@dataclass
class Socket:
    """One NUMA node: its GPUs in the order drawn, its switches, and the NICs that hang from the CPU itself."""

    domain: object
    gpus: list[int]
    switches: list[Switch] = field(default_factory=list)
    nics: list[str] = field(default_factory=list)
    x: float = 0.0
    width: float = 0.0


@dataclass
class Layout:
    """The whole picture. `gpu_x` are the left edges of the GPUs by position, `gpu_top` their common upper edge."""

    sockets: list[Socket]
    gpu_x: dict[int, float]
    ports: list[Port]
    gpu_top: float
    width: float


def lay_out(topology: Topology) -> Layout:
    """Places for everything; a machine without GPUs is drawn as its NUMA nodes."""
    sockets = _sockets(topology)
    gpu_x: dict[int, float] = {}
    ports: list[Port] = []
    x, deepest = float(PAD), 0
    for socket in sockets:
        socket.x = x
        inner = x + PAD
        for switch in socket.switches:
            switch.x = inner
            for gpu in switch.gpus:
                gpu_x[gpu] = inner
                inner += GPU_WIDTH + GPU_GAP
            switch.width = inner - GPU_GAP - switch.x
            deepest = max(deepest, -(-len(switch.nics) // len(switch.gpus)))
            for place, label in enumerate(switch.nics):
                column, row = place % len(switch.gpus), place // len(switch.gpus)
                ports.append(_port(label, switch.x + column * (GPU_WIDTH + GPU_GAP), row, GPU_WIDTH))
        for row, label in enumerate(socket.nics):
            ports.append(_port(label, inner, row, NIC_COLUMN - GPU_GAP))
        deepest = max(deepest, len(socket.nics))
        inner += NIC_COLUMN if socket.nics else 0
        socket.width = max(inner - GPU_GAP + PAD - x, 250)
        x += socket.width + 2 * PAD
    top = SWITCH_TOP + SWITCH_HEIGHT + 14 + deepest * (NIC_HEIGHT + 4) + 18
    return Layout(sockets, gpu_x, ports, top, max(x - PAD, 420))


def _port(label: str, x: float, row: int, width: float) -> Port:
    return Port(label, x, SWITCH_TOP + SWITCH_HEIGHT + 14 + row * (NIC_HEIGHT + 4), width)


def _sockets(topology: Topology) -> list[Socket]:
    domains: list[object] = []
    for position in range(len(topology.gpus)):
        if topology.domain(position) not in domains:
            domains.append(topology.domain(position))
    domains.extend(node.id for node in topology.numa if node.cpus and node.id not in domains and None not in domains)
    domains.sort(key=lambda domain: (domain is None, domain if isinstance(domain, int) else 0))
    sockets = [
        Socket(domain, [place for place in range(len(topology.gpus)) if topology.domain(place) == domain])
        for domain in domains or [None]
    ]
    placed = _attached(topology)
    for socket in sockets:
        rest = list(socket.gpus)
        while rest:
            members = [rest.pop(0)]
            for other in list(rest):
                if any(_share_switch(topology, member, other) for member in members):
                    members.append(other)
                    rest.remove(other)
            names = [topology.nics[nic].name for nic, gpu in placed.items() if gpu in members]
            socket.switches.append(Switch(members, _short(names)))
    for nic, port in enumerate(topology.nics):
        if nic not in placed:
            _home(topology, sockets, nic).nics.append(port.name)
    for socket in sockets:
        socket.nics = _short(socket.nics)
    return sockets


def _share_switch(topology: Topology, first: int, second: int) -> bool:
    """Whether two GPUs are on one switch: by their own link, or, where that is a fabric, by a NIC near both."""
    kind = topology.link(first, second)
    if kind in ON_SWITCH:
        return True
    near = ((nic.links[first], nic.links[second]) for nic in topology.nics if nic.links[first] and nic.links[second])
    return links.is_fabric(kind) and any(a in ON_SWITCH and b in ON_SWITCH for a, b in near)


def _attached(topology: Topology) -> dict[int, int]:
    """The GPU that each NIC shares a switch with, by place in `topology.nics`."""
    found = {}
    for place, nic in enumerate(topology.nics):
        near = [gpu for gpu, kind in enumerate(nic.links) if kind in ON_SWITCH]
        if near:
            found[place] = min(near, key=lambda gpu: (-links.strength(nic.links[gpu]), gpu))
    return found


def _home(topology: Topology, sockets: list[Socket], nic: int) -> Socket:
    port = topology.nics[nic]
    by_node = next((socket for socket in sockets if port.numa is not None and socket.domain == port.numa), None)
    if by_node or not port.links:
        return by_node or sockets[0]
    best = max(range(len(port.links)), key=lambda gpu: (links.strength(port.links[gpu]), -gpu))
    if links.strength(port.links[best]) <= links.strength("SYS"):
        return sockets[-1]
    return next(socket for socket in sockets if best in socket.gpus)


def _short(names: Iterable[str], most: int = 4) -> list[str]:
    """Many ports of one kind in one box: `mlx5_0 and 17 more`."""
    found = list(names)
    return found if len(found) <= most else [*found[: most - 1], f"+{len(found) - most + 1} more NICs"]
