"""What the machine has."""

from mgpu.topology.values import Gpu, Nic, NumaNode, Topology

__all__ = ["Gpu", "Nic", "NumaNode", "Topology"]
