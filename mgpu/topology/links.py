"""What a link class is worth: an order for choosing GPUs, and an estimate in GB/s for people.

Tables and their sources are explained in DESIGN.md beside this file.
"""

from __future__ import annotations

import re

SELF = "X"
PCI_CLASSES = {
    "SYS": "PCIe and the link between NUMA nodes (QPI/UPI, Infinity Fabric)",
    "NODE": "PCIe and the link between host bridges of one NUMA node",
    "PHB": "PCIe through a host bridge (the CPU)",
    "PXB": "several PCIe switches, no host bridge",
    "PIX": "at most one PCIe switch",
    "PSB": "one board, one PCIe switch",
}
"""The classes of `nvidia-smi topo -m`, weakest first."""

OTHER_CLASSES = {
    "SOC": "SYS, in the words of drivers before 2018",
    "PCIE": "PCIe, as rocm-smi says it",
    "XGMI": "AMD Infinity Fabric between GPUs",
    "INTE": "one PCIe bridge on the board (Iluvatar)",
}
BONDED = re.compile(r"([A-Z]{2,3})(\d{1,3})")
"""NV# of NVIDIA; IX#, MX#, MT# and the like of others: # links side by side."""

BONDS = {"NV": "NVLinks", "IX": "IXLinks (Iluvatar)", "MX": "MetaXLinks", "MT": "MTLinks (Moore Threads)"}

_SAME = {"SOC": "SYS", "PCIE": "SYS"}
_STRENGTH = {"SYS": 1.0, "NODE": 2.0, "PHB": 3.0, "PXB": 4.0, "PIX": 5.0, "PSB": 6.0, "INTE": 5.5}
_UNKNOWN = 0.5
_FABRIC = 10.0
"""Any bonded link is worth more than any PCIe path; the widest PCIe class is 6."""

_PER_LINK = (
    (re.compile(r"\bP100\b"), 20.0),
    (re.compile(r"\b(?:V100|GV100|Quadro RTX|TITAN RTX|2080|Titan V)\b", re.IGNORECASE), 25.0),
    (re.compile(r"\b(?:3090(?: Ti)?|A6000|A5500|A5000|A4500|A40)\b"), 14.0625),
    (re.compile(r"\b(?:H100|H200|H800|H20|GH200) ?PCIe\b|\bH100 NVL\b", re.IGNORECASE), 25.0),
    (re.compile(r"\b(?:A100|A800|A30|H100|H800|H20|H200|GH200)\b"), 25.0),
    (re.compile(r"\b(?:B100|B200|B300|GB200|GB300)\b"), 50.0),
)
_LINK_DEFAULT = 25.0
_XGMI = 50.0

_SLOT = (
    (re.compile(r"\b(?:B100|B200|B300|GB\d+|RTX 50\d\d|H100|H200|H800|H20|GH200|L?MI3\d\d\w?)\b"), 63.0),
    (re.compile(r"\b(?:A100|A800|A30|A40|A10|A16|RTX A\d+|L4|L40S?|RTX [34]0\d\d|MI2\d\d\w?)\b"), 31.0),
)
_SLOT_DEFAULT = 16.0
_ACROSS_SOCKETS = 10.0
_THROUGH_CPU = 1.2


def normal(kind: str) -> str:
    """The class under its present name: SOC is SYS.

    >>> normal("SOC"), normal("NV12")
    ('SYS', 'NV12')
    """
    return _SAME.get(kind, kind)


def bond(kind: str | None) -> int:
    """How many links are bonded in a class like NV12; 0 for any other."""
    match = BONDED.fullmatch(kind or "")
    return int(match[2]) if match else 0


def is_fabric(kind: str | None) -> bool:
    """Whether GPUs of this class talk without PCIe."""
    return bond(kind) > 0 or kind == "XGMI"


def bandwidth(kind: str | None, name: str = "", *, per_link: float = 0.0) -> float:
    """Estimated peak of a link in one direction, GB/s; 0 where the class says nothing.

    `name` is the GPU's, as the driver gives it; `per_link` is a measured rate that overrides the table.
    """
    if kind is None or kind == SELF:
        return 0.0
    if count := bond(kind):
        return count * (per_link or _first(_PER_LINK, name, _LINK_DEFAULT))
    if kind == "XGMI":
        return per_link or _XGMI
    slot = _first(_SLOT, name, _SLOT_DEFAULT)
    if normal(kind) in ("PHB", "NODE"):
        return slot / _THROUGH_CPU
    if normal(kind) == "SYS":
        return min(slot, _ACROSS_SOCKETS)
    return slot if normal(kind) in _STRENGTH else 0.0


def rate_text(kind: str | None, name: str = "", *, per_link: float = 0.0) -> str:
    """The bandwidth as people should read it: a figure where the GPU is known, else the range over all kinds of GPU."""
    rate = bandwidth(kind, name, per_link=per_link)
    if not rate or kind is None:
        return ""
    known = (bool(per_link) and bond(kind) > 0) or any(pattern.search(name) for pattern, _ in (*_PER_LINK, *_SLOT))
    if known or kind == "XGMI" or normal(kind) == "SYS":
        return f"about {rate:.0f} GB/s each way"
    rates = [value for _, value in _PER_LINK] if bond(kind) else [_SLOT_DEFAULT, *(value for _, value in _SLOT)]
    share = bond(kind) or (1 / _THROUGH_CPU if normal(kind) in ("PHB", "NODE") else 1)
    return f"{min(rates) * share:.0f} to {max(rates) * share:.0f} GB/s each way, by the kind of GPU"


def strength(kind: str | None, name: str = "", *, refused: bool = False) -> float:
    """The rank of a link when GPUs are chosen: larger is better, no unit, never negative.

    Fabric before PCIe, and within the fabric by bandwidth. A pair that the driver refuses peer access talks through host
    memory, so it ranks below every pair that has it, still in the order of its class.
    """
    if kind is None:
        return 0.0
    if is_fabric(kind):
        value = _FABRIC + bandwidth(kind, name)
    else:
        value = _STRENGTH.get(normal(kind), _UNKNOWN)
    return value / 1000 if refused else value


def meaning(kind: str) -> str:
    """What the class says, for the legend."""
    match = BONDED.fullmatch(kind)
    if match and match[1] in BONDS:
        return f"{int(match[2])} {BONDS[match[1]]} side by side"
    return {**PCI_CLASSES, **OTHER_CLASSES}.get(kind, "a class this version does not know")


def _first(table: tuple[tuple[re.Pattern[str], float], ...], name: str, default: float) -> float:
    return next((value for pattern, value in table if pattern.search(name)), default)
