"""Well-known machines by name, for planning without them. The figures' sources are listed in DESIGN.md beside this file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mgpu.errors import UnknownName
from mgpu.topology.values import Gpu, Nic, NumaNode, Topology

GIB = 1024**3


@dataclass(frozen=True)
class Preset:
    """A machine that can be bought or rented. `memory` is GiB a GPU, `nics` are (name, count, Gbit/s each)."""

    gpu: str
    count: int
    memory: int
    links: Callable[[int, int], str]
    nodes: tuple[int, ...]
    cpus: int
    nics: tuple[str, int, float]
    source: str

    def topology(self, name: str) -> Topology:
        """The machine as a value; CPUs are numbered as Linux does on such a machine: node by node, then second threads."""
        count = self.count
        matrix = tuple(
            tuple("X" if row == column else self.links(row, column) for column in range(count)) for row in range(count)
        )
        ids = sorted(set(self.nodes))
        half = self.cpus // (2 * len(ids))
        node_cpus = {
            node: (
                *range(place * half, (place + 1) * half),
                *range((len(ids) + place) * half, (len(ids) + place + 1) * half),
            )
            for place, node in enumerate(ids)
        }
        return Topology(
            gpus=tuple(
                Gpu(index, "", self.gpu, self.memory * GIB, numa=node, cpus=node_cpus[node])
                for index, node in enumerate(self.nodes)
            ),
            cpus=tuple(range(self.cpus)),
            links=matrix,
            nics=self._nics(),
            numa=tuple(NumaNode(node, node_cpus[node]) for node in ids),
            cores=tuple((core, core + self.cpus // 2) for core in range(self.cpus // 2)),
            source=f"preset {name}: {self.source}",
        )

    def _nics(self) -> tuple[Nic, ...]:
        """NICs are spread over the GPUs: NIC k is beside GPU k * GPUs / NICs, which is how these machines are built."""
        kind, number, gbit = self.nics
        found = []
        for place in range(number):
            home = range(
                place * self.count // number, max((place + 1) * self.count // number, place * self.count // number + 1)
            )
            node = self.nodes[home[0]]
            paths: list[str | None] = [
                "PXB" if gpu in home else "NODE" if self.nodes[gpu] == node else "SYS" for gpu in range(self.count)
            ]
            found.append(Nic(f"{kind}{place}", tuple(paths), node, gbit))
        return tuple(found)


def _all(kind: str) -> Callable[[int, int], str]:
    return lambda row, column: kind


CUBE_MESH = {
    **dict.fromkeys([(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)], "NV2"),
    **dict.fromkeys([(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)], "NV1"),
}
"""The hybrid cube mesh of eight V100 (DGX-1V): six NVLinks a GPU."""


def _cube_mesh(row: int, column: int) -> str:
    return CUBE_MESH.get((min(row, column), max(row, column)), "SYS")


def _bridged(bridge: str, within: str) -> Callable[[int, int], str]:
    """Pairs 0-1, 2-3, ... joined by a bridge, two pairs a socket."""
    return lambda row, column: bridge if row // 2 == column // 2 else within if row // 4 == column // 4 else "SYS"


_HALVES = (0, 0, 0, 0, 1, 1, 1, 1)

PRESETS: dict[str, Preset] = {
    "dgx-1v": Preset("Tesla V100-SXM2-32GB", 8, 32, _cube_mesh, _HALVES, 80, ("mlx5_", 4, 100), "DGX-1 user guide"),
    "dgx-2": Preset(
        "Tesla V100-SXM3-32GB", 16, 32, _all("NV6"), (0,) * 8 + (1,) * 8, 96, ("mlx5_", 8, 100), "DGX-2 user guide"
    ),
    "dgx-a100": Preset(
        "NVIDIA A100-SXM4-80GB", 8, 80, _all("NV12"), (3, 3, 1, 1, 7, 7, 5, 5), 256, ("mlx5_", 8, 200), "DGX A100 user guide"
    ),
    "dgx-h100": Preset(
        "NVIDIA H100 80GB HBM3", 8, 80, _all("NV18"), _HALVES, 224, ("mlx5_", 8, 400), "DGX H100 user guide"
    ),
    "dgx-h200": Preset("NVIDIA H200", 8, 141, _all("NV18"), _HALVES, 224, ("mlx5_", 8, 400), "DGX H200 user guide"),
    "dgx-b200": Preset("NVIDIA B200", 8, 180, _all("NV18"), _HALVES, 224, ("mlx5_", 8, 400), "DGX B200 user guide"),
    "gb200-nvl4": Preset(
        "NVIDIA GB200", 4, 186, _all("NV18"), (0, 0, 1, 1), 144, ("mlx5_", 4, 400), "GB200 NVL72 datasheet, one tray"
    ),
    "aws:p3.16xlarge": Preset(
        "Tesla V100-SXM2-16GB", 8, 16, _cube_mesh, _HALVES, 64, ("ena", 1, 25), "AWS EC2 P3 instances"
    ),
    "aws:p4d.24xlarge": Preset(
        "NVIDIA A100-SXM4-40GB", 8, 40, _all("NV12"), _HALVES, 96, ("efa", 4, 100), "AWS EC2 P4 instances"
    ),
    "aws:p4de.24xlarge": Preset(
        "NVIDIA A100-SXM4-80GB", 8, 80, _all("NV12"), _HALVES, 96, ("efa", 4, 100), "AWS EC2 P4 instances"
    ),
    "aws:p5.48xlarge": Preset(
        "NVIDIA H100 80GB HBM3", 8, 80, _all("NV18"), _HALVES, 192, ("efa", 32, 100), "AWS EC2 P5 instances"
    ),
    "gcp:a2-highgpu-8g": Preset(
        "NVIDIA A100-SXM4-40GB", 8, 40, _all("NV12"), _HALVES, 96, ("gvnic", 1, 100), "Google Cloud, A2 machine series"
    ),
    "gcp:a2-megagpu-16g": Preset(
        "NVIDIA A100-SXM4-40GB", 16, 40, _all("NV12"), (0,) * 8 + (1,) * 8, 96, ("gvnic", 1, 100),
        "Google Cloud, A2 machine series",
    ),
    "gcp:a3-highgpu-8g": Preset(
        "NVIDIA H100 80GB HBM3", 8, 80, _all("NV18"), _HALVES, 208, ("gvnic", 5, 200), "Google Cloud, A3 machine series"
    ),
    "gcp:a3-ultragpu-8g": Preset(
        "NVIDIA H200", 8, 141, _all("NV18"), _HALVES, 224, ("mlx5_", 8, 400), "Google Cloud, A3 machine series"
    ),
    "azure:nd40rs_v2": Preset(
        "Tesla V100-SXM2-32GB", 8, 32, _cube_mesh, _HALVES, 40, ("mlx5_", 1, 100), "Microsoft Azure, NDv2 series"
    ),
    "azure:nd96asr_v4": Preset(
        "NVIDIA A100-SXM4-40GB", 8, 40, _all("NV12"), (1, 1, 0, 0, 3, 3, 2, 2), 96, ("mlx5_ib", 8, 200),
        "Microsoft Azure, ND A100 v4 series",
    ),
    "azure:nd96amsr_a100_v4": Preset(
        "NVIDIA A100-SXM4-80GB", 8, 80, _all("NV12"), (1, 1, 0, 0, 3, 3, 2, 2), 96, ("mlx5_ib", 8, 200),
        "Microsoft Azure, NDm A100 v4 series",
    ),
    "azure:nd96isr_h100_v5": Preset(
        "NVIDIA H100 80GB HBM3", 8, 80, _all("NV18"), _HALVES, 96, ("mlx5_ib", 8, 400), "Microsoft Azure, ND H100 v5 series"
    ),
    "2x3090-nvlink": Preset(
        "NVIDIA GeForce RTX 3090", 2, 24, _all("NV4"), (0, 0), 32, ("eth", 1, 10), "GeForce RTX 3090 specifications"
    ),
    "2x4090": Preset(
        "NVIDIA GeForce RTX 4090", 2, 24, _all("PHB"), (0, 0), 32, ("eth", 1, 10), "GeForce RTX 4090 specifications"
    ),
    "4xa100-pcie-bridged": Preset(
        "NVIDIA A100 80GB PCIe", 4, 80, _bridged("NV12", "NODE"), (0, 0, 1, 1), 128, ("mlx5_", 2, 100),
        "A100 PCIe product brief",
    ),
}  # fmt: skip

_BOARDS = {
    "v100": ("Tesla V100-SXM2-32GB", 32, "NV6"),
    "a100": ("NVIDIA A100-SXM4-80GB", 80, "NV12"),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 40, "NV12"),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", 80, "NV12"),
    "h100": ("NVIDIA H100 80GB HBM3", 80, "NV18"),
    "h200": ("NVIDIA H200", 141, "NV18"),
    "b200": ("NVIDIA B200", 180, "NV18"),
    "3090": ("NVIDIA GeForce RTX 3090", 24, "PHB"),
    "4090": ("NVIDIA GeForce RTX 4090", 24, "PHB"),
    "5090": ("NVIDIA GeForce RTX 5090", 32, "PHB"),
    "a6000": ("NVIDIA RTX A6000", 48, "PHB"),
    "l4": ("NVIDIA L4", 24, "PHB"),
    "l40s": ("NVIDIA L40S", 48, "PHB"),
    "t4": ("Tesla T4", 16, "PHB"),
}
_COUNTED = re.compile(r"(\d{1,2})x(?:rtx)?([a-z0-9-]+)")
_COUNTED_CPUS = 16


def preset(name: str) -> Topology:
    """The machine of that name; `8xH100` means so many GPUs of one kind on one switch, or on PCIe. UnknownName for none."""
    key = name.strip().lower()
    if key in PRESETS:
        return PRESETS[key].topology(key)
    match = _COUNTED.fullmatch(key)
    if match and match[2] in _BOARDS and 1 <= int(match[1]) <= 16:
        gpu, memory, kind = _BOARDS[match[2]]
        count = int(match[1])
        nodes = tuple(place * 2 // count if count >= 8 else 0 for place in range(count))
        source = f"{gpu}: vendor specifications; CPUs and network unknown, {_COUNTED_CPUS} CPUs a GPU are assumed"
        return Preset(
            gpu,
            count,
            memory,
            _cube_mesh if kind == "NV6" and count <= 8 else _all(kind),
            nodes,
            _COUNTED_CPUS * count,
            ("nic", 0, 0),
            source,
        ).topology(key)
    raise UnknownName("machine", name, [*PRESETS, "8xH100"])


def names() -> list[str]:
    """All presets."""
    return list(PRESETS)
