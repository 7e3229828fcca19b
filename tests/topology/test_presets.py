"""Machines by name."""

import pytest

from mgpu.errors import UnknownName
from mgpu.topology.binding import bind
from mgpu.topology.placement import pick
from mgpu.topology.presets import PRESETS, names, preset


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_whole_machine(name):
    topology = preset(name)
    count = len(topology.gpus)
    assert all(topology.links[a][b] == topology.links[b][a] for a in range(count) for b in range(count))
    assert all(topology.links[a][a] == "X" for a in range(count))
    assert all(len(nic.links) == count and nic.gbit > 0 for nic in topology.nics)
    assert sorted(cpu for node in topology.numa for cpu in node.cpus) == list(topology.cpus)
    assert all(gpu.name and gpu.memory and gpu.numa is not None for gpu in topology.gpus)
    shares = bind(topology, range(count))
    assert sum(map(len, shares)) == len({cpu for share in shares for cpu in share}) == len(topology.cpus)
    assert "preset" in topology.source


def test_known_figures():
    h100 = preset("DGX-H100")
    assert (len(h100.gpus), h100.links[0][7], h100.bandwidth(0, 7)) == (8, "NV18", 450)
    assert [nic.name for nic in h100.near(3)] == ["mlx5_3"]
    assert len(preset("aws:p5.48xlarge").near(0)) == 4
    assert pick(preset("azure:nd40rs_v2"), 8).ring == (0, 3, 2, 1, 5, 6, 7, 4)
    assert len(preset("gcp:a2-megagpu-16g").gpus) == 16
    assert preset("2x3090-nvlink").bandwidth(0, 1) == 56.25
    assert "dgx-a100" in names()


def test_counted_machines():
    assert len(preset("8xH100").gpus) == 8
    assert preset("2xrtx4090").links[0][1] == "PHB"
    with pytest.raises(UnknownName, match="unknown machine 'dgx-h10'") as caught:
        preset("dgx-h10")
    assert "dgx-h100" in caught.value.hint
    with pytest.raises(UnknownName):
        preset("99xH100")
