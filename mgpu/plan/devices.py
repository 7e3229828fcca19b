"""From what `devices:` asks for to the devices of each rank."""

from __future__ import annotations

from dataclasses import dataclass

from mgpu.errors import PlanError
from mgpu.spec.values import DeviceRequest
from mgpu.topology import Topology

KEY = ("devices",)


@dataclass(frozen=True)
class Devices:
    """The kind of device, and one name a rank: a GPU's UUID, or `cpu`. `note` tells a choice that was made."""

    kind: str
    names: tuple[str, ...]
    note: str = ""


def choose_devices(request: DeviceRequest, topology: Topology, useful: int | None) -> Devices:
    """Pick the devices; PlanError where they are not there.

    `useful` is how many replicas the batch can keep busy, None where that is not known (a script): `auto` without a
    number takes no more.
    """
    gpus = topology.gpus
    if request.kind == "cpu" or (request.kind == "auto" and not gpus):
        return _cpu(request, topology, useful)
    if not gpus:
        asked = request.count or "all"
        raise PlanError(
            f"{asked} GPUs asked for, 0 visible", key=KEY, hint=f"write cpu:{request.count or 2} to train on the CPU"
        )
    if request.indices:
        bad = [index for index in request.indices if index >= len(gpus)]
        if bad:
            raise PlanError(
                f"index {bad[0]} of {len(gpus)} visible",
                key=KEY,
                hint=f"indices count the visible GPUs, 0 to {len(gpus) - 1}",
            )
        return Devices("cuda", tuple(gpus[index].uuid for index in request.indices))
    count = request.count or len(gpus)
    if count > len(gpus):
        raise PlanError(f"{count} GPUs asked for, {len(gpus)} visible", key=KEY, hint=f"write {len(gpus)} or fewer")
    note = ""
    if request.kind == "auto" and request.count is None and useful is not None and useful < count:
        note = f"{useful} of {count} visible GPUs: the batch has {useful} micro batches a step; a smaller batch.micro uses more"
        count = useful
    return Devices("cuda", tuple(gpu.uuid for gpu in gpus[:count]), note)


def _cpu(request: DeviceRequest, topology: Topology, useful: int | None) -> Devices:
    count = request.count
    if count is None:
        count = min(2, len(topology.cpus), useful or 2) if request.kind == "auto" else 1
    note = "running on CPU: no GPU is visible" if request.kind == "auto" else ""
    return Devices("cpu", ("cpu",) * count, note)
