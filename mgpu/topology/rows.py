"""One line of a matrix: its label, its link cells, and the affinities behind them.

What varies between drivers, terminals and the people who paste: tabs, tabs expanded to 8 columns, hand-set blanks; cells
glued by a terminal's wrap (`PXBNODE`); a driver that leaves a cell empty, or puts two tabs before one. Links are read word by
word, since a class is never empty; affinities are read by tab where there are tabs, or where the blanks fall on tab stops,
else by what they look like.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from mgpu.errors import TopologyError
from mgpu.topology.cpulist import LIST, parse_list

LINK_WORDS = (
    "NODE",
    "SYS",
    "SOC",
    "PHB",
    "PXB",
    "PIX",
    "PSB",
    "INTE",
    r"NV\d{1,3}",
    r"IX\d{1,3}",
    r"MX\d{1,3}",
    r"MT\d{1,3}",
)
P2P_WORDS = ("CNS", "GNS", "TNS", "NS", "OK", "DR", "U")
AFFINITIES = {"cpuaffinity": "cpu", "numaaffinity": "numa", "gpunumaid": "id"}
NOTHING = ("", "N/A", "NA", "n/a")

_PREFIX = r"(?:\[\d+,\d+\]<\w+>:|[\w.-]{1,64}:(?=\s))?"
"""What srun -l, mpirun and pdsh put before each line."""
LABEL = re.compile(_PREFIX + r"[^\w|]*GPU(\d{1,3})(?![\d.:_-])")
_WORD = re.compile(r"\S+")
_HEADER_WORD = re.compile(
    r"GPU[ ]+NUMA[ ]+ID|(?:CPU|NUMA)[ ]+Affinity|GPU\d{1,3}|NIC\d{1,3}|mlx\d_\d+|(?!CPU|NVS|GPU)[A-Za-z][A-Za-z]*[\w.-]*\d[\w.-]*"
)
_HEADER_START = re.compile(_PREFIX)


@functools.lru_cache(maxsize=64)
def vocabulary(legend: frozenset[str]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The pattern of one link class, and of a word made of them; `legend` adds the classes that a text's legend defines."""
    extra = [re.escape(word).replace(r"\#", r"\d{1,3}") for word in legend if word != "X"]
    one = "|".join([*sorted(extra, key=len, reverse=True), *LINK_WORDS, "X"])
    return re.compile(one), re.compile(f"(?:{one}){{1,600}}")


@dataclass(frozen=True)
class Row:
    """A line of a matrix: `cells` are the classes read, `tail` what follows the last of them, `line` the whole text from
    the label on."""

    gpu: int
    cells: tuple[str, ...]
    tail: str
    line: str
    p2p: bool

    @property
    def odd(self) -> str:
        """The first word after the links that is no affinity, or nothing."""
        words = self.tail.split()
        return next((word for word in words if word not in NOTHING and not LIST.fullmatch(word)), "")


def read_row(line: str, legend: frozenset[str]) -> Row | None:
    """The row that a line is, or None: a label `GPU<i>` followed by a link class or an answer on peer access."""
    label = LABEL.match(line)
    if label is None:
        return None
    one, word = vocabulary(legend)
    cells: list[str] = []
    end = label.end()
    p2p = False
    for found in _WORD.finditer(line, label.end()):
        text = found[0]
        if text in P2P_WORDS and (p2p or not any(cell != "X" for cell in cells)):
            p2p = True
            cells.append(text)
        elif word.fullmatch(text) and not (p2p and text != "X"):
            cells.extend(one.findall(text))
        else:
            break
        end = found.end()
    if not cells:
        return None
    return Row(int(label[1]), tuple(cells), line[end:], line[line.index("GPU", label.start()) :], p2p)


def read_header(line: str) -> tuple[tuple[str, ...], str] | None:
    """The column names of a line and the first word that is none; None for a line that names no columns."""
    start = _HEADER_START.match(line)
    body = line[start.end() :] if start else line
    words = _HEADER_WORD.findall(body)
    if not words:
        return None
    rest = re.search(r"\w+", _HEADER_WORD.sub(" ", body))
    return tuple(AFFINITIES.get(re.sub(r"\s", "", word).lower(), word) for word in words), rest[0] if rest else ""


@dataclass(frozen=True)
class Affinity:
    """What stands behind a row's links: texts, None where the source has no such cell."""

    cpus: str | None = None
    numa: str | None = None
    memory_node: str | None = None


def read_affinity(row: Row, columns: tuple[str, ...]) -> Affinity:
    """The affinities of a row whose header has the affinity `columns` (of cpu, numa, id; empty where it is lost)."""
    fields = _tabbed(row.tail)
    words = row.tail.split()
    if fields is None and columns and len(words) < len(columns):
        fields = _on_tab_stops(row)
    if fields is not None:
        return _from_fields(fields, columns)
    return _from_words(words, columns, row.gpu)


def _tabbed(tail: str) -> list[str] | None:
    if "\t" not in tail:
        return None
    fields = [field.strip() for field in tail.split("\t")[1:]]
    return None if any(" " in field for field in fields) else fields


def _on_tab_stops(row: Row) -> list[str] | None:
    """The cells after the links, empty ones too, where the line is a tabbed one with its tabs expanded to 8 columns."""
    fields, column, field = [], 0, ""
    for found in re.finditer(r"(\S+)(\s*)", row.line.rstrip()):
        field += found[1]
        column += len(found[1])
        stops = (column + len(found[2])) // 8 - column // 8
        column += len(found[2])
        if not stops:
            field += found[2]
            continue
        fields.append(field)
        fields.extend([""] * (stops - 1))
        field = " " * (column % 8)
    fields.append(field)
    links = [cell.strip() for cell in fields[1 : len(row.cells) + 1]]
    return [cell.strip() for cell in fields[len(row.cells) + 1 :]] if links == list(row.cells) else None


def _from_fields(fields: list[str], columns: tuple[str, ...]) -> Affinity:
    while fields and len(fields) > max(len(columns), 1) and not fields[-1]:
        fields = fields[:-1]
    if columns == ("cpu",):
        return Affinity(cpus=fields[0] if fields else "")
    with_id = "id" in columns or (not columns and len(fields) > 2)
    memory_node = fields.pop() if with_id and len(fields) > 2 else None
    cpus = fields[0] if fields else ("" if columns else None)
    numa = next((field for field in fields[1:] if field), "" if columns else None)
    return Affinity(cpus, numa, memory_node)


def _from_words(words: list[str], columns: tuple[str, ...], gpu: int) -> Affinity:
    if len(words) > 3:
        raise TopologyError(f"row GPU{gpu}: {' '.join(words[3:])[:40]!r} stands behind the affinities")
    if len(words) >= len(columns) or not columns:
        names = columns if len(words) == len(columns) else ("cpu", "numa", "id")
        given = dict(zip(names, words, strict=False))
        return Affinity(given.get("cpu"), given.get("numa"), given.get("id"))
    memory_node = words.pop() if "id" in columns and words and words[-1] in NOTHING else None
    if len(words) == 1 and words[0].isdigit() and "numa" in columns:
        return Affinity("", words[0], memory_node)
    return Affinity(words[0] if words else "", words[1] if len(words) > 1 else "", memory_node)


def cpu_cell(text: str | None, gpu: int) -> tuple[int, ...] | None:
    """CPUs of a cell: None where unknown, empty where a cpuset hides them; TopologyError for anything else."""
    if text is None or text in NOTHING[1:]:
        return None
    try:
        return parse_list(text)
    except ValueError as error:
        raise TopologyError(f"row GPU{gpu}, CPU affinity: {error}") from None


def node_cell(text: str | None, gpu: int) -> tuple[int, ...]:
    """NUMA nodes of a cell, in the order written; empty where unknown. GB200 writes its CPU node first, then nodes that only
    hold memory (`0,3-9,11-17`)."""
    if text is None or text in NOTHING:
        return ()
    try:
        parse_list(text)
    except ValueError as error:
        raise TopologyError(f"row GPU{gpu}, NUMA affinity: {error}") from None
    first = re.match(r"\d+", text)
    assert first
    return (int(first[0]), *(node for node in parse_list(text) if node != int(first[0])))
