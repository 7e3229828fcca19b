"""The parts of what `mgpu topo` prints for people: one function a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mgpu.topology import Topology, links
from mgpu.topology.advice import P2P_MEANING, warnings
from mgpu.topology.cpulist import format_list

if TYPE_CHECKING:
    from rich.console import Console

GIB = 1024**3
_COLORS = {
    "PSB": "cyan",
    "PIX": "cyan",
    "INTE": "cyan",
    "PXB": "blue",
    "PHB": "yellow",
    "NODE": "dark_orange",
    "SYS": "red",
}


def heading(topology: Topology) -> str:
    """How many of what, and who says so."""
    names = sorted({gpu.name for gpu in topology.gpus if gpu.name})
    count = len(topology.gpus)
    what = f"{count} x {' / '.join(names)}" if names else f"{count} GPU{'s' * (count != 1)}"
    return f"{what}   ({topology.source})" if topology.source else what


def matrix(topology: Topology, console: Console) -> None:
    """The links between GPUs, coloured from fabric to across the sockets."""
    if not topology.links:
        return
    labels = [_label(topology, position) for position in range(len(topology.gpus))]
    _square(labels, topology.links, _link_style, console)


def _square(labels: list[str], rows: Iterable[Iterable[str | None]], style: object, console: Console) -> None:
    from rich.text import Text

    width = max(len(label) for label in labels) + 2
    console.print(Text(" " * width + "".join(label.rjust(width) for label in labels), style="bold"))
    for label, row in zip(labels, rows, strict=True):
        line = Text(label.ljust(width), style="bold")
        for cell in row:
            line.append((cell or "?").rjust(width), style=style(cell) if callable(style) else "")
        console.print(line)


def _label(topology: Topology, position: int) -> str:
    gpu = topology.gpus[position]
    if not gpu.parent:
        return f"GPU{gpu.index}"
    return f"GPU{gpu.index}.{[other.uuid for other in topology.gpus if other.parent == gpu.parent].index(gpu.uuid)}"


def _link_style(kind: str | None) -> str:
    if kind in (None, "X"):
        return "dim"
    if links.is_fabric(kind):
        return "bold green"
    return _COLORS.get(links.normal(kind or ""), "magenta")


def legend(topology: Topology, console: Console) -> None:
    """The classes that occur, best first, with their meaning and estimated speed."""
    from rich.text import Text

    pairs = {
        (topology.link(a, b), topology.rate_text(a, b))
        for a in range(len(topology.gpus))
        for b in range(a)
        if topology.link(a, b)
    }
    if not pairs:
        return
    console.print()
    for kind, rate in sorted(pairs, key=lambda pair: links.strength(pair[0]), reverse=True):
        line = Text(f"  {kind or '':<6}", style=_link_style(kind))
        line.append(f" {links.meaning(kind or '')}" + (f", {rate}" if rate else ""), style="not bold")
        console.print(line)


def gpus(topology: Topology, console: Console) -> None:
    """The GPUs, by NUMA node."""
    if topology.links:
        console.print()
    known = [gpu.numa for gpu in topology.gpus]
    for node in sorted(set(known), key=lambda node: (node is None, node or 0)):
        console.print("NUMA node unknown" if node is None else f"NUMA node {node}", style="bold")
        for position, gpu in enumerate(topology.gpus):
            if gpu.numa == node:
                console.print("  " + "  ".join(_about(topology, position)), markup=False)


def _about(topology: Topology, position: int) -> list[str]:
    gpu = topology.gpus[position]
    near = [nic.name for nic in topology.near(position)]
    cpus = (
        "CPUs unknown"
        if gpu.cpus is None
        else f"CPUs {format_list(gpu.cpus)}"
        if gpu.cpus
        else "CPUs hidden by a cpuset"
    )
    use = f"{gpu.processes} processes, {gpu.used / GIB:.1f} GiB in use" if gpu.busy else ""
    parts = [
        f"{_label(topology, position):<7}", gpu.name, f"{gpu.memory / GIB:.0f} GiB" if gpu.memory else "", cpus,
        f"NICs {', '.join(_short(near))}" if near else "", gpu.bus, gpu.uuid, use,
    ]  # fmt: skip
    return [part for part in parts if part]


def _short(names: list[str], most: int = 4) -> list[str]:
    return names if len(names) <= most else [*names[: most - 1], f"and {len(names) - most + 1} more"]


def nodes(topology: Topology, console: Console) -> None:
    """The NUMA nodes, where the machine itself was asked, and the CPUs this process may use."""
    if any(node.memory for node in topology.numa):
        console.print()
        for node in topology.numa:
            cpus = f"CPUs {format_list(node.cpus)}" if node.cpus else "no CPUs"
            console.print(f"NUMA node {node.id}: {cpus}, {node.memory / GIB:.0f} GiB", markup=False)
    if topology.cpus and not topology.gpus:
        console.print(f"CPUs allowed here: {format_list(topology.cpus)} ({len(topology.cpus)})", markup=False)


def nics(topology: Topology, console: Console) -> None:
    """The NICs and the GPUs they are nearest to; ports alike in everything share a line."""
    groups: dict[str, list[str]] = {}
    for nic in topology.nics:
        best = max((links.strength(kind) for kind in nic.links), default=0.0)
        near = [
            f"GPU{gpu.index} ({kind})"
            for gpu, kind in zip(topology.gpus, nic.links, strict=True)
            if links.strength(kind) == best > links.strength("SYS")
        ]
        speed = f"{nic.gbit:g} Gbit/s" if nic.gbit else ""
        node = f"NUMA node {nic.numa}" if nic.numa is not None else ""
        to = f"nearest to {', '.join(near)}" if near else "nearest to no GPU" if topology.gpus else ""
        groups.setdefault("  ".join(part for part in (speed, node, to) if part), []).append(nic.name)
    if groups:
        console.print()
        for text, names in groups.items():
            console.print(f"{', '.join(_short(names))}  {text}", markup=False)


def peer_access(topology: Topology, console: Console) -> None:
    """Whether GPUs may read each other's memory: one line where all is well or all alike, else the matrix."""
    if not topology.p2p or len(topology.gpus) < 2:
        return
    console.print()
    states = {cell for a, row in enumerate(topology.p2p) for b, cell in enumerate(row) if a != b}
    if len(states) == 1:
        state = states.pop() or "?"
        console.print(f"P2P (read): {state} for every pair, {P2P_MEANING.get(state, 'not told')}", markup=False)
        return
    console.print("P2P (read)", style="bold")
    labels = [_label(topology, position) for position in range(len(topology.gpus))]
    _square(labels, topology.p2p, lambda cell: "green" if cell == "OK" else "dim" if cell == "X" else "red", console)


def warned(topology: Topology, console: Console) -> None:
    """The warnings, one a line."""
    found = warnings(topology)
    if found:
        console.print()
    for text in found:
        console.print(f"! {text}", style="yellow", markup=False)
