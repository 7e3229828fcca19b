"""What this machine has: its visible GPUs and the CPUs this process may use. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index` counts in the order of the PCI bus, as nvidia-smi does; `memory` is in bytes."""

    index: int
    uuid: str
    name: str
    memory: int


@dataclass(frozen=True)
class Topology:
    """The allowed GPUs, in the order the user sees them, and the ids of the allowed CPUs."""

    gpus: tuple[Gpu, ...]
    cpus: tuple[int, ...]

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> Topology:
        """Ask the driver, then keep what CUDA_VISIBLE_DEVICES allows (indices or UUIDs, in its order)."""
        return cls(
            gpus=visible(_nvml_gpus(), environ.get("CUDA_VISIBLE_DEVICES")), cpus=tuple(sorted(os.sched_getaffinity(0)))
        )


def visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a CUDA_VISIBLE_DEVICES `setting` leaves; like CUDA, it ends at the first entry that names none."""
    if setting is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        found = [gpu for gpu in gpus if entry == str(gpu.index) or (entry and gpu.uuid.startswith(entry))]
        if len(found) != 1:
            break
        chosen.append(found[0])
    return tuple(chosen)


def _nvml_gpus() -> tuple[Gpu, ...]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library, or a broken one: this machine has no GPU that could be used
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                index=index,
                uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
                name=str(pynvml.nvmlDeviceGetName(handle)),
                memory=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for index, handle in enumerate(handles)
        )
    finally:
        pynvml.nvmlShutdown()
