"""What the machine has."""

from mgpu.topology.machine import Gpu, Topology

__all__ = ["Gpu", "Topology"]
