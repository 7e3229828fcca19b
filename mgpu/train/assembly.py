"""From a spec to a training that is ready to run, in one rank: data, process group, model, optimizer, what is restored."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: forked ranks find it loaded
import torch.distributed as dist

from mgpu.checkpoint.restore import restore
from mgpu.checkpoint.state import TrainingState
from mgpu.checkpoint.weights import load_weights
from mgpu.data.feed import Agreement
from mgpu.data.position import Position
from mgpu.data.seeding import seed_everything, weights_seed
from mgpu.loggers.jsonl import JsonlLogger
from mgpu.parallel.base import Context, StopVote
from mgpu.plan import Plan, make_strategy
from mgpu.runs import Run
from mgpu.spec import RunSpec, Target
from mgpu.train.drift import FrozenSet
from mgpu.train.feeding import Sources
from mgpu.train.loop import Training
from mgpu.train.saving import Saving, Start, choose_start, make_checkpointer
from mgpu.train.schedule import learning_rate, total_steps
from mgpu.train.targets import build
from mgpu.train.trace import Trace


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
    _fix_kernels(spec)
    # The writer of checkpoints and the loaders are forked here, before this rank has threads or a device.
    checkpointer = make_checkpointer(run, spec, plan, seat.rank, seat.attempt, lambda: seat.store("saves"))
    seed_everything(weights_seed(spec.seed))
    sources = Sources(spec)
    start = choose_start(run, spec.init_from, seat.rank, (lambda: seat.store("start")) if plan.world > 1 else None)
    position = Position.from_json(start.checkpoint.data["position"]) if start.checkpoint else Position()
    position = sources.grid.settle(position)
    epochs = spec.duration.count if spec.duration.unit == "epochs" and not spec.trace else None
    device = _device(seat)
    feed = sources.feed(position, epochs, Agreement(seat.replica, plan.replicas, plan.world, device), _warn(seat))
    evaluation = sources.evaluation_feed(seat.replica, plan.replicas, device)
    _join(seat, device)
    context = _context(spec, seat, device)
    seed_everything(weights_seed(spec.seed))
    model = build(spec.model, key=("model",)).to(device, context.dtype)
    optimizer = _optimizer(spec.optimizer, model)
    state = TrainingState(model, optimizer)
    _begin(start, state, context, seat)
    strategy = make_strategy(spec)
    task = build(spec.task, key=("task",))
    trace = Trace(run.path / "trace", seat.rank, spec.trace.steps) if spec.trace else None
    trainable = strategy.build(model, trace.listen(task) if trace else task, context)
    total = total_steps(spec, sources.steps_per_epoch)
    return Training(
        spec=spec,
        run=run,
        strategy=strategy,
        trainable=trainable,
        optimizer=optimizer,
        rate=learning_rate(spec, sources.steps_per_epoch),
        feed=feed,
        evaluation=evaluation,
        metrics={name: _metric(target, name, device) for name, target in spec.metrics.items()},
        saving=Saving(spec.checkpoint, checkpointer, state, context),
        logger=_logger(seat, position, total, model) if seat.rank == 0 else None,
        position=position,
        total_steps=total,
        epochs=epochs,
        trace=trace,
        frozen=FrozenSet(model),
    )


def _fix_kernels(spec: RunSpec) -> None:
    """Under `exact`: only kernels that give the same bits every time, chosen without trying which is faster."""
    if spec.numerics == "exact":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; without it its sums vary
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _warn(seat: Seat) -> Callable[[str], None]:
    def warn(text: str) -> None:
        if seat.rank == 0:
            seat.run.record("note", text=text)

    return warn


def _metric(target: Target, name: str, device: torch.device) -> Any:
    metric = build(target, key=("metrics", name))
    return metric.to(device) if hasattr(metric, "to") else metric


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
        exact=spec.numerics == "exact",
        leader=seat.rank % (seat.plan.world // seat.plan.replicas) == 0,
    )


def _logger(seat: Seat, position: Position, total: int | None, model: torch.nn.Module) -> JsonlLogger:
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


def _device(seat: Seat) -> torch.device:
    return torch.device("cuda", seat.rank) if seat.plan.device == "cuda" else torch.device("cpu")


def _join(seat: Seat, device: torch.device) -> None:
    """Join the process group through the store that the launcher holds."""
    plan = seat.plan
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
