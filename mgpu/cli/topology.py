"""`mgpu topo`: parse, call, render."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from mgpu.topology import Topology
    from mgpu.topology.placement import Placement

GIB = 1024**3


def register(app: typer.Typer) -> None:
    """Add the command of this file to `app`."""
    app.command(
        epilog="Example:  mgpu topo --pick 4  ·  nvidia-smi topo -m | mgpu topo --file -  ·  mgpu topo --on dgx-h100 --svg m.svg"
    )(topo)


def topo(
    file: Annotated[
        str | None, typer.Option(help="Read the text of nvidia-smi topo or rocm-smi from a file, - for standard input.")
    ] = None,
    on: Annotated[
        str | None, typer.Option(metavar="NAME", help="A known machine in place of this one: dgx-h100, 8xH100, list.")
    ] = None,
    pick: Annotated[int | None, typer.Option(min=1, help="Choose the best so many GPUs.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Draw the machine into this SVG file.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw the machine into this PNG file (needs mgpu-run[plots]).")
    ] = None,
) -> None:
    """Show this machine's GPUs, links, NUMA nodes and NICs, and choose GPUs that talk well."""
    if on == "list":
        from mgpu.topology.presets import names

        print("\n".join(names()))
        return
    topology = _read(file, on)
    chosen = None
    if pick is not None:
        from mgpu.topology.placement import pick as choose

        chosen = choose(topology, pick)
    _draw(topology, chosen, svg, png)
    if json_:
        print(json.dumps(_to_json(topology, chosen), indent=2))
        return
    if chosen is None:
        _show(topology, _console())
    else:
        _show_choice(topology, chosen)


def _read(file: str | None, on: str | None) -> Topology:
    from mgpu.errors import Refusal, TopologyError
    from mgpu.topology import Topology

    if file is not None and on is not None:
        raise Refusal("--file and --on both name a machine", hint="give one of them")
    if on is not None:
        from mgpu.topology.presets import preset

        return preset(on)
    if file is None:
        return Topology.detect()
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise TopologyError(f"{file} cannot be read: {error.strerror}") from error
    return Topology.parse(_decoded(data))


def _decoded(data: bytes) -> str:
    """Text in UTF-8, or in UTF-16 as PowerShell's `>` writes it."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8", errors="replace")


def _draw(topology: Topology, chosen: Placement | None, svg: Path | None, png: Path | None) -> None:
    if svg is None and png is None:
        return
    from mgpu.errors import Refusal
    from mgpu.topology import drawing

    text = drawing.svg(topology, chosen.positions if chosen else ())
    try:
        if svg is not None:
            svg.write_text(text)
        if png is not None:
            drawing.write_png(text, png)
    except OSError as error:
        raise Refusal(f"{error.filename} cannot be written: {error.strerror}") from error


def _to_json(topology: Topology, chosen: Placement | None) -> dict[str, Any]:
    from mgpu.topology.advice import warnings

    count = range(len(topology.gpus))
    value: dict[str, Any] = {
        "source": topology.source,
        "gpus": [_gpu_json(topology, position) for position in count],
        "links": [list(row) for row in topology.links],
        "bandwidth": [[round(topology.bandwidth(a, b), 1) if a != b else None for b in count] for a in count],
        "p2p": [list(row) for row in topology.p2p],
        "nics": [
            {"name": nic.name, "numa": nic.numa, "gbit": nic.gbit or None, "links": list(nic.links)}
            for nic in topology.nics
        ],
        "numa": [{"node": node.id, "cpus": list(node.cpus), "memory": node.memory or None} for node in topology.numa],
        "cpus": list(topology.cpus),
        "warnings": warnings(topology),
        "message": _trouble(topology) if not topology.gpus else "",
    }
    if chosen is not None:
        value["pick"] = _pick_json(topology, chosen)
    return value


def _gpu_json(topology: Topology, position: int) -> dict[str, Any]:
    from mgpu.topology.cpulist import format_list

    gpu = topology.gpus[position]
    return {
        "index": gpu.index,
        "uuid": gpu.uuid or None,
        "name": gpu.name or None,
        "bus": gpu.bus or None,
        "memory": gpu.memory or None,
        "used": gpu.used,
        "processes": gpu.processes,
        "numa": gpu.numa,
        "cpus": None if gpu.cpus is None else list(gpu.cpus),
        "cpu_list": None if gpu.cpus is None else format_list(gpu.cpus),
        "memory_node": gpu.memory_node,
        "mig_of": gpu.parent or None,
        "nics": [nic.name for nic in topology.near(position)],
    }


def _pick_json(topology: Topology, chosen: Placement) -> dict[str, Any]:
    from mgpu.topology.binding import bind

    return {
        "gpus": list(chosen.gpus),
        "ring": list(chosen.ring),
        "weakest": chosen.weakest,
        "bandwidth": round(chosen.bandwidth, 1) or None,
        "proven": chosen.proven,
        "bound": chosen.bound,
        "cpus": [list(cpus) for cpus in bind(topology, chosen.positions)],
        "cuda_visible_devices": ",".join(chosen.devices),
        "reason": chosen.reason,
    }


def _console(*, stderr: bool = False) -> Console:
    """Tables keep their columns where there is no terminal to tell a width."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def _trouble(topology: Topology) -> str:
    return f"no GPU: {topology.trouble}" if topology.trouble else "no GPU"


def _show(topology: Topology, console: Console) -> None:
    """The whole report on stdout."""
    from mgpu.cli import topology_report

    if topology.gpus:
        console.print(topology_report.heading(topology), markup=False, style="bold")
        console.print()
        topology_report.matrix(topology, console)
        topology_report.legend(topology, console)
        topology_report.gpus(topology, console)
    else:
        console.print(_trouble(topology), markup=False)
    topology_report.nodes(topology, console)
    topology_report.nics(topology, console)
    topology_report.peer_access(topology, console)
    topology_report.warned(topology, console)


def _show_choice(topology: Topology, chosen: Placement) -> None:
    """The reason, ring and CPUs for people on stderr; the setting for scripts on stdout."""
    from mgpu.topology.binding import bind
    from mgpu.topology.cpulist import format_list

    people = _console(stderr=True)
    ring = "-".join(map(str, chosen.ring))
    people.print(f"GPUs {', '.join(map(str, chosen.gpus))}", style="bold", markup=False)
    people.print(f"  ring   {ring}", markup=False)
    people.print(f"  why    {chosen.reason}", markup=False)
    if not chosen.proven:
        people.print(f"  bound  no choice has a weakest link above {chosen.bound}", markup=False)
    for rank, cpus in enumerate(bind(topology, chosen.positions)):
        where = f"CPUs {format_list(cpus)}" if cpus else "not bound: its near CPUs are unknown or not allowed"
        people.print(f"  rank {rank}  GPU{chosen.ring[rank]}  {where}", markup=False)
    order = "" if all(topology.gpus[place].uuid for place in chosen.positions) else " CUDA_DEVICE_ORDER=PCI_BUS_ID"
    print(f"CUDA_VISIBLE_DEVICES={','.join(chosen.devices)}{order}")
