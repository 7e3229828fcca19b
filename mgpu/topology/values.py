"""What a machine has, as one value: GPUs, the links between them, NUMA nodes, NICs. No torch, no driver."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

from mgpu.topology import links

Matrix = tuple[tuple[str | None, ...], ...]
"""Square, one row and column a GPU; None where nothing is known."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of one.

    `index` counts in the order of the PCI bus, as nvidia-smi does; `memory` and `used` are in bytes. `numa` is the node of
    its CPUs, None where unknown; `cpus` are the CPUs near it: None where unknown, empty where a cpuset hides them. `uuid`
    and `name` are empty where the source does not tell. `parent` is the UUID of the whole GPU that a MIG instance is on.
    """

    index: int
    uuid: str
    name: str
    memory: int
    bus: str = ""
    numa: int | None = None
    cpus: tuple[int, ...] | None = None
    memory_node: int | None = None
    used: int = 0
    processes: int = 0
    parent: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """How CUDA_VISIBLE_DEVICES names it: the UUID, or the index where there is none."""
        return self.uuid or str(self.index)

    @property
    def busy(self) -> bool:
        """Somebody is using it: it has processes, or a tenth of its memory is taken."""
        return self.processes > 0 or self.used * 10 > self.memory > 0


@dataclass(frozen=True)
class Nic:
    """One network port. `links` are the classes of its paths to each GPU, in the order of `Topology.gpus`."""

    name: str
    links: tuple[str | None, ...]
    numa: int | None = None
    gbit: float = 0.0


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node; a node without CPUs only holds memory. `memory` is in bytes."""

    id: int
    cpus: tuple[int, ...]
    memory: int = 0


@dataclass(frozen=True)
class Topology:
    """The allowed GPUs, in the order the user sees them, and the ids of the allowed CPUs.

    `links` holds the class of each pair as the source printed it, `X` on the diagonal; `p2p` the driver's answer on peer
    access (`OK` or why not). Either is empty where the source does not tell. `cores` are sets of CPUs that share one
    physical core. `notes` are what a reader should know about the source; `trouble` is why there are no GPUs.
    """

    gpus: tuple[Gpu, ...]
    cpus: tuple[int, ...]
    links: Matrix = ()
    p2p: Matrix = ()
    nics: tuple[Nic, ...] = ()
    numa: tuple[NumaNode, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()
    per_link: float = 0.0
    source: str = ""
    notes: tuple[str, ...] = ()
    trouble: str = ""

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> Topology:
        """This machine: ask the driver, then keep what CUDA_VISIBLE_DEVICES allows (indices, UUIDs, MIG names)."""
        from mgpu.topology.detection import detect

        return detect(environ)

    @classmethod
    def parse(cls, text: str) -> Topology:
        """The machine that a text of `nvidia-smi topo` or `rocm-smi` describes; TopologyError where it describes none."""
        from mgpu.topology.text import parse

        return parse(text)

    @property
    def indices(self) -> tuple[int, ...]:
        """The GPUs' indices, in order."""
        return tuple(gpu.index for gpu in self.gpus)

    def link(self, first: int, second: int) -> str | None:
        """The class between the GPUs at two positions; the weaker one where the two directions disagree."""
        if not self.links:
            return None
        there, back = self.links[first][second], self.links[second][first]
        return there if links.strength(there) <= links.strength(back) else back

    def refused(self, first: int, second: int) -> bool:
        """Whether the driver is known to refuse peer access between two positions."""
        return bool(self.p2p) and self.p2p[first][second] not in (None, "OK", "X")

    def strength(self, first: int, second: int) -> float:
        """The rank of the link between two positions: larger is better."""
        return links.strength(self.link(first, second), self.gpus[first].name, refused=self.refused(first, second))

    def bandwidth(self, first: int, second: int) -> float:
        """Estimated GB/s between two positions, one direction; 0 where unknown."""
        return links.bandwidth(self.link(first, second), self.gpus[first].name, per_link=self.per_link)

    def rate_text(self, first: int, second: int) -> str:
        """The estimate in words; a range where the kind of GPU is not known."""
        return links.rate_text(self.link(first, second), self.gpus[first].name, per_link=self.per_link)

    def domain(self, position: int) -> object:
        """What tells whether two GPUs are near each other: the NUMA node, else the CPU list, else nothing."""
        gpu = self.gpus[position]
        return gpu.numa if gpu.numa is not None else gpu.cpus or None

    def near(self, position: int) -> tuple[Nic, ...]:
        """The NICs nearest to the GPU at `position`, on the best class any of them has; none across the sockets."""
        ranked = [(links.strength(nic.links[position]), nic) for nic in self.nics if nic.links[position]]
        best = max((rank for rank, _ in ranked), default=0.0)
        return tuple(nic for rank, nic in ranked if rank == best) if best > links.strength("SYS") else ()

    def subset(self, positions: tuple[int, ...]) -> Topology:
        """The same machine with only the GPUs at `positions`, in that order."""

        def cut(matrix: Matrix) -> Matrix:
            return tuple(tuple(matrix[row][column] for column in positions) for row in positions) if matrix else ()

        return dataclasses.replace(
            self,
            gpus=tuple(self.gpus[position] for position in positions),
            links=cut(self.links),
            p2p=cut(self.p2p),
            nics=tuple(
                dataclasses.replace(nic, links=tuple(nic.links[position] for position in positions))
                for nic in self.nics
            ),
        )
