"""A machine as an SVG picture, read from top to bottom: CPUs, PCIe switches and NICs, GPUs, the fabric between GPUs.

Lines are as wide as their links are fast (by the cube root of GB/s), so that a bridge looks like one beside PCIe.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from mgpu.errors import Refusal
from mgpu.topology import layout as places
from mgpu.topology import links
from mgpu.topology.advice import warnings
from mgpu.topology.cpulist import format_list
from mgpu.topology.layout import Layout, Socket, lay_out
from mgpu.topology.values import Topology

GIB = 1024**3
GPU_HEIGHT = 58
_INK, _QUIET, _LINE = "#1f2933", "#616e7c", "#9aa5b1"
_FABRIC = ("#00695c", "#00897b", "#4db6ac", "#80cbc4")
_CHOSEN = "#d9480f"
_FONT = "font-family='Helvetica, Arial, sans-serif'"


def svg(topology: Topology, chosen: Sequence[int] = ()) -> str:
    """The picture of `topology`; the positions in `chosen` are marked with their ranks."""
    plan = lay_out(topology)
    body = [_title(topology)]
    for socket in plan.sockets:
        body.extend(_socket(topology, plan, socket))
    body.extend(_between_sockets(topology, plan))
    bottom = plan.gpu_top + GPU_HEIGHT
    if topology.gpus:
        fabric, bottom = _fabric(topology, plan)
        body.extend(fabric)
    body.extend(
        _box(port.x, port.y, port.width, places.NIC_HEIGHT, "#fff3d6", "#d9a400", port.label, size=11)
        for port in plan.ports
    )
    body.extend(_gpu(topology, plan, position, chosen) for position in range(len(topology.gpus)))
    notes, height = _notes(topology, bottom + 34, plan.width)
    body.extend(notes)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{plan.width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {plan.width:.0f} {height:.0f}' {_FONT}>\n"
        f"<rect width='100%' height='100%' fill='#ffffff'/>\n" + "\n".join(body) + "\n</svg>\n"
    )


def write_png(text: str, path: Path) -> None:
    """Draw an SVG into a PNG of twice its size; Refusal where cairosvg is not installed."""
    try:
        import cairosvg
    except (ImportError, OSError) as error:  # OSError: the package is there, the cairo library is not
        raise Refusal(
            f"--png needs cairosvg, which cannot be loaded ({str(error).splitlines()[0]})",
            hint="pip install 'mgpu-run[plots]', or write --svg",
        ) from error
    cairosvg.svg2png(bytestring=text.encode(), write_to=str(path), scale=2)


def _title(topology: Topology) -> str:
    names = sorted({gpu.name for gpu in topology.gpus if gpu.name})
    count = len(topology.gpus)
    what = f"{count} x {' / '.join(names)}" if names else f"{count} GPU{'s' * (count != 1)}"
    return _text(places.PAD, 30, what if topology.gpus else "no GPU", size=18, weight="bold") + _text(
        places.PAD, 48, topology.source or topology.trouble, size=11, fill=_QUIET
    )


def _socket(topology: Topology, plan: Layout, socket: Socket) -> list[str]:
    """The frame of a NUMA node, its CPU, its switches, and the lines from the CPU down."""
    bottom = plan.gpu_top + GPU_HEIGHT + 14
    node = next((node for node in topology.numa if node.id == socket.domain), None)
    cpus = node.cpus if node and node.cpus else next((topology.gpus[gpu].cpus for gpu in socket.gpus), None)
    label = f"NUMA node {socket.domain}" if isinstance(socket.domain, int) else "NUMA node unknown"
    lines = [f"CPUs {format_list(cpus)}" if cpus else "CPUs hidden by a cpuset" if cpus == () else "CPUs unknown"]
    if node and node.memory:
        lines.append(f"{node.memory / GIB:.0f} GiB")
    found = [
        f"<rect x='{socket.x:.0f}' y='{places.CPU_TOP - 8}' width='{socket.width:.0f}' "
        f"height='{bottom - places.CPU_TOP + 8:.0f}' rx='10' fill='#f5f7fa' stroke='#e4e7eb'/>"
    ]
    cpu_bottom = places.CPU_TOP + places.CPU_HEIGHT
    for switch in socket.switches:
        joined = len(switch.gpus) > 1 or bool(switch.nics)
        middle = switch.x + switch.width / 2
        down = places.SWITCH_TOP if joined else plan.gpu_top
        found.append(_line(middle, cpu_bottom, middle, down, 3))
        if not joined:
            continue
        found.append(
            _box(
                switch.x,
                places.SWITCH_TOP,
                switch.width,
                places.SWITCH_HEIGHT,
                "#e4e7eb",
                _LINE,
                "PCIe switch",
                size=11,
            )
        )
        for gpu in switch.gpus:
            center = plan.gpu_x[gpu] + places.GPU_WIDTH / 2
            found.append(_line(center, places.SWITCH_TOP + places.SWITCH_HEIGHT, center, plan.gpu_top, 3))
    if socket.nics:
        center = next(port.x for port in plan.ports if port.label == socket.nics[0]) + 20
        found.append(_line(center, cpu_bottom, center, places.SWITCH_TOP + places.SWITCH_HEIGHT + 14, 2))
    width = socket.width - 2 * places.PAD
    found.append(
        _box(
            socket.x + places.PAD,
            places.CPU_TOP,
            width,
            places.CPU_HEIGHT,
            "#d9e2ec",
            "#829ab1",
            label,
            ", ".join(lines),
        )
    )
    return found


def _between_sockets(topology: Topology, plan: Layout) -> list[str]:
    """The link between neighbouring CPUs, which every SYS path crosses."""
    y = places.CPU_TOP + places.CPU_HEIGHT / 2
    found = []
    for left, right in itertools.pairwise(socket for socket in plan.sockets if socket.domain is not None):
        start, end = left.x + left.width - places.PAD, right.x + places.PAD
        found.append(_line(start, y, end, y, 4, "#829ab1"))
        found.append(_text((start + end) / 2, y - 8, "SYS", size=10, fill=_QUIET, anchor="middle"))
    return found


def _gpu(topology: Topology, plan: Layout, position: int, chosen: Sequence[int]) -> str:
    gpu = topology.gpus[position]
    mine = position in chosen
    under = [
        f"rank {list(chosen).index(position)}" if mine else "",
        f"{gpu.memory / GIB:.0f} GiB" if gpu.memory else "",
        "in use" if gpu.busy else "",
    ]
    fill, edge = ("#ffe8dc", _CHOSEN) if mine else ("#e3f6d8", "#3e7b27")
    return _box(
        plan.gpu_x[position], plan.gpu_top, places.GPU_WIDTH, GPU_HEIGHT, fill, edge, f"GPU{gpu.index}",
        " ".join(part for part in under if part), size=15,
    )  # fmt: skip


def _fabric(topology: Topology, plan: Layout) -> tuple[list[str], float]:
    """NVLink below the GPUs: one bar where every pair has the same, else an arc a pair; what PCIe offers where there is none.
    Also the lowest edge of what was drawn."""
    pairs = list(itertools.combinations(range(len(topology.gpus)), 2))
    joined = [(a, b) for a, b in pairs if links.is_fabric(topology.link(a, b))]
    base = plan.gpu_top + GPU_HEIGHT
    kinds = {topology.link(a, b) for a, b in pairs}
    if joined and len(joined) == len(pairs) and len(kinds) == 1 and len(topology.gpus) > 2:
        return _bar(topology, plan, base)
    if joined:
        return _arcs(topology, plan, base, joined)
    order = sorted({links.normal(kind) for kind in kinds if kind}, key=links.strength, reverse=True)
    if not order:
        return [], base + 14
    caption = f"between GPUs: {', '.join(order)}"
    best = [(a, b) for a, b in pairs if links.normal(topology.link(a, b) or "") == order[0]]
    if len(order) == 1 or order[0] in places.ON_SWITCH or len(best) > len(topology.gpus):
        return [_text(places.PAD * 2, base + 32, caption, size=11, fill=_QUIET)], base + 32
    arcs, lowest = _arcs(topology, plan, base, best)
    return [*arcs, _text(places.PAD * 2, lowest + 20, caption, size=11, fill=_QUIET)], lowest + 20


def _bar(topology: Topology, plan: Layout, base: float) -> tuple[list[str], float]:
    kind = topology.link(0, 1) or ""
    rate = topology.bandwidth(0, 1)
    left = min(plan.gpu_x.values())
    right = max(plan.gpu_x.values()) + places.GPU_WIDTH
    found = []
    for x in plan.gpu_x.values():
        center = x + places.GPU_WIDTH / 2
        found.append(_line(center, base, center, base + 44, _wide(rate), _FABRIC[1]))
    label = f"every pair: {kind}, {topology.rate_text(0, 1)}"
    found.append(_box(left, base + 40, right - left, 30, _FABRIC[0], _FABRIC[0], label, size=13, ink="#ffffff"))
    return found, base + 70


def _arcs(topology: Topology, plan: Layout, base: float, joined: list[tuple[int, int]]) -> tuple[list[str], float]:
    strengths = sorted({topology.strength(a, b) for a, b in joined}, reverse=True)
    curves, labels = [], []
    lowest = base
    for a, b in sorted(joined, key=lambda pair: -abs(plan.gpu_x[pair[0]] - plan.gpu_x[pair[1]])):
        start, end = plan.gpu_x[a] + places.GPU_WIDTH / 2, plan.gpu_x[b] + places.GPU_WIDTH / 2
        depth = 30 + abs(end - start) * 0.28
        shade = _FABRIC if links.is_fabric(topology.link(a, b)) else (_QUIET,)
        color = shade[min(strengths.index(topology.strength(a, b)), len(shade) - 1)]
        width = _wide(topology.bandwidth(a, b))
        curves.append(
            f"<path d='M {start:.0f} {base} C {start:.0f} {base + depth:.0f}, {end:.0f} {base + depth:.0f}, {end:.0f} {base}' "
            f"fill='none' stroke='{color}' stroke-width='{width:.1f}' stroke-opacity='0.9'/>"
        )
        y = base + depth * 0.75
        labels.append(_halo((start + end) / 2, y + 4, topology.link(a, b) or "", color))
        lowest = max(lowest, y + 12)
    return [*curves, *labels], lowest


def _notes(topology: Topology, top: float, width: float) -> tuple[list[str], float]:
    """The warnings below the picture, cut to its width."""
    letters = int((width - 2 * places.PAD) / 5.6)
    found = []
    for place, text in enumerate(warnings(topology)[:6]):
        short = text if len(text) <= letters else f"{text[: letters - 1]}…"
        found.append(_text(places.PAD, top + place * 17, f"! {short}", size=11, fill="#9c2c0a"))
    return found, top + len(found) * 17 - (0 if found else 14)


def _wide(rate: float) -> float:
    """The width of a line for GB/s: 25 is 3, 450 is 8 wide."""
    return max(1.5, math.cbrt(rate) * 1.03)


def _line(x1: float, y1: float, x2: float, y2: float, width: float, color: str = _LINE) -> str:
    return (
        f"<line x1='{x1:.0f}' y1='{y1:.0f}' x2='{x2:.0f}' y2='{y2:.0f}' stroke='{color}' stroke-width='{width:.1f}'/>"
    )


def _box(
    x: float, y: float, width: float, height: float, fill: str, edge: str, label: str, under: str = "", *,
    size: int = 14, ink: str = _INK,
) -> str:  # fmt: skip
    shape = (
        f"<rect x='{x:.0f}' y='{y:.0f}' width='{width:.0f}' height='{height:.0f}' rx='6' fill='{fill}' stroke='{edge}' "
        "stroke-width='1.5'/>"
    )
    middle, center = y + height / 2 + size * 0.35, x + width / 2
    if not under:
        return shape + _text(center, middle, label, size=size, anchor="middle", fill=ink)
    letters = int(width / 6)
    short = under if len(under) <= letters else f"{under[: letters - 1]}…"
    return (
        shape
        + _text(center, middle - 8, label, size=size, weight="bold", anchor="middle", fill=ink)
        + _text(center, middle + 10, short, size=11, anchor="middle", fill=_QUIET)
    )


def _text(
    x: float, y: float, text: str, *, size: int, fill: str = _INK, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f"<text x='{x:.0f}' y='{y:.0f}' font-size='{size}' fill='{fill}' text-anchor='{anchor}' "
        f"font-weight='{weight}'>{escape(text)}</text>"
    )


def _halo(x: float, y: float, text: str, color: str) -> str:
    """A word that stays readable over lines."""
    width = len(text) * 8 + 6
    return (
        f"<rect x='{x - width / 2:.0f}' y='{y - 12:.0f}' width='{width}' height='16' rx='4' fill='#ffffff' fill-opacity='0.9'/>"
        + _text(x, y, text, size=12, fill=color, anchor="middle", weight="bold")
    )
