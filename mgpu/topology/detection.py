"""This machine: the driver's answer, else the text of its tool, else CPUs and NUMA nodes alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mgpu.errors import TopologyError
from mgpu.topology import sysfs
from mgpu.topology.values import Gpu, Topology

_TOOLS = (
    ("nvidia-smi", (("nvidia-smi", "-L"), ("nvidia-smi", "topo", "-m"))),
    ("rocm-smi", (("rocm-smi", "--showtopo"),)),
)
_TOOL_SECONDS = 20


def detect(environ: Mapping[str, str] = os.environ, root: Path = sysfs.SYS) -> Topology:
    """This machine, with the GPUs that CUDA_VISIBLE_DEVICES allows, in its order, and the CPUs this process may use.

    Never raises: a machine without a working driver has no GPUs, and `trouble` says why.
    """
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    topology = _from_driver(root)
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = visible(topology.gpus, setting)
    if len(chosen) < len(topology.gpus) and not topology.trouble:
        hidden = f"CUDA_VISIBLE_DEVICES={setting} allows {len(chosen)} of {len(topology.gpus)} GPUs"
        topology = replace(topology, notes=(*topology.notes, hidden), trouble="" if chosen else hidden)
    return replace(topology.subset(chosen), cpus=allowed)


def visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[int, ...]:
    """The positions in `gpus` that a CUDA_VISIBLE_DEVICES `setting` leaves, in its order.

    Indices count as nvidia-smi does; UUIDs may be cut short; MIG instances go by either of their names. Like CUDA, the list
    ends at the first entry that names no GPU, or one a second time.
    """
    if setting is None:
        return tuple(range(len(gpus)))
    chosen: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        found = _named(gpus, entry)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return tuple(chosen)


def _named(gpus: tuple[Gpu, ...], entry: str) -> int | None:
    if entry.isdigit():
        return next((place for place, gpu in enumerate(gpus) if str(gpu.index) == entry), None)
    exact = [place for place, gpu in enumerate(gpus) if entry and (entry == gpu.uuid or entry in gpu.aliases)]
    if exact or not entry.startswith(("GPU-", "MIG-")):
        return exact[0] if exact else None
    found = [place for place, gpu in enumerate(gpus) if gpu.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _from_driver(root: Path) -> Topology:
    from mgpu.topology.nvml import Driver

    try:
        import pynvml
    except ImportError as error:
        return _from_tools(f"nvidia-ml-py cannot be imported: {error}", root)
    missing = getattr(pynvml, "NVMLError_LibraryNotFound", ())
    fault: type[Exception] = getattr(pynvml, "NVMLError", Exception)
    try:
        topology = Driver(pynvml, root).read()
    except missing as error:
        return _from_tools(f"no NVIDIA driver ({error})", root)
    except fault as error:
        return _without_gpus(f"the NVIDIA driver does not work: {error}", root)
    return topology if topology.gpus else replace(topology, trouble="the NVIDIA driver finds no GPU")


def _from_tools(trouble: str, root: Path) -> Topology:
    """What nvidia-smi or rocm-smi prints, where NVML cannot be loaded but one of them is installed."""
    for tool, commands in _TOOLS:
        if shutil.which(tool) is None:
            continue
        printed = "\n".join(_output(command) for command in commands)
        try:
            topology = Topology.parse(printed)
        except TopologyError as error:
            return _without_gpus(f"{tool}: {error}", root)
        return replace(topology, numa=sysfs.numa_nodes(root) or topology.numa, cores=sysfs.cores(root))
    return _without_gpus(trouble, root)


def _output(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            command, check=False, text=True, errors="replace", timeout=_TOOL_SECONDS,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    return done.stdout


def _without_gpus(trouble: str, root: Path) -> Topology:
    return Topology(
        (), (), numa=sysfs.numa_nodes(root), cores=sysfs.cores(root), nics=sysfs.nics((), (), root), trouble=trouble
    )
