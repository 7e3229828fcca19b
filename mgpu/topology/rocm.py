"""The text of `rocm-smi --showtopo` and its parts, read into a `Topology`."""

from __future__ import annotations

import re

from mgpu.errors import TopologyError
from mgpu.topology.values import Gpu, NumaNode, Topology

_TITLE = re.compile(r"\W*(Weight|Hops|Link Type|Link accessibility) between two GPUs|\W*=+ *(Numa Nodes) *=+")
_ROW = re.compile(r"\W*GPU(\d{1,3})\s+(.+)")
_NODE = re.compile(r"\W*GPU\[(\d{1,3})\]\s*:.*Numa (Node|Affinity): *(-?\d{1,4})\s*$")
_MOST_GPUS = 256
_HINT = "give it the output of: rocm-smi --showtopo"


def is_rocm(lines: list[str]) -> bool:
    """Whether a text is from rocm-smi."""
    return any("between two GPUs" in line or "ROCm S" in line or "(Topology) Numa" in line for line in lines)


def parse(lines: list[str]) -> Topology:
    """The machine of a rocm-smi text. The class of a PCIe pair is `PCIE`, of an Infinity Fabric pair `XGMI`; where the
    text has NUMA nodes only, the links are unknown."""
    tables, nodes = _tables(lines)
    kinds = tables.get("Link Type", {})
    named = [*nodes, *(gpu for rows in tables.values() for gpu in rows)]
    widths = [len(cells) for rows in tables.values() for cells in rows.values()]
    count = max([*(gpu + 1 for gpu in named), *widths, 0])
    if count == 0:
        raise TopologyError("this rocm-smi text names no GPU", hint=_HINT)
    if count > _MOST_GPUS:
        raise TopologyError(f"GPU{count - 1}: no machine has {count} GPUs", hint=_HINT)
    links = tuple(_link_row(kinds, gpu, count) for gpu in range(count)) if kinds else ()
    gpus = tuple(Gpu(gpu, "", "", 0, numa=nodes.get(gpu)) for gpu in range(count))
    access = tables.get("Link accessibility", {})
    p2p = tuple(_access_row(access, gpu, count) for gpu in range(count)) if len(access) == count else ()
    return Topology(
        gpus=gpus,
        cpus=(),
        links=links,
        p2p=p2p,
        numa=tuple(NumaNode(node, ()) for node in sorted({node for node in nodes.values() if node is not None})),
        source="rocm-smi --showtopo",
        notes=() if links else ("NUMA nodes only: the links are not known (rocm-smi --showtopo tells them)",),
    )


def _tables(lines: list[str]) -> tuple[dict[str, dict[int, list[str]]], dict[int, int | None]]:
    tables: dict[str, dict[int, list[str]]] = {}
    nodes: dict[int, int | None] = {}
    title = ""
    for line in lines:
        if found := _TITLE.match(line):
            title = found[1] or found[2]
        elif found := _NODE.match(line):
            if int(found[3]) >= 0 and (found[2] == "Node" or nodes.get(int(found[1])) is None):
                nodes[int(found[1])] = int(found[3])
            else:
                nodes.setdefault(int(found[1]), None)
        elif title and (found := _ROW.match(line)) and not found[2].startswith("GPU"):
            tables.setdefault(title, {}).setdefault(int(found[1]), found[2].split())
    return tables, nodes


def _link_row(kinds: dict[int, list[str]], gpu: int, count: int) -> tuple[str, ...]:
    row = []
    for other in range(count):
        if other == gpu:
            row.append("X")
            continue
        cell = _cell(kinds, gpu, other) or _cell(kinds, other, gpu)
        if cell is None:
            raise TopologyError(
                f"incomplete table of {count} GPUs: the link GPU{gpu}-GPU{other} is missing",
                hint="the text is cut: give the whole output of rocm-smi --showtopo",
            )
        if cell not in ("XGMI", "PCIE"):
            raise TopologyError(f"row GPU{gpu}: {cell!r} is no link type", hint=_HINT)
        row.append(cell)
    return tuple(row)


def _access_row(access: dict[int, list[str]], gpu: int, count: int) -> tuple[str | None, ...]:
    cells = [_cell(access, gpu, other) for other in range(count)]
    return tuple(
        "X" if other == gpu else {"True": "OK", "False": "NS"}.get(cell or "") for other, cell in enumerate(cells)
    )


def _cell(rows: dict[int, list[str]], row: int, column: int) -> str | None:
    cells = rows.get(row, [])
    return cells[column] if column < len(cells) else None
