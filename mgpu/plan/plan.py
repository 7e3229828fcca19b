"""The spec laid onto hardware: ranks, devices, batch arithmetic. Pure: no torch, no device needed."""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from mgpu.errors import PlanError, Problem, SpecError, UnknownName
from mgpu.parallel.base import Layout, Strategy
from mgpu.plan.devices import Devices, binding_text, choose_devices
from mgpu.plugins import find_plugin, plugin_names
from mgpu.spec.models import RunSpec
from mgpu.topology import Topology

LATER_STRATEGIES = ("tensorflow",)
LATER_ENGINES = ("slurm", "kubernetes", "sky")
LATER_LOGGERS = ("tensorboard", "wandb", "mlflow", "csv")
LOCAL_OPTIONS = ("engine", "port")


@dataclass(frozen=True)
class Plan:
    """How a run is laid out. One value for the front, the node and every rank; `plan.json` holds it."""

    strategy: str
    options: dict[str, Any]
    device: str
    devices: tuple[str, ...]
    backend: str
    replicas: int
    threads: int
    grace: int
    size: int | None = None
    micro: int | None = None
    counts: tuple[int, ...] = ()
    steps: int | None = None
    duration: str | None = None
    unit: str = "sample"
    port: int = 0
    notes: tuple[str, ...] = ()
    placement: str = ""
    cpus: tuple[tuple[int, ...], ...] = ()
    """The CPUs of each rank, empty for a rank that is not bound; none at all where no rank is."""
    mesh: dict[str, int] = field(default_factory=dict)
    processes: int = 0
    """Ranks; 0 means one a device."""

    @property
    def world(self) -> int:
        return self.processes or len(self.devices)

    @property
    def idle_share(self) -> float:
        """The part of a full step that the replicas wait, all together: 0 where micro batches divide evenly."""
        longest = max(self.counts, default=0)
        return 1 - sum(self.counts) / (longest * len(self.counts)) if longest else 0.0

    def env(self, rank: int) -> dict[str, str]:
        """The environment of `rank`, by torchrun's contract."""
        values = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world,
            "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": self.world,
            "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": self.threads,
        }  # fmt: skip
        if self.device == "cuda":
            values["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
            values["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        return {key: str(value) for key, value in values.items()}

    def explain(self) -> list[tuple[str, str]]:
        """The plan for people: label and text."""
        rows = [
            ("strategy", f"{self.strategy}, {self.replicas} replica{'s' * (self.replicas != 1)}"),
            ("ranks", f"{self.world} on {self.device}, backend {self.backend}, {self.threads} threads each"),
            ("devices", ", ".join(self.devices)),
        ]
        if len(self.mesh) > 1:
            rows.insert(1, ("mesh", " x ".join(f"{name} {size}" for name, size in self.mesh.items())))
        if self.placement:
            rows.append(("placement", self.placement))
        if self.cpus:
            rows.append(("binding", binding_text(self.cpus)))
        if self.size is not None:
            accumulation = "/".join(map(str, sorted(set(self.counts), reverse=True)))
            rows.append(("batch", f"{self.size} = micro {self.micro} x {sum(self.counts)} micro batches a step"))
            rows.append(("accumulation", f"{accumulation} micro batches a replica and step"))
            if self.idle_share:
                rows.append(("idle share", f"{self.idle_share:.0%}: micro batches do not divide evenly"))
            rows.append(("steps", str(self.steps) if self.steps else f"{self.duration}: known once the data is opened"))
        rows.extend(("note", note) for note in self.notes)
        return rows

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "world": self.world}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: _tuples(item) for key, item in value.items() if key in names})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def make_strategy(spec: RunSpec) -> Strategy:
    """The strategy that the spec names, with its options checked."""
    name = spec.parallel.strategy
    key = ("parallel", "strategy")
    if name in LATER_STRATEGIES:
        raise PlanError(f"strategy {name} is not available yet", key=key, hint="write ddp or single")
    try:
        kind = find_plugin("strategy", name, "mgpu.parallel", Strategy)  # type: ignore[type-abstract]
    except UnknownName as error:
        raise PlanError(error.message, key=key, hint=error.hint) from error
    try:
        options = kind.Options.model_validate(spec.parallel.options)
    except ValidationError as error:
        known = ", ".join(kind.Options.model_fields)
        raise SpecError(
            Problem(("parallel", *fault["loc"]), fault["msg"], hint=f"options of {name}: {known}")
            for fault in error.errors()
        ) from error
    return kind(options)


def make_plan(spec: RunSpec, topology: Topology) -> Plan:
    """Lay `spec` onto the machine; PlanError or SpecError where it does not fit."""
    strategy = make_strategy(spec)
    if spec.numerics == "exact" and not strategy.exact_numerics:
        raise PlanError(
            f"numerics exact is not there for strategy {spec.parallel.strategy}",
            key=("numerics",),
            hint="write fast, or strategy ddp or single",
        )
    micro_batches = spec.batch.size // spec.batch.micro_size if spec.batch else None
    devices = choose_devices(spec.devices, topology, micro_batches, lambda world: world // strategy.replicas(world))
    world = strategy.processes(len(devices.names))
    replicas = strategy.replicas(world)
    counts = _counts(spec, strategy, replicas)
    port = _port(spec)
    _check_loggers(spec)
    told = strategy.check(Layout(spec, devices.kind, len(devices.names), counts)) if spec.batch else ()
    return Plan(
        strategy=spec.parallel.strategy,
        options=spec.parallel.options,
        device=devices.kind,
        devices=devices.names,
        backend=_backend(strategy.options.backend, devices.kind),
        replicas=replicas,
        threads=_threads(spec, topology, devices, world),
        grace=spec.watchdog.grace.seconds,
        size=spec.batch.size if spec.batch else None,
        micro=spec.batch.micro_size if spec.batch else None,
        counts=counts,
        steps=spec.duration.count if spec.duration and spec.duration.unit == "steps" else None,
        duration=str(spec.duration) if spec.duration else None,
        unit=str(spec.task.args.get("unit", "token" if spec.task.target.endswith(":NextByte") else "sample")),
        port=port,
        notes=devices.notes + told,
        placement=devices.placement,
        cpus=devices.cpus,
        mesh=strategy.mesh(world),
        processes=world,
    )


def _threads(spec: RunSpec, topology: Topology, devices: Devices, world: int) -> int:
    """CPU threads a rank. Sums over threads have an order, so `exact` takes a number that no layout changes."""
    if spec.threads is not None:
        return spec.threads
    if spec.numerics == "exact":
        return 1
    return max(1, min([len(topology.cpus) // world, *(len(cpus) for cpus in devices.cpus if cpus)]))


def _counts(spec: RunSpec, strategy: Strategy, replicas: int) -> tuple[int, ...]:
    if spec.batch is None:
        return ()
    size, micro = spec.batch.size, spec.batch.micro_size
    total = size // micro
    if total < replicas:
        raise PlanError(
            f"{total} micro batch{'es' * (total != 1)} (size {size} / micro {micro}) on {replicas} replicas "
            f"leave{'s' * (total == 1)} a replica without one",
            key=("batch", "micro") if spec.batch.micro else ("batch",),
            hint=_what_fits(size, micro, replicas),
        )
    whole, rest = divmod(total, replicas)
    if rest and not strategy.uneven_replicas:
        raise PlanError(
            f"{total} micro batches do not divide by {replicas} replicas",
            key=("batch",),
            hint=_what_fits(size, micro, replicas),
        )
    return tuple(whole + (replica < rest) for replica in range(replicas))


def _what_fits(size: int, micro: int, replicas: int) -> str:
    fits = [m for m in range(size, 0, -1) if size % m == 0 and size // m >= replicas]
    options = [f"micro {fits[0]}"] if fits else []
    return f"write {' or '.join([*options, f'size {micro * replicas}', f'{size // micro} devices or fewer'])}"


def _backend(asked: str, device: str) -> str:
    if asked == "auto":
        return "nccl" if device == "cuda" else "gloo"
    if asked == "nccl" and device != "cuda":
        raise PlanError("backend nccl needs GPUs, the devices are CPUs", key=("parallel", "backend"), hint="write gloo")
    return asked


def _port(spec: RunSpec) -> int:
    engine, options = spec.cluster.engine, dict(spec.cluster.model_extra or {})
    if engine in LATER_ENGINES:
        raise PlanError(f"cluster engine {engine} is not available yet", key=("cluster", "engine"), hint="write local")
    if engine != "local":
        error = UnknownName("cluster engine", engine, ("local",))
        raise PlanError(error.message, key=("cluster", "engine"), hint=error.hint)
    for name in options:
        if name not in LOCAL_OPTIONS:
            unknown = UnknownName("option of engine local", name, LOCAL_OPTIONS)
            raise PlanError(unknown.message, key=("cluster", name), hint=unknown.hint)
    port = options.get("port", 0)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise PlanError(f"port {port!r}: must be a number from 0 (any free one) to 65535", key=("cluster", "port"))
    return port


def _check_loggers(spec: RunSpec) -> None:
    """Names that nothing would answer to are refused, never passed over."""
    known = plugin_names("mgpu.loggers")
    for index, name in enumerate(spec.loggers):
        if name in LATER_LOGGERS or ":" in name:
            text, hint = f"logger {name} is not available yet", f"write {' or '.join(known)}"
        elif name not in known:
            unknown = UnknownName("logger", name, known)
            text, hint = unknown.message, unknown.hint
        else:
            continue
        raise PlanError(text, key=("loggers", index), hint=hint)


def listen(port: int) -> socket.socket:
    """A listening socket for the run's store on loopback, held until it is used; PlanError if the port is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise PlanError(
            f"port {port} on 127.0.0.1 cannot be used: {error.strerror}",
            key=("cluster", "port"),
            hint="leave cluster.port out to get a free one",
        ) from error
    return listener


__all__ = ["Plan", "listen", "make_plan", "make_strategy", "plugin_names"]
