"""From a spec to a training that is ready to run, in one rank: data, process group, model, optimizer, what is restored."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # forked ranks find it loaded

from mgpu.checkpoint import Checkpointer, Found, restore_state
from mgpu.data.loading import Course, EvaluationCourse, make_loader
from mgpu.data.position import BatchGrid, Position
from mgpu.data.seeding import seed_everything, weights_seed
from mgpu.errors import CheckpointError, DataError
from mgpu.loggers.jsonl import JsonlLogger
from mgpu.parallel.base import Context, StopVote, Strategy, Trainable
from mgpu.plan import Plan, make_strategy
from mgpu.runs import Run
from mgpu.spec import RunSpec, Span, Target
from mgpu.train.census import count_parameters
from mgpu.train.evaluation import EvaluationData
from mgpu.train.loop import Training
from mgpu.train.schedule import LearningRate
from mgpu.train.targets import build


@dataclass(frozen=True)
class Seat:
    """Who this process is: one rank of one attempt of a run. `port` is that of the run's store on this host."""

    run: Run
    plan: Plan
    rank: int
    attempt: int
    port: int
    stop: StopVote

    @property
    def replica(self) -> int:
        return self.rank * self.plan.replicas // self.plan.world


def assemble(spec: RunSpec, seat: Seat) -> Training:
    """Everything that `seat` trains with; collective over all ranks of the attempt."""
    assert spec.data and spec.model and spec.optimizer and spec.batch and spec.duration
    plan, run = seat.plan, seat.run
    seed_everything(weights_seed(spec.seed))
    train_data = build(spec.data.train, key=("data", "train"))
    eval_data = build(spec.data.eval, key=("data", "eval")) if spec.data.eval else None
    grid = BatchGrid(n=len(train_data), size=spec.batch.size, micro=spec.batch.micro_size, last=spec.batch.last)
    if grid.batches_per_epoch == 0:
        raise DataError(
            f"{len(train_data)} samples are fewer than one batch of {spec.batch.size}, and batch.last is drop"
        )
    checkpointer = Checkpointer(run.checkpoints, spec.checkpoint.keep)
    found = _newest(run, checkpointer, seat.rank)
    position = Position.from_json(found.data["position"]) if found else Position()
    epochs = spec.duration.count if spec.duration.unit == "epochs" else None
    course = Course(grid, spec.seed, position, seat.replica, plan.replicas, epochs)
    # Loader processes are forked here, before this rank has threads or a device.
    batches = iter(_loader(train_data, course, spec, plan, spec.data.workers))
    strategy = make_strategy(spec)
    context = _context(spec, seat, strategy, _join(seat))
    trainable = _lay_out(spec, strategy, context)
    optimizer = _optimizer(spec.optimizer, trainable)
    if found:
        strategy.load_state(trainable, restore_state(found, trainable, optimizer))
        if context.scaler is not None and found.data.get("scaler"):
            context.scaler.load_state_dict(found.data["scaler"])
    total = spec.duration.count * (grid.batches_per_epoch if epochs else 1)
    parameters = count_parameters(trainable)
    evaluation = None
    if eval_data is not None:
        keys = EvaluationCourse(len(eval_data), spec.batch.micro_size, context.replica, plan.replicas)
        evaluation = EvaluationData(_loader(eval_data, keys, spec, plan, workers=0), keys.counts)
    return Training(
        spec=spec,
        run=run,
        strategy=strategy,
        trainable=trainable,
        optimizer=optimizer,
        rate=_rate(spec, grid, total),
        course=course,
        batches=batches,
        evaluation=evaluation,
        metrics={
            name: build(target, key=("metrics", name)).to(context.device) for name, target in spec.metrics.items()
        },
        checkpointer=checkpointer,
        logger=_logger(seat, position, total, parameters) if seat.rank == 0 else None,
        position=position,
        total_steps=total,
    )


def _lay_out(spec: RunSpec, strategy: Strategy, context: Context) -> Trainable:
    """The model, drawn from the same seed in every layout, laid over the ranks."""

    def make() -> torch.nn.Module:
        assert spec.model
        seed_everything(weights_seed(spec.seed))
        model: torch.nn.Module = build(spec.model, key=("model",))
        return model

    return strategy.build(strategy.materialize(make, context), build(spec.task, key=("task",)), context)


def _newest(run: Run, checkpointer: Checkpointer, rank: int) -> Found | None:
    found, warnings = checkpointer.latest()
    for warning in warnings if rank == 0 else ():
        run.record("note", text=f"checkpoint {warning}")
    if found is None and checkpointer.steps():
        raise CheckpointError("no checkpoint of this run is whole", hint="the notes above say what is damaged")
    return found


def _loader(samples: Any, keys: Any, spec: RunSpec, plan: Plan, workers: int) -> Any:
    assert spec.data
    collate = build(spec.data.collate) if spec.data.collate else None
    pin = plan.device == "cuda"
    return make_loader(
        samples, keys, spec.seed, workers=workers, start=spec.data.start, collate=collate, pin=pin
    )  # fmt: skip


def _context(spec: RunSpec, seat: Seat, strategy: Strategy, device: torch.device) -> Context:
    assert spec.batch
    context = Context(
        rank=seat.rank,
        world=seat.plan.world,
        replica=seat.replica,
        replicas=seat.plan.replicas,
        device=device,
        precision=spec.precision,
        loss_scale=2.0 ** -(spec.batch.size - 1).bit_length(),
        stop=seat.stop,
        reseed=seed_everything,
        devices=_devices(seat.plan, device),
        compile=spec.compile,
        activation_checkpointing=spec.activation_checkpointing,
    )
    scaler = strategy.scaler(context) if spec.precision == "fp16" else None
    return dataclasses.replace(context, scaler=scaler)


def _devices(plan: Plan, device: torch.device) -> tuple[torch.device, ...]:
    """What this rank drives: its own device, or all of them where the run has one process."""
    if plan.world > 1 or len(plan.devices) == 1:
        return (device,)
    return tuple(torch.device("cuda", index) if plan.device == "cuda" else device for index in range(len(plan.devices)))


def _logger(seat: Seat, position: Position, total: int, parameters: dict[str, Any]) -> JsonlLogger:
    logger = JsonlLogger()
    logger.open(seat.run, resume_step=position.step)
    seat.run.record("training", attempt=seat.attempt, start_step=position.step, total_steps=total, **parameters)
    return logger


def _optimizer(target: Target, trainable: Trainable) -> torch.optim.Optimizer:
    """Sharded and plain parameters in groups of their own: an optimizer's fused passes take no mixture."""
    kinds: dict[type, list[torch.Tensor]] = {}
    for parameter in trainable.parameters:
        kinds.setdefault(type(parameter.data), []).append(parameter)
    # A rank whose stage is frozen has nothing to train, which no optimizer takes.
    groups = list(kinds.values()) or [[torch.nn.Parameter(torch.empty(0))]]
    parameters: Any = groups[0] if len(groups) == 1 else [{"params": group} for group in groups]
    optimizer: torch.optim.Optimizer = build(target, parameters, key=("optimizer",))
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _rate(spec: RunSpec, grid: BatchGrid, total: int) -> LearningRate:
    warmup: Span | None = spec.schedule.warmup
    steps = 0 if warmup is None else warmup.count * (grid.batches_per_epoch if warmup.unit == "epochs" else 1)
    return LearningRate(warmup=steps, total=total, shape=spec.schedule.shape, floor=spec.schedule.floor)


def _join(seat: Seat) -> torch.device:
    """Join the process group through the store that the launcher holds; the rank's own device."""
    plan = seat.plan
    device = torch.device("cuda", seat.rank) if plan.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if plan.world > 1:
        store = dist.TCPStore("127.0.0.1", seat.port, is_master=False, timeout=datetime.timedelta(minutes=5))
        dist.init_process_group(
            plan.backend,
            store=dist.PrefixStore(f"attempt-{seat.attempt}", store),
            rank=seat.rank,
            world_size=plan.world,
            device_id=device if device.type == "cuda" else None,
        )
    return device
