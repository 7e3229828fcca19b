"""A tree like /sys, made by hand: two nodes, two GPUs and a NIC on switches."""

import pytest

from mgpu.topology import sysfs
from mgpu.topology.cpulist import format_list, parse_list, runs


@pytest.fixture
def tree(tmp_path):
    for node, cpus in ((0, "0-3"), (1, "4-7"), (2, "")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       {1024 * (node + 1)} kB\n")
    cpu = tmp_path / "devices/system/cpu"
    (cpu).mkdir()
    (cpu / "online").write_text("0-3\n")
    for number in range(4):
        (cpu / f"cpu{number}/topology").mkdir(parents=True)
        (cpu / f"cpu{number}/topology/thread_siblings_list").write_text(f"{number % 2},{number % 2 + 2}\n")
    return tmp_path


def device(tree, *parts, node=0, name="", kind="infiniband"):
    """A PCI device below its bridges, and its class folder where it is a NIC."""
    real = tree.joinpath("devices", *parts)
    real.mkdir(parents=True)
    (real / "numa_node").write_text(f"{node}\n")
    (real / "local_cpulist").write_text("0-3\n")
    bus = tree / "bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / parts[-1]).symlink_to(real)
    if name:
        port = tree / "class" / kind / name
        (port / "ports/1").mkdir(parents=True)
        (port / "ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
        (port / "device").symlink_to(real)


SWITCH = ("pci0000:16", "0000:16:01.0", "0000:17:00.0")


def test_nodes_and_cores(tree):
    assert [(node.id, node.cpus, node.memory) for node in sysfs.numa_nodes(tree)] == [
        (0, (0, 1, 2, 3), 1 << 20), (1, (4, 5, 6, 7), 2 << 20), (2, (), 3 << 20),
    ]  # fmt: skip
    assert sysfs.cores(tree) == ((0, 2), (1, 3))


def test_nics_and_their_paths_to_gpus(tree):
    device(tree, *SWITCH, "0000:18:00.0", "0000:19:00.0", node=0)
    device(tree, "pci0000:16", "0000:16:02.0", "0000:40:00.0", node=0)
    device(tree, "pci0000:80", "0000:80:01.0", "0000:81:00.0", node=0)
    device(tree, "pci0000:c0", "0000:c0:01.0", "0000:c1:00.0", node=1)
    device(tree, *SWITCH, "0000:18:01.0", "0000:1a:00.0", node=0, name="mlx5_0")
    buses = ["00000000:19:00.0", "00000000:40:00.0", "0000:81:00.0", "0000:C1:00.0", "0000:99:00.0"]
    (nic,) = sysfs.nics(buses, [0, 0, 0, 1, None], tree)
    assert (nic.name, nic.numa, nic.gbit) == ("mlx5_0", 0, 200.0)
    assert nic.links == ("PIX", "PHB", "NODE", "SYS", None)
    assert sysfs.pci_numa("00000000:C1:00.0", tree) == 1
    assert sysfs.pci_cpus("0000:19:00.0", tree) == (0, 1, 2, 3)
    assert sysfs.pci_cpus("0000:99:00.0", tree) is None


def test_two_switches_in_a_row_are_pxb():
    deep = (*SWITCH, "0000:18:00.0", "0000:19:00.0", "0000:1a:00.0", "0000:1b:00.0")
    assert sysfs.path_class(deep, (*SWITCH, "0000:18:01.0", "0000:1c:00.0"), True) == "PXB"


def test_without_a_tree_there_is_nothing(tmp_path):
    assert sysfs.numa_nodes(tmp_path) == sysfs.cores(tmp_path) == sysfs.nics((), (), tmp_path) == ()
    assert sysfs.pci_name("nonsense") == ""


def test_lists():
    assert parse_list("0-2,8") == (0, 1, 2, 8)
    assert parse_list("") == ()
    assert format_list((8, 0, 1, 2)) == "0-2,8"
    assert runs([5, 1, 2]) == [range(1, 3), range(5, 6)]
    for bad in ("2-1", "a", "1,,2", "0-99999", "-1"):
        with pytest.raises(ValueError, match=r"is no"):
            parse_list(bad)
