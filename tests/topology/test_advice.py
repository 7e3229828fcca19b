"""The warnings of machines that have something to warn of, and none for those that have not."""

import pytest
from matrices import BRIDGED, DESKTOP, DGX1V, TRAY, Machine, matrix, render

from mgpu.topology import Gpu, NumaNode, Topology
from mgpu.topology.advice import warnings
from mgpu.topology.presets import preset

P2P = " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n"
HALF_BRIDGED = matrix("- NV12 SYS SYS / NV12 - SYS SYS / SYS SYS - NODE / SYS SYS NODE -")
SYS4 = matrix("- SYS SYS SYS / SYS - SYS SYS / SYS SYS - SYS / SYS SYS SYS -")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (render(BRIDGED), "GPU0, GPU3 off the fabric: no NVLink"),
        (render(BRIDGED), "GPU0 is alone on NUMA node 1"),
        (render(Machine(HALF_BRIDGED, ["0", "0", "1", "1"], ["0-3"] * 4)),
         "GPU2-GPU3 is NODE where GPU0-GPU1 has NV12: a bridge is missing or down"),
        (render(DESKTOP) + P2P, "P2P refused for GPU0-GPU1 (GNS: GPU not supported)"),
        (render(Machine(DESKTOP.links, ["0", "1"], ["", "1"])), "GPU0: CPU affinity hidden by a cpuset"),
        (render(TRAY), "NUMA nodes 2,10,18,26 only hold memory"),
        (render(TRAY), "no GPU near NIC0, NIC1"),
        (render(Machine(SYS4, ["0", "0", "1", "1"], ["0-3"] * 4)), "all pairs are SYS"),
        (render(Machine(SYS4, ["0", "0", "1", "1"], ["0-3"] * 4)), "GPU0-GPU1 and 1 more pairs: SYS within one NUMA node"),
        (render(Machine(SYS4, ["3", "2", "1", "0"], ["0-3"] * 4)), "run in opposite order"),
    ],
)  # fmt: skip
def test_what_is_odd_is_told(text, words):
    assert any(words in warning for warning in warnings(Topology.parse(text))), warnings(Topology.parse(text))


def test_healthy_machines_have_no_warnings():
    assert warnings(Topology.parse(render(DGX1V))) == []
    assert warnings(preset("dgx-h100")) == []


def test_mixed_busy_and_forbidden():
    gpus = (
        Gpu(0, "a", "NVIDIA L4", 100, numa=0, cpus=(0, 1), processes=1),
        Gpu(1, "b", "NVIDIA T4", 100, numa=1, cpus=(2, 3), used=50),
    )
    told = "\n".join(warnings(Topology(gpus, (2, 3), numa=(NumaNode(0, (0, 1)), NumaNode(1, (2, 3))))))
    assert "CUDA by default counts the fastest first" in told
    assert "GPU0, GPU1 in use already" in told
    assert "GPU0: none of the near CPUs are allowed here (2-3)" in told
