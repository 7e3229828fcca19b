"""What Linux tells without a driver: NUMA nodes, cores, where a PCI device sits, NICs (man 5 sysfs; Documentation/ABI)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from mgpu.topology.cpulist import parse_list
from mgpu.topology.values import Nic, NumaNode

SYS = Path("/sys")
_BUS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
KIB = 1024


def read(path: Path) -> str:
    """The file's text without its line end; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def read_numbers(path: Path) -> tuple[int, ...]:
    """The numbers of a list file; none where it cannot be read."""
    try:
        return parse_list(read(path))
    except ValueError:
        return ()


def numa_nodes(root: Path = SYS) -> tuple[NumaNode, ...]:
    """All NUMA nodes, also those that only hold memory."""
    nodes = []
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        total = re.search(r"MemTotal:\s*(\d+) kB", read(folder / "meminfo"))
        nodes.append(
            NumaNode(int(folder.name[4:]), read_numbers(folder / "cpulist"), int(total[1]) * KIB if total else 0)
        )
    return tuple(sorted(nodes, key=lambda node: node.id))


def cores(root: Path = SYS) -> tuple[tuple[int, ...], ...]:
    """The CPUs of each physical core."""
    found = set()
    for cpu in read_numbers(root / "devices/system/cpu/online"):
        siblings = read_numbers(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.add(siblings or (cpu,))
    return tuple(sorted(found))


def pci_name(bus: str) -> str:
    """A PCI address as sysfs writes it: NVML's `00000000:17:00.0` is `0000:17:00.0`; empty for anything else."""
    match = _BUS.fullmatch(bus.strip())
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower() if match else ""


def pci_numa(bus: str, root: Path = SYS) -> int | None:
    """The NUMA node of a PCI device; None where the firmware does not tell."""
    text = read(root / "bus/pci/devices" / (pci_name(bus) or "-") / "numa_node")
    return int(text) if text.isdigit() else None


def pci_cpus(bus: str, root: Path = SYS) -> tuple[int, ...] | None:
    """The CPUs near a PCI device, also those outside the cpuset; None where unknown."""
    return read_numbers(root / "bus/pci/devices" / (pci_name(bus) or "-") / "local_cpulist") or None


def path_class(first: Sequence[str], second: Sequence[str], same_node: bool) -> str:
    """The class of the path between two devices, from their folders below /sys/devices, root complex first.

    Two ports of one switch have its upstream port in common and one downstream port each (nvidia-smi's PIX); with more
    between them it is PXB; with only the root complex in common PHB; else NODE or SYS.
    """
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    if common == 0:
        return "NODE" if same_node else "SYS"
    if common == 1:
        return "PHB"
    return "PIX" if max(len(first), len(second)) - common <= 2 else "PXB"


def pci_path(link: Path) -> tuple[str, ...]:
    """The folders of a device from its root complex on: ('pci0000:16', '0000:16:01.0', '0000:17:00.0')."""
    try:
        parts = link.resolve(strict=True).parts
    except OSError:
        return ()
    start = next(
        (place for place, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", part)), None
    )
    return parts[start:] if start is not None else ()


def nics(buses: Sequence[str], numa: Sequence[int | None], root: Path = SYS) -> tuple[Nic, ...]:
    """The RDMA devices, or the Ethernet ports where there are none, each with its path to every GPU in `buses`."""
    devices = sorted((root / "class/infiniband").glob("*")) or [
        port for port in sorted((root / "class/net").glob("*")) if (port / "device").exists()
    ]
    gpus = [pci_path(root / "bus/pci/devices" / (pci_name(bus) or "-")) for bus in buses]
    found = []
    for device in devices:
        path = pci_path(device / "device")
        node_text = read(device / "device/numa_node")
        node = int(node_text) if node_text.isdigit() else None
        classes = tuple(
            path_class(path, gpu, node is not None and node == near) if path and gpu else None
            for gpu, near in zip(gpus, numa, strict=True)
        )
        found.append(Nic(device.name, classes, node, _gbit(device)))
    return tuple(found)


def _gbit(device: Path) -> float:
    rate = re.match(r"([\d.]+) Gb/sec", read(device / "ports/1/rate"))
    if rate:
        return float(rate[1])
    megabits = read(device / "speed")
    return int(megabits) / 1000 if megabits.isdigit() else 0.0
