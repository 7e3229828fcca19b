"""From lines to matrices: which lines belong together, which columns are GPUs, and whether every pair is told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mgpu.errors import TopologyError
from mgpu.topology.rows import Row, read_header, read_row

MOST_GPUS = 256
_LEGEND = re.compile(r"\W*([A-Z]{1,6}#?)\s*=\s*\w")
_LEGEND_TITLE = re.compile(r"\W*(?:NIC )?Legend\b", re.IGNORECASE)
_FOREIGN_LABEL = re.compile(r"\W*(CPU\d*|NVSwitch\d*|Switch\d*)\s+(?:X|SYS|NODE|PHB|PXB|PIX|NV\d)")


@dataclass
class Block:
    """One matrix as it stands in a text: the names over its columns (affinities by cpu, numa, id) and its rows."""

    columns: tuple[str, ...] = ()
    rows: dict[int, Row] = field(default_factory=dict)
    last: bool = False
    legend: frozenset[str] = frozenset()

    @property
    def p2p(self) -> bool:
        return any(row.p2p for row in self.rows.values())

    @property
    def links(self) -> tuple[str, ...]:
        """The names over the link columns."""
        return tuple(name for name in self.columns if name not in ("cpu", "numa", "id"))

    @property
    def affinities(self) -> tuple[str, ...]:
        """The names over the affinity columns."""
        return tuple(name for name in self.columns if name in ("cpu", "numa", "id"))

    @property
    def count(self) -> int:
        """How many GPUs the matrix is about: the most that its rows and its columns name."""
        named = [int(name[3:]) for name in self.links if name.startswith("GPU")]
        return max([*named, *self.rows], default=-1) + 1


def read_legend(lines: list[str]) -> frozenset[str]:
    """The classes that the legend explains, `NV#` and the like as written."""
    return frozenset(found[1] for line in lines if "=" in line and (found := _LEGEND.match(line)))


def read_blocks(lines: list[str]) -> list[Block]:
    """All matrices of a text, in its order. TopologyError for a row or column that nvidia-smi does not print."""
    legend = read_legend(lines)
    blocks: list[Block] = []
    header: tuple[str, ...] = ()
    odd = ""
    current: Block | None = None
    previous: Row | None = None
    for line in lines:
        row = read_row(line, legend) if "GPU" in line else None
        if row is not None:
            if odd:
                raise TopologyError(f"no column of nvidia-smi is called {odd!r}", hint=_HINT)
            if current is None or row.gpu in current.rows or row.p2p != current.p2p:
                current = Block(header, legend=legend)
                blocks.append(current)
                header = ()
            current.rows[row.gpu] = previous = row
            continue
        if current is not None and (foreign := _FOREIGN_LABEL.match(line)):
            raise TopologyError(f"nvidia-smi prints no row called {foreign[1]}", hint=_HINT)
        if current is not None and previous is not None and (longer := _continued(previous, line, current)):
            current.rows[previous.gpu] = previous = longer
            continue
        previous = None
        if _LEGEND_TITLE.match(line):
            current, header, odd = None, (), ""
            continue
        found = read_header(line)
        if found is None:
            odd = "" if line.strip() else odd
            continue
        names, word = found
        if any(name.startswith("GPU") for name in names) and (not word or names[0].startswith(("GPU", "NIC", "mlx"))):
            current, header, odd = None, (() if word else names), word
        elif header and not word:
            header = (*header, *names)
    if blocks:
        blocks[-1].last = not any(_LEGEND_TITLE.match(line) for line in lines[-12:])
    return blocks


_HINT = "give it the output of: nvidia-smi topo -m"


def _continued(row: Row, line: str, block: Block) -> Row | None:
    """The row with the part that a terminal wrapped onto its next line, or None where `line` is no such part."""
    cut_links = len(row.cells) < len(block.links)
    cut_affinities = bool(block.affinities) and not row.tail.strip()
    if row.p2p or not block.links or not line.strip() or not (cut_links or cut_affinities):
        return None
    joined = read_row(f"{row.line}{chr(9) if chr(9) in row.line else ' '}{line.strip(' ')}", block.legend)
    if joined is None or joined.odd or len(joined.cells) > len(block.links):
        return None
    return joined if len(joined.cells) > len(row.cells) or joined.tail.strip() else None


def gpu_columns(block: Block) -> list[int]:
    """The column of each GPU, by index: where the header says, if the X of every row agrees, else where the X stand."""
    count = block.count
    if count > MOST_GPUS:
        raise TopologyError(f"GPU{count - 1}: no machine has {count} GPUs", hint=_HINT)
    crosses = {}
    for gpu, row in block.rows.items():
        places = [column for column, cell in enumerate(row.cells) if cell == "X"]
        if len(places) > 1:
            raise TopologyError(f"row GPU{gpu} has {len(places)} X, but only one GPU is itself", hint=_HINT)
        if places:
            crosses[gpu] = places[0]
    if not crosses:
        raise TopologyError("no row has the X that marks its own column", hint=_HINT)
    named = {int(name[3:]): column for column, name in enumerate(block.links) if name.startswith("GPU")}
    if all(named.get(gpu) == column for gpu, column in crosses.items()) and len(named) == count:
        return [named[gpu] for gpu in range(count)]
    offsets = {column - gpu for gpu, column in crosses.items()}
    if len(offsets) > 1 or min(offsets) < 0:
        where = ", ".join(f"GPU{gpu} in column {column + 1}" for gpu, column in sorted(crosses.items())[:4])
        raise TopologyError(f"the X do not form a diagonal: {where}", hint=_HINT)
    first = offsets.pop()
    return [first + gpu for gpu in range(count)]


def square(block: Block, columns: list[int]) -> tuple[tuple[str, ...], ...]:
    """The matrix between GPUs, a missing cell taken from its mirror image; TopologyError where a pair is told nowhere."""
    count = len(columns)
    for gpu, row in sorted(block.rows.items()):
        _refuse_odd(block, gpu, row, max(columns))
    cells: list[list[str | None]] = [[None] * count for _ in range(count)]
    for gpu, row in block.rows.items():
        for other, column in enumerate(columns):
            if column < len(row.cells):
                cells[gpu][other] = row.cells[column]
    for gpu in range(count):
        if cells[gpu][gpu] not in (None, "X"):
            raise TopologyError(f"row GPU{gpu} says {cells[gpu][gpu]} where its own X belongs", hint=_HINT)
        cells[gpu][gpu] = "X"
    whole = tuple(
        tuple(cells[row][column] or cells[column][row] or "" for column in range(count)) for row in range(count)
    )
    missing = [(row, column) for row in range(count) for column in range(row) if not whole[row][column]]
    if missing:
        lost = [f"GPU{gpu}" for gpu in range(count) if gpu not in block.rows]
        shown = ", ".join(f"GPU{column}-GPU{row}" for row, column in missing[:3]) + (
            ", ..." if len(missing) > 3 else ""
        )
        rows = f"; no row of {', '.join(lost)}" if lost else ""
        raise TopologyError(
            f"incomplete matrix of {count} GPUs: {len(missing)} links are missing ({shown}){rows}",
            hint="the text is cut: give the whole output of nvidia-smi topo -m",
        )
    return whole


def _refuse_odd(block: Block, gpu: int, row: Row, last: int) -> None:
    """A word that is neither class nor affinity ends a row only where the text was cut inside a class."""
    if not row.odd:
        return
    wanted = len(block.links) or last + 1
    cut = block.last and gpu == max(block.rows) and len(row.cells) < wanted and row.tail.split() == [row.odd]
    if cut and any(word.startswith(row.odd) for word in ("NODE", "SYS", "SOC", "PHB", "PXB", "PIX", "NV", "N/A")):
        return
    kind = "link class" if len(row.cells) <= last else "affinity"
    raise TopologyError(f"row GPU{gpu}: {row.odd!r} is no {kind}", hint=_HINT)
