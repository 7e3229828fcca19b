"""The machine as NVIDIA's driver tells it, through nvidia-ml-py. Each question may fail alone: old drivers, virtual machines
and containers answer only some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mgpu.topology import sysfs
from mgpu.topology.values import Gpu, Topology

T = TypeVar("T")

P2P_READ = 0
"""`NVML_P2P_CAPS_INDEX_READ` is the tuple (0,) in nvidia-ml-py 13."""
P2P_STATES = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS"}
ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
MOST_LINKS = 36
TO_GPU, TO_SWITCH = 0, 2
_MASK_WORDS = 16
_MASK_BITS = 64


@dataclass(frozen=True)
class _Device:
    """A whole GPU with its handle, and the MIG instances that stand in its place."""

    handle: Any
    gpu: Gpu
    instances: tuple[Gpu, ...] = ()


class Driver:
    """NVML, or a fake of it: `ask` gives the answer, or the default where the driver has none."""

    def __init__(self, nvml: Any, root: Path = sysfs.SYS) -> None:
        self.nvml = nvml
        self.root = root
        self.faults: tuple[type[BaseException], ...] = (getattr(nvml, "NVMLError", OSError), AttributeError, TypeError)

    def ask(self, function: str, *arguments: Any, default: T) -> T:
        """The answer of one NVML function."""
        try:
            return getattr(self.nvml, function)(*arguments)  # type: ignore[no-any-return]
        except self.faults:
            return default

    def read(self) -> Topology:
        """The whole machine; NVMLError where the driver does not start."""
        self.nvml.nvmlInit()
        try:
            return self._read()
        finally:
            self.ask("nvmlShutdown", default=None)

    def _read(self) -> Topology:
        devices: list[_Device] = []
        notes: list[str] = []
        for index in range(self.nvml.nvmlDeviceGetCount()):
            handle = self.ask("nvmlDeviceGetHandleByIndex", index, default=None)
            if handle is None:
                notes.append(f"GPU{index} does not answer the driver: it is left out")
                continue
            devices.append(self._device(handle, index))
            if self._mig(handle) and not devices[-1].instances:
                notes.append(f"GPU{index} is in MIG mode and has no instance: it cannot be used")
                devices.pop()
        nodes = sysfs.numa_nodes(self.root)
        whole = tuple(device.gpu for device in devices)
        topology = Topology(
            gpus=whole,
            cpus=(),
            links=self._links(devices),
            p2p=self._p2p(devices),
            nics=sysfs.nics([gpu.bus for gpu in whole], [gpu.numa for gpu in whole], self.root),
            numa=nodes,
            cores=sysfs.cores(self.root),
            source=f"NVML, driver {_text(self.ask('nvmlSystemGetDriverVersion', default='of unknown version'))}",
            notes=tuple(notes),
        )
        return _with_instances(topology, devices)

    def _device(self, handle: Any, index: int) -> _Device:
        gpu = self._gpu(handle, index)
        pci = self.ask("nvmlDeviceGetPciInfo", handle, default=None)
        bus = _text(getattr(pci, "busId", ""))
        numa = sysfs.pci_numa(bus, self.root)
        if numa is None:
            nodes = _bits(self.ask("nvmlDeviceGetMemoryAffinity", handle, _MASK_WORDS, 0, default=()))
            numa = nodes[0] if nodes else None
        cpus = sysfs.pci_cpus(bus, self.root)
        if cpus is None:
            cpus = _bits(self.ask("nvmlDeviceGetCpuAffinity", handle, _MASK_WORDS, default=())) or None
        memory_node = self.ask("nvmlDeviceGetNumaNodeId", handle, default=None)
        gpu = replace(gpu, bus=bus, numa=numa, cpus=cpus, memory_node=memory_node)
        return _Device(handle, gpu, self._instances(handle, gpu))

    def _gpu(self, handle: Any, index: int) -> Gpu:
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle, default=None)
        processes = self.ask("nvmlDeviceGetComputeRunningProcesses", handle, default=())
        return Gpu(
            index,
            _text(self.ask("nvmlDeviceGetUUID", handle, default="")),
            _text(self.ask("nvmlDeviceGetName", handle, default="")),
            int(getattr(memory, "total", 0)),
            used=int(getattr(memory, "used", 0)),
            processes=len(processes),
        )

    def _mig(self, handle: Any) -> bool:
        mode: Sequence[int] = self.ask("nvmlDeviceGetMigMode", handle, default=(0, 0))
        return bool(mode and mode[0] == 1)

    def _instances(self, handle: Any, gpu: Gpu) -> tuple[Gpu, ...]:
        if not self._mig(handle):
            return ()
        found: list[Gpu] = []
        for place in range(self.ask("nvmlDeviceGetMaxMigDeviceCount", handle, default=0)):
            instance = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place, default=None)
            if instance is None:
                continue
            slice_ids = tuple(
                self.ask(f"nvmlDeviceGet{kind}InstanceId", instance, default=-1) for kind in ("Gpu", "Compute")
            )
            own = self._gpu(instance, gpu.index)
            found.append(
                replace(
                    own,
                    parent=gpu.uuid,
                    bus=gpu.bus,
                    numa=gpu.numa,
                    cpus=gpu.cpus,
                    aliases=(f"MIG-{gpu.uuid}/{slice_ids[0]}/{slice_ids[1]}",),
                )
            )
        return tuple(found)

    def _links(self, devices: Sequence[_Device]) -> tuple[tuple[str | None, ...], ...]:
        direct, switched = self._fabric(devices)
        count = len(devices)
        rows: list[list[str | None]] = [["X"] * count for _ in range(count)]
        for first in range(count):
            for second in range(first):
                bonded = direct.get((first, second), 0) or direct.get((second, first), 0)
                bonded += min(switched[first], switched[second])
                kind = f"NV{bonded}" if bonded else self._ancestor(devices[first], devices[second])
                rows[first][second] = rows[second][first] = kind
        return tuple(tuple(row) for row in rows)

    def _fabric(self, devices: Sequence[_Device]) -> tuple[dict[tuple[int, int], int], list[int]]:
        """Active NVLinks from GPU to GPU, and from each GPU to switches, which join it to every other GPU on them."""
        positions = {sysfs.pci_name(device.gpu.bus): place for place, device in enumerate(devices)}
        direct: dict[tuple[int, int], int] = {}
        switched = [0] * len(devices)
        for place, device in enumerate(devices):
            for link in range(MOST_LINKS):
                state = self.ask("nvmlDeviceGetNvLinkState", device.handle, link, default=None)
                if state is None:
                    break
                if state != 1:
                    continue
                remote = self.ask("nvmlDeviceGetNvLinkRemotePciInfo", device.handle, link, default=None)
                other = positions.get(sysfs.pci_name(_text(getattr(remote, "busId", ""))))
                if other is not None:
                    direct[place, other] = direct.get((place, other), 0) + 1
                    continue
                kind = self.ask("nvmlDeviceGetNvLinkRemoteDeviceType", device.handle, link, default=TO_SWITCH)
                switched[place] += kind == TO_SWITCH
        return direct, switched

    def _ancestor(self, first: _Device, second: _Device) -> str | None:
        level = self.ask("nvmlDeviceGetTopologyCommonAncestor", first.handle, second.handle, default=-1)
        if level in ANCESTORS:
            return ANCESTORS[level]
        devices = self.root / "bus/pci/devices"
        paths = [sysfs.pci_path(devices / (sysfs.pci_name(device.gpu.bus) or "-")) for device in (first, second)]
        same = first.gpu.numa is not None and first.gpu.numa == second.gpu.numa
        return sysfs.path_class(paths[0], paths[1], same) if all(paths) else None

    def _p2p(self, devices: Sequence[_Device]) -> tuple[tuple[str | None, ...], ...]:
        def state(first: _Device, second: _Device) -> str | None:
            if first is second:
                return "X"
            answer = self.ask("nvmlDeviceGetP2PStatus", first.handle, second.handle, P2P_READ, default=None)
            return None if answer is None else P2P_STATES.get(answer, "U")

        rows = tuple(tuple(state(first, second) for second in devices) for first in devices)
        return rows if any(cell not in (None, "X") for row in rows for cell in row) else ()


def _with_instances(topology: Topology, devices: Sequence[_Device]) -> Topology:
    """MIG instances in the place of their GPU. They reach nothing but through host memory."""
    if not any(device.instances for device in devices):
        return topology
    places = [(place, gpu) for place, device in enumerate(devices) for gpu in device.instances or (device.gpu,)]
    spread = topology.subset(tuple(place for place, _ in places))

    def fill(matrix: tuple[tuple[str | None, ...], ...], cut_off: str) -> tuple[tuple[str | None, ...], ...]:
        return tuple(
            tuple(
                "X" if row == column else cut_off if places[row][1].parent or places[column][1].parent else cell
                for column, cell in enumerate(cells)
            )
            for row, cells in enumerate(matrix)
        )

    return replace(
        spread, gpus=tuple(gpu for _, gpu in places), links=fill(spread.links, "SYS"), p2p=fill(spread.p2p, "NS")
    )


def _bits(words: Sequence[int]) -> tuple[int, ...]:
    """The set bits of a mask in 64-bit words, lowest first."""
    return tuple(
        place * _MASK_BITS + bit for place, word in enumerate(words) for bit in range(_MASK_BITS) if word >> bit & 1
    )


def _text(value: str | bytes) -> str:
    """Older releases of nvidia-ml-py answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
