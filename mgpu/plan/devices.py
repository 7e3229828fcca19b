"""From what `devices:` asks for to the devices of each rank: which GPUs, in what order, bound to which CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mgpu.errors import PlanError
from mgpu.spec.values import DeviceRequest
from mgpu.topology import Topology

KEY = ("devices",)


@dataclass(frozen=True)
class Devices:
    """The kind of device, and one name a rank: a GPU's UUID (its index where the driver tells none), or `cpu`.

    `cpus` are the CPUs that each rank is bound to, empty where no rank is; `placement` says which GPUs these are and why.
    """

    kind: str
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    cpus: tuple[tuple[int, ...], ...] = ()
    placement: str = ""


def choose_devices(
    request: DeviceRequest,
    topology: Topology,
    useful: int | None,
    inner: Callable[[int], int] = lambda world: 1,
) -> Devices:
    """Pick the devices; PlanError where they are not there.

    `useful` is how many replicas the batch can keep busy, None where that is not known (a script): `auto` without a
    number takes no more. `inner` tells how many consecutive ranks form one replica of so many ranks: they talk most, and get
    the best links. A number of GPUs is a choice of the best; a list is taken as written.
    """
    gpus = topology.gpus
    if request.kind == "cpu" or (request.kind == "auto" and not gpus):
        return _cpu(request, topology, useful)
    if not gpus:
        asked = request.count or "all"
        why = f" ({topology.trouble})" if topology.trouble else ""
        raise PlanError(
            f"{asked} GPUs asked for, 0 visible{why}",
            key=KEY,
            hint=f"write cpu:{request.count or 2} to train on the CPU",
        )
    if request.indices:
        return _listed(request.indices, topology)
    count = request.count or len(gpus)
    if count > len(gpus):
        raise PlanError(f"{count} GPUs asked for, {len(gpus)} visible", key=KEY, hint=f"write {len(gpus)} or fewer")
    notes = []
    if request.kind == "auto" and request.count is None and useful is not None and useful < count:
        notes.append(
            f"{useful} of {count} visible GPUs: the batch has {useful} micro batches a step; a smaller batch.micro uses more"
        )
        count = useful
    return _best(count, topology, inner(count), notes)


def binding_text(cpus: Sequence[Sequence[int]]) -> str:
    """`rank 0: CPUs 0-8; rank 1: not bound`."""
    from mgpu.topology.cpulist import format_list

    shares = [f"CPUs {format_list(share)}" if share else "not bound" for share in cpus]
    return "; ".join(f"rank {rank}: {share}" for rank, share in enumerate(shares))


def _listed(indices: tuple[int, ...], topology: Topology) -> Devices:
    """The GPUs at the positions that the user wrote, in his order."""
    from mgpu.topology.placement import weaker_order

    count = len(topology.gpus)
    bad = [index for index in indices if index >= count]
    if bad:
        raise PlanError(
            f"index {bad[0]} of {count} visible", key=KEY, hint=f"indices count the visible GPUs, 0 to {count - 1}"
        )
    better = weaker_order(topology, indices)
    return _devices(topology, indices, "as written", [better] if better else [])


def _best(count: int, topology: Topology, inner: int, notes: list[str]) -> Devices:
    from mgpu.topology.placement import pick

    whole = tuple(place for place, gpu in enumerate(topology.gpus) if not gpu.parent)
    if count > 1 and len(whole) < count:
        raise PlanError(
            f"{count} GPUs asked for, {len(whole)} visible that are whole",
            key=KEY,
            hint="a process can use one MIG instance, and NCCL joins none: write 1, or turn MIG off",
        )
    places = whole if len(whole) >= count else tuple(range(len(topology.gpus)))
    chosen = pick(topology.subset(places), count, inner=inner if inner > 0 and count % inner == 0 else 1)
    return _devices(topology, tuple(places[place] for place in chosen.positions), chosen.reason, notes)


def _devices(topology: Topology, positions: tuple[int, ...], why: str, notes: list[str]) -> Devices:
    from mgpu.topology.binding import bind

    chosen = [topology.gpus[position] for position in positions]
    if len(chosen) > 1 and any(gpu.parent for gpu in chosen):
        raise PlanError("a run on MIG instances has one rank: NCCL joins none of them", key=KEY, hint="write one index")
    busy = [f"GPU{gpu.index} ({gpu.processes} processes, {gpu.used / 2**30:.1f} GiB)" for gpu in chosen if gpu.busy]
    if busy:
        notes = [*notes, f"in use already: {', '.join(busy)}"]
    cpus = bind(topology, positions)
    return Devices(
        kind="cuda",
        names=tuple(gpu.device for gpu in chosen),
        notes=tuple(notes),
        cpus=cpus if any(cpus) else (),
        placement=f"GPU {', '.join(str(gpu.index) for gpu in chosen)}: {why}",
    )


def _cpu(request: DeviceRequest, topology: Topology, useful: int | None) -> Devices:
    count = request.count
    if count is None:
        count = min(2, len(topology.cpus), useful or 2) if request.kind == "auto" else 1
    notes = ("running on CPU: no GPU is visible",) if request.kind == "auto" else ()
    return Devices("cpu", ("cpu",) * count, notes)
