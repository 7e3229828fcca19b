"""The text of `nvidia-smi topo -m`, `-mp` and `-p2p`, alone or inside a longer report, read into a `Topology`."""

from __future__ import annotations

import re
from dataclasses import replace

from mgpu.errors import TopologyError
from mgpu.topology import links, rocm
from mgpu.topology.matrix import Block, gpu_columns, read_blocks, read_legend, square
from mgpu.topology.rows import cpu_cell, node_cell, read_affinity
from mgpu.topology.values import Gpu, Nic, NumaNode, Topology

_ESCAPES = re.compile(r"(?:\x1b|\^\[|\\033|\\e|\\x1b)?\[\d{0,3}(?:;\d{1,3})*m|\x1b\[[\d;]{0,20}[A-Za-z]")
_BLANKS = str.maketrans(
    {"\u00a0": " ", "\u2007": " ", "\u202f": " ", "\u2003": " ", "\u200b": "", "\ufeff": "", "\x00": ""}
)
_NIC_NAME = re.compile(r"\W*NIC(\d{1,3}):\s*([\w.-]+)\s*$")
_NAME = re.compile(r"\W*GPU (\d{1,3}): (.{1,80}?) \(UUID: ([\w-]+)\)")
_CSV_NAME = re.compile(r"\s*(\d{1,3}), ([^,]{1,80}), (\d{1,9}) MiB")
_RATE = re.compile(r"\s+Link \d+: (\d{1,3}(?:\.\d+)?) GB/s")
_PCI_ONLY = re.compile(r"topo\s+(?:-mp|--matrix_pci)\b")
MIB = 1024 * 1024


def clean(text: str) -> list[str]:
    """The lines without colour codes (whole, or what a copy left of them) and with plain blanks."""
    return _ESCAPES.sub("", text.translate(_BLANKS)).splitlines()


def parse(text: str) -> Topology:
    """Read a machine from a text; TopologyError says why it is none.

    The first whole matrix counts, a later one of another host does not; a `-p2p` matrix of as many GPUs is joined to it.
    Names, UUIDs, memory and link rates are taken from `nvidia-smi -L`, a query or `nvlink -s` in the same text.
    """
    lines = clean(text)
    if rocm.is_rocm(lines):
        return rocm.parse(lines)
    blocks = read_blocks(lines)
    matrices = [block for block in blocks if not block.p2p]
    answers = [block for block in blocks if block.p2p]
    if not blocks:
        raise TopologyError(*_no_matrix(lines))
    block, matrix, notes = _first_whole(matrices or answers)
    columns = gpu_columns(block)
    if block.p2p:
        topology = Topology(_gpus(block, columns, lines), (), p2p=matrix, source="nvidia-smi topo -p2p")
        notes = [*notes, "a matrix of peer access only: the links are not known"]
    else:
        topology = _machine(block, columns, matrix, lines)
        notes = [*notes, *_about(topology, lines)]
        topology = _with_answers(topology, answers)
    return _noted(topology, notes)


def _first_whole(blocks: list[Block]) -> tuple[Block, tuple[tuple[str, ...], ...], list[str]]:
    fault: TopologyError | None = None
    for place, block in enumerate(blocks):
        try:
            matrix = square(block, gpu_columns(block))
        except TopologyError as error:
            fault = fault or error
            continue
        notes = []
        if place:
            notes.append(f"matrix {place + 1} of the text is read: those before it are not whole")
        elif len(blocks) > 1:
            notes.append(f"the first of {len(blocks)} matrices in the text is read")
        return block, matrix, notes
    assert fault
    raise fault


def _machine(block: Block, columns: list[int], matrix: tuple[tuple[str, ...], ...], lines: list[str]) -> Topology:
    gpus = _gpus(block, columns, lines)
    nodes: dict[int, tuple[int, ...]] = {}
    for gpu in gpus:
        if gpu.numa is not None:
            nodes[gpu.numa] = tuple(sorted({*nodes.get(gpu.numa, ()), *(gpu.cpus or ())}))
    memory_only = {gpu.memory_node for gpu in gpus if gpu.memory_node is not None} - set(nodes)
    rates = {float(found[1]) for line in lines if (found := _RATE.match(line))}
    return Topology(
        gpus=gpus,
        cpus=tuple(sorted({cpu for gpu in gpus for cpu in gpu.cpus or ()})),
        links=matrix,
        nics=_nics(block, columns, lines),
        numa=tuple(NumaNode(node, nodes.get(node, ())) for node in sorted({*nodes, *memory_only})),
        per_link=rates.pop() if len(rates) == 1 else 0.0,
        source="nvidia-smi topo -m",
    )


def _gpus(block: Block, columns: list[int], lines: list[str]) -> tuple[Gpu, ...]:
    names = _names(lines)
    width = max(len(block.links), max(columns) + 1)
    gpus = []
    for index in range(len(columns)):
        uuid, name, memory = names.get(index, ("", "", 0))
        row = block.rows.get(index)
        if row is None or block.p2p or row.odd or (block.links and len(row.cells) < width):
            gpus.append(Gpu(index, uuid, name, memory))
            continue
        affinity = read_affinity(row, block.affinities)
        nodes = node_cell(affinity.numa, index)
        memory_nodes = node_cell(affinity.memory_node, index)
        gpus.append(
            Gpu(
                index,
                uuid,
                name,
                memory,
                numa=nodes[0] if nodes else None,
                cpus=cpu_cell(affinity.cpus, index),
                memory_node=memory_nodes[0] if memory_nodes else None,
            )
        )
    return tuple(gpus)


def _names(lines: list[str]) -> dict[int, tuple[str, str, int]]:
    """UUID, name and memory by index, from `nvidia-smi -L`, `nvlink -s` or a query; the first to name a GPU counts."""
    found: dict[int, tuple[str, str, int]] = {}
    for line in lines:
        if match := _NAME.match(line):
            known = found.get(int(match[1]), ("", "", 0))
            uuid = "" if re.fullmatch(r"GPU-[0-]+", match[3]) else match[3]
            found[int(match[1])] = (known[0] or uuid, known[1] or match[2], known[2])
        elif match := _CSV_NAME.match(line):
            known = found.get(int(match[1]), ("", "", 0))
            found[int(match[1])] = (known[0], known[1] or match[2].strip(), known[2] or int(match[3]) * MIB)
    return found


def _nics(block: Block, columns: list[int], lines: list[str]) -> tuple[Nic, ...]:
    widest = max(len(row.cells) for row in block.rows.values())
    legend = {f"NIC{found[1]}": found[2] for line in lines if (found := _NIC_NAME.match(line))}
    nics: list[Nic] = []
    for column in range(widest):
        if column in columns:
            continue
        name = block.links[column] if column < len(block.links) == widest else f"NIC{len(nics)}"
        rows = (block.rows.get(gpu) for gpu in range(len(columns)))
        paths = tuple(row.cells[column] if row and column < len(row.cells) else None for row in rows)
        nics.append(Nic(legend.get(name, name), paths))
    return tuple(nics)


def _about(topology: Topology, lines: list[str]) -> list[str]:
    """What the text shows and what it leaves out."""
    notes = []
    legend = read_legend(lines)
    fabric = any(links.bond(kind) for row in topology.links for kind in row)
    short_legend = {"SYS", "PIX"} <= legend and not any("#" in word for word in legend)
    if not fabric and (short_legend or any(_PCI_ONLY.search(line) for line in lines)):
        notes.append("PCI-only matrix: it does not show NVLink (nvidia-smi topo -m would)")
    known = {*links.PCI_CLASSES, *links.OTHER_CLASSES, "X"}
    strange = sorted({kind for row in topology.links for kind in row if kind} - known)
    strange = [kind for kind in strange if not (links.bond(kind) and kind[:2] in links.BONDS)]
    if strange:
        notes.append(f"unknown link class {', '.join(strange)}: taken to be slower than any other")
    count = len(topology.gpus)
    uneven = [(a, b) for a in range(count) for b in range(a) if topology.links[a][b] != topology.links[b][a]]
    if uneven:
        first, second = uneven[0]
        notes.append(
            f"GPU{second}-GPU{first} is {topology.links[second][first]} one way and {topology.links[first][second]} the "
            "other: the weaker counts"
        )
    return notes


def _with_answers(topology: Topology, answers: list[Block]) -> Topology:
    for block in answers:
        if block.count == len(topology.gpus):
            return replace(topology, p2p=square(block, gpu_columns(block)))
    return topology


def _noted(topology: Topology, notes: list[str]) -> Topology:
    return replace(topology, notes=tuple(notes))


def _no_matrix(lines: list[str]) -> tuple[str]:
    """What a text without a matrix is, as far as it can be told."""
    told = [line.strip() for line in lines if line.strip()]
    whole = "\n".join(told)
    if not told:
        return ("the text is empty: no GPU matrix",)
    for words, what in _OTHER_OUTPUTS:
        if re.search(words, whole):
            return (f"no GPU matrix: this is {what}",)
    if len(told) <= 4:
        return (f"no GPU matrix; nvidia-smi said: {' / '.join(told)[:300]}",)
    return (f"no GPU matrix in these {len(told)} lines",)


_OTHER_OUTPUTS = (
    (r"GPU \d+: .*UUID[\s\S]*Link \d+:", "nvidia-smi nvlink -s"),
    (r"(?m)^[|+].*[|+]$", "a table with drawn borders, which nvidia-smi topo does not print"),
    (r"have an affinity with CPU", "nvidia-smi topo -c"),
    (r"\d+ MiB,|, \d+ MiB|memory\.total", "a query of nvidia-smi"),
    (r"GPU \d+: .*UUID", "nvidia-smi -L"),
)
