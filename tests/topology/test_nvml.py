"""NVML against a fake of it, with the shapes of real machines."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from matrices import DGX1V

from mgpu.topology.detection import visible
from mgpu.topology.nvml import Driver
from mgpu.topology.placement import pick

GIB = 1024**3
SWITCH = "switch"


class NVMLError(Exception):
    pass


@dataclass
class FakeNvml:
    """A driver of `count` GPUs. `nvlinks[i]` are the far ends of GPU i's links: another GPU's index, or a switch."""

    count: int
    name: str
    memory: int
    nvlinks: dict = field(default_factory=dict)
    ancestor: object = lambda a, b: 50
    nodes: dict = field(default_factory=dict)
    node_ids: dict = field(default_factory=dict)
    p2p: object = lambda a, b: 0
    instances: dict = field(default_factory=dict)
    processes: dict = field(default_factory=dict)
    cpus_a_node: int = 16
    NVMLError = NVMLError
    log: list = field(default_factory=list)

    def nvmlInit(self):  # noqa: N802 - the names are NVML's
        self.log.append("init")

    def nvmlShutdown(self):  # noqa: N802
        self.log.append("shutdown")

    def __getattr__(self, function):
        name = function.removeprefix("nvml")
        if name.startswith("_") or not hasattr(FakeAnswers, name):
            raise AttributeError(function)
        return lambda *arguments: getattr(FakeAnswers, name)(self, *arguments)


class FakeAnswers:
    """What the fake says to each question, by NVML's names without the prefix. A handle is an index, or (index, instance)."""

    def SystemGetDriverVersion(self):  # noqa: N802
        return "580.1"

    def DeviceGetCount(self):  # noqa: N802
        return self.count

    def DeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def DeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{handle}" if isinstance(handle, int) else f"MIG-{handle[0]}{handle[1]}"

    def DeviceGetName(self, handle):  # noqa: N802
        return self.name if isinstance(handle, int) else f"{self.name} MIG 3g.20gb"

    def DeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=self.memory if isinstance(handle, int) else 20 * GIB, used=0)

    def DeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [object()] * self.processes.get(handle, 0)

    def DeviceGetPciInfo(self, handle):  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{handle + 16:02X}:00.0")

    def DeviceGetMemoryAffinity(self, handle, words, scope):  # noqa: N802
        if handle not in self.nodes:
            raise NVMLError("Not Supported")
        return [1 << self.nodes[handle]] + [0] * (words - 1)

    def DeviceGetCpuAffinity(self, handle, words):  # noqa: N802
        if handle not in self.nodes:
            raise NVMLError("Not Supported")
        mask = ((1 << self.cpus_a_node) - 1) << self.nodes[handle] * self.cpus_a_node
        return [mask >> 64 * word & (1 << 64) - 1 for word in range(words)]

    def DeviceGetNumaNodeId(self, handle):  # noqa: N802
        if handle not in self.node_ids:
            raise NVMLError("Not Supported")
        return self.node_ids[handle]

    def DeviceGetNvLinkState(self, handle, link):  # noqa: N802
        ends = self.nvlinks.get(handle, [])
        if link >= len(ends):
            raise NVMLError("Invalid Argument")
        return int(ends[link] is not None)

    def DeviceGetNvLinkRemotePciInfo(self, handle, link):  # noqa: N802
        end = self.nvlinks[handle][link]
        return SimpleNamespace(busId="0000000A:01:00.0" if end == SWITCH else f"00000000:{end + 16:02X}:00.0")

    def DeviceGetNvLinkRemoteDeviceType(self, handle, link):  # noqa: N802
        return 2 if self.nvlinks[handle][link] == SWITCH else 0

    def DeviceGetTopologyCommonAncestor(self, first, second):  # noqa: N802
        return self.ancestor(first, second)

    def DeviceGetP2PStatus(self, first, second, capability):  # noqa: N802
        assert capability == 0  # the constant of nvidia-ml-py 13 is a tuple, which ctypes refuses
        return self.p2p(first, second)

    def DeviceGetMigMode(self, handle):  # noqa: N802
        return (int(handle in self.instances),) * 2

    def DeviceGetMaxMigDeviceCount(self, handle):  # noqa: N802
        return 7

    def DeviceGetMigDeviceHandleByIndex(self, handle, place):  # noqa: N802
        if place >= self.instances[handle]:
            raise NVMLError("Not Found")
        return (handle, place)

    def DeviceGetGpuInstanceId(self, handle):  # noqa: N802
        return handle[1] + 1

    def DeviceGetComputeInstanceId(self, handle):  # noqa: N802
        return 0


def read(nvml, folder):
    topology = Driver(nvml, folder).read()
    assert nvml.log == ["init", "shutdown"]
    return topology


def all_links(topology):
    return {topology.links[a][b] for a in range(len(topology.gpus)) for b in range(len(topology.gpus)) if a != b}


def test_dgx1v_counts_the_links_of_each_pair(tmp_path):
    """The cube mesh as NVML tells it, link by link, gives nvidia-smi's matrix."""
    ends = {}
    for gpu, row in enumerate(DGX1V.links):
        ends[gpu] = [
            other for other, kind in enumerate(row) for _ in range(int(kind[2:]) if kind.startswith("NV") else 0)
        ]
    nvml = FakeNvml(8, "Tesla V100-SXM2-32GB", 32 * GIB, ends, nodes={gpu: gpu // 4 for gpu in range(8)})
    topology = read(nvml, tmp_path)
    assert [list(row) for row in topology.links] == DGX1V.links
    assert [gpu.numa for gpu in topology.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert topology.gpus[5].cpus == tuple(range(16, 32))
    assert pick(topology, 8).devices == tuple(f"GPU-{index}" for index in (0, 3, 2, 1, 5, 6, 7, 4))
    assert topology.p2p[0][:2] == ("X", "OK")


@pytest.mark.parametrize(
    ("name", "count", "bonded", "rate"),
    [("NVIDIA A100-SXM4-80GB", 8, 12, 300), ("NVIDIA H100 80GB HBM3", 8, 18, 450), ("NVIDIA GB200", 4, 18, 900)],
)
def test_switched_machines(tmp_path, name, count, bonded, rate):
    """DGX A100, DGX H100, GB200: every link ends in a switch; some drivers number inactive links behind them."""
    ends = {gpu: [SWITCH] * bonded + [None] * 2 for gpu in range(count)}
    node_ids = {gpu: 2 + 8 * gpu for gpu in range(count)} if "GB200" in name else {}
    nvml = FakeNvml(
        count, name, 80 * GIB, ends, nodes={gpu: gpu * 2 // count for gpu in range(count)}, node_ids=node_ids
    )
    topology = read(nvml, tmp_path)
    assert all_links(topology) == {f"NV{bonded}"}
    assert topology.bandwidth(0, 1) == rate
    assert pick(topology, count // 2).gpus == tuple(range(count // 2))
    assert [gpu.memory_node for gpu in topology.gpus] == [node_ids.get(gpu) for gpu in range(count)]


def test_a_desktop_of_two_without_peer_access(tmp_path):
    nvml = FakeNvml(
        2, "NVIDIA GeForce RTX 5090", 32 * GIB, ancestor=lambda a, b: 30, p2p=lambda a, b: 2, processes={1: 3}
    )
    topology = read(nvml, tmp_path)
    assert topology.links == (("X", "PHB"), ("PHB", "X"))
    assert topology.p2p == (("X", "GNS"), ("GNS", "X"))
    assert [(gpu.numa, gpu.cpus, gpu.busy) for gpu in topology.gpus] == [(None, None, False), (None, None, True)]
    assert pick(topology, 1).gpus == (0,)


def test_mig_instances_stand_for_their_gpu(tmp_path):
    nvml = FakeNvml(2, "NVIDIA A100-PCIE-40GB", 40 * GIB, ancestor=lambda a, b: 10, instances={0: 2})
    topology = read(nvml, tmp_path)
    assert [(gpu.index, gpu.uuid, gpu.parent) for gpu in topology.gpus] == [
        (0, "MIG-00", "GPU-0"), (0, "MIG-01", "GPU-0"), (1, "GPU-1", ""),
    ]  # fmt: skip
    assert topology.gpus[0].memory == 20 * GIB
    assert all_links(topology) == {"SYS"} and topology.refused(0, 1)
    assert visible(topology.gpus, "MIG-GPU-0/2/0") == visible(topology.gpus, "MIG-01") == (1,)
    empty = read(FakeNvml(2, "NVIDIA A100-PCIE-40GB", 40 * GIB, instances={0: 0}), tmp_path)
    assert [gpu.uuid for gpu in empty.gpus] == ["GPU-1"]
    assert "has no instance" in empty.notes[0]


def test_a_driver_that_only_counts_still_gives_gpus(tmp_path):
    bare = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}".encode(),
    )  # fmt: skip
    topology = Driver(bare, tmp_path).read()
    assert [gpu.uuid for gpu in topology.gpus] == ["GPU-0", "GPU-1"]
    assert topology.links == (("X", None), (None, "X"))


def test_a_lost_gpu_is_left_out_and_told(tmp_path):
    nvml = FakeNvml(3, "NVIDIA A100", 40 * GIB)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index if index != 1 else nvml.nvmlLost()
    topology = read(nvml, tmp_path)
    assert topology.indices == (0, 2)
    assert topology.notes == ("GPU1 does not answer the driver: it is left out",)
