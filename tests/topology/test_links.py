"""The worth of links."""

import itertools

import pytest

from mgpu.topology import links


def test_classes_rank_from_fabric_to_across_the_sockets():
    order = ["NV18", "NV12", "NV4", "NV2", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS"]
    strengths = [links.strength(kind) for kind in order]
    assert strengths == sorted(strengths, reverse=True) and len(set(strengths)) == len(order)
    assert links.strength("SOC") == links.strength("SYS")
    assert links.strength(None) < links.strength("PIX", refused=True) < links.strength("SYS")


@pytest.mark.parametrize(
    ("kind", "name", "rate"),
    [
        ("NV4", "NVIDIA GeForce RTX 3090", 56.25), ("NV4", "NVIDIA A100-SXM4-40GB", 100), ("NV4", "NVIDIA RTX A6000", 56.25),
        ("NV6", "Tesla V100-SXM3-32GB", 150), ("NV4", "Tesla P100-SXM2-16GB", 80), ("NV8", "NVIDIA H800", 200),
        ("NV18", "NVIDIA H100 80GB HBM3", 450), ("NV18", "NVIDIA B200", 900), ("NV18", "NVIDIA GB200", 900),
        ("PIX", "NVIDIA A100-PCIE-40GB", 31), ("PIX", "NVIDIA H100 PCIe", 63), ("PIX", "Tesla V100-PCIE-16GB", 16),
        ("SYS", "NVIDIA H100 PCIe", 10), ("X", "", 0), (None, "", 0),
    ],
)  # fmt: skip
def test_bandwidths_of_the_table(kind, name, rate):
    """FACTS: GB/s in one direction; sources in the module's DESIGN.md."""
    assert links.bandwidth(kind, name) == rate


def test_unknown_gpus_get_a_range_not_a_figure():
    """NV4 is 56 GB/s on a 3090 and 200 on a B200."""
    assert links.rate_text("NV4") == "56 to 200 GB/s each way, by the kind of GPU"
    assert links.rate_text("PIX") == "16 to 63 GB/s each way, by the kind of GPU"
    assert links.rate_text("NV4", "NVIDIA RTX A6000") == "about 56 GB/s each way"
    assert links.rate_text("NV4", per_link=14.0) == "about 56 GB/s each way"
    assert links.rate_text("X") == links.rate_text(None) == ""


def test_a_measured_rate_overrides_the_table():
    assert links.bandwidth("NV4", "NVIDIA A100", per_link=14.0) == 56.0


def test_every_class_is_explained():
    for kind in ("NV12", "IX2", *links.PCI_CLASSES, *links.OTHER_CLASSES):
        assert "does not know" not in links.meaning(kind)
    assert "does not know" in links.meaning("QQ")
    assert all(not links.is_fabric(kind) for kind in links.PCI_CLASSES)
    assert all(a != b for a, b in itertools.pairwise(links.PCI_CLASSES.values()))
