"""From a spec to a training that is ready to run, in one rank: data, process group, model, optimizer, what is restored."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: forked ranks find it loaded
import torch.distributed as dist

from mgpu.checkpoint.restore import restore
from mgpu.checkpoint.state import TrainingState
from mgpu.checkpoint.weights import load_weights
from mgpu.data.loading import Course, EvaluationCourse, make_loader
from mgpu.data.position import BatchGrid, Position
from mgpu.data.seeding import seed_everything, weights_seed
from mgpu.errors import DataError
from mgpu.loggers.jsonl import JsonlLogger
from mgpu.parallel.base import Context, StopVote
from mgpu.plan import Plan, make_strategy
from mgpu.runs import Run
from mgpu.spec import RunSpec, Span, Target
from mgpu.train.loop import Training
from mgpu.train.saving import Saving, Start, choose_start, make_checkpointer
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

    def store(self, purpose: str) -> dist.Store:
        """A new client of the run's store, with keys of this attempt and `purpose` only."""
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=datetime.timedelta(minutes=5))
        return dist.PrefixStore(f"attempt-{self.attempt}/{purpose}", store)


def assemble(spec: RunSpec, seat: Seat) -> Training:
    """Everything that `seat` trains with; collective over all ranks of the attempt."""
    assert spec.data and spec.model and spec.optimizer and spec.batch and spec.duration
    plan, run = seat.plan, seat.run
    # The writer of checkpoints and the loaders are forked here, before this rank has threads or a device.
    checkpointer = make_checkpointer(run, spec, plan, seat.rank, seat.attempt, lambda: seat.store("saves"))
    seed_everything(weights_seed(spec.seed))
    train_data = build(spec.data.train, key=("data", "train"))
    eval_data = build(spec.data.eval, key=("data", "eval")) if spec.data.eval else None
    grid = BatchGrid(n=len(train_data), size=spec.batch.size, micro=spec.batch.micro_size, last=spec.batch.last)
    if grid.batches_per_epoch == 0:
        raise DataError(
            f"{len(train_data)} samples are fewer than one batch of {spec.batch.size}, and batch.last is drop"
        )
    start = choose_start(run, spec.init_from, seat.rank, (lambda: seat.store("start")) if plan.world > 1 else None)
    position = Position.from_json(start.checkpoint.data["position"]) if start.checkpoint else Position()
    epochs = spec.duration.count if spec.duration.unit == "epochs" else None
    course = Course(grid, spec.seed, position, seat.replica, plan.replicas, epochs)
    batches = iter(_loader(train_data, course, spec, plan, spec.data.workers))
    context = _context(spec, seat, _join(seat))
    seed_everything(weights_seed(spec.seed))
    model = build(spec.model, key=("model",)).to(context.device)
    optimizer = _optimizer(spec.optimizer, model)
    state = TrainingState(model, optimizer)
    _begin(start, state, context, seat)
    strategy = make_strategy(spec)
    trainable = strategy.build(model, build(spec.task, key=("task",)), context)
    total = spec.duration.count * (grid.batches_per_epoch if epochs else 1)
    evaluation = None
    if eval_data is not None:
        keys = EvaluationCourse(len(eval_data), spec.batch.micro_size, context.replica, plan.replicas)
        evaluation = _loader(eval_data, keys, spec, plan, workers=0)
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
        saving=Saving(spec.checkpoint, checkpointer, state, context),
        logger=_logger(seat, position, total, model) if seat.rank == 0 else None,
        position=position,
        total_steps=total,
    )


def _begin(start: Start, state: TrainingState, context: Context, seat: Seat) -> None:
    """Load what the training starts from; what differs from the spec in force is told."""
    if start.weights is not None:
        load_weights(start.weights, state.model)
    if start.checkpoint is None:
        return
    notes = restore(start.checkpoint, state)
    if context.scaler is not None and start.checkpoint.data.get("scaler"):
        context.scaler.load_state_dict(start.checkpoint.data["scaler"])
    for note in notes if seat.rank == 0 else ():
        seat.run.record("note", text=note)


def _loader(samples: Any, keys: Any, spec: RunSpec, plan: Plan, workers: int) -> Any:
    assert spec.data
    collate = build(spec.data.collate) if spec.data.collate else None
    pin = plan.device == "cuda"
    return make_loader(
        samples, keys, spec.seed, workers=workers, start=spec.data.start, collate=collate, pin=pin
    )  # fmt: skip


def _context(spec: RunSpec, seat: Seat, device: torch.device) -> Context:
    assert spec.batch
    return Context(
        rank=seat.rank,
        world=seat.plan.world,
        replica=seat.replica,
        replicas=seat.plan.replicas,
        device=device,
        precision=spec.precision,
        loss_scale=2.0 ** -(spec.batch.size - 1).bit_length(),
        scaler=torch.amp.GradScaler(device.type) if spec.precision == "fp16" else None,
        stop=seat.stop,
        reseed=seed_everything,
    )


def _logger(seat: Seat, position: Position, total: int, model: torch.nn.Module) -> JsonlLogger:
    logger = JsonlLogger()
    logger.open(seat.run, resume_step=position.step)
    count = sum(parameter.numel() for parameter in model.parameters())
    seat.run.record("training", attempt=seat.attempt, start_step=position.step, total_steps=total, parameters=count)
    return logger


def _optimizer(target: Target, model: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
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
        dist.init_process_group(
            plan.backend,
            store=seat.store("group"),
            rank=seat.rank,
            world_size=plan.world,
            device_id=device if device.type == "cuda" else None,
        )
    return device
