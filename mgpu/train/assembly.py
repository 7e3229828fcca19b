"""From a spec to a training that is ready to run, in one rank: data, process group, model, optimizer, what is restored."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: forked ranks find it loaded
import torch.distributed as dist

from mgpu.checkpoint.restore import read_extra, restore
from mgpu.checkpoint.state import TrainingState
from mgpu.checkpoint.weights import load_weights
from mgpu.data.feed import Agreement, Feed
from mgpu.data.loading import to_device
from mgpu.data.position import Position
from mgpu.data.seeding import seed_everything, weights_seed
from mgpu.errors import PlanError
from mgpu.loggers.jsonl import JsonlLogger
from mgpu.parallel._exact import why_not_exact
from mgpu.parallel.base import Context, StopVote, Strategy, Trainable
from mgpu.plan import Plan, make_strategy
from mgpu.runs import Run
from mgpu.spec import RunSpec, Target
from mgpu.train.census import count_parameters
from mgpu.train.drift import FrozenSet
from mgpu.train.feeding import Sources
from mgpu.train.loop import Training
from mgpu.train.saving import Saving, Start, changes_of_order, choose_start, make_checkpointer
from mgpu.train.schedule import learning_rate
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
    position = Position()
    if start.checkpoint:
        position = Position.from_json(start.checkpoint.data["position"])
        checkpointer.started_from(position.step)
    position = sources.grid.settle(position)
    epochs = spec.duration.count if spec.duration.unit == "epochs" and not spec.trace else None
    device, warn = _device(seat), _warn(seat)
    feed = sources.feed(position, epochs, Agreement(seat.replica, plan.replicas, plan.world, device), warn)
    evaluation = sources.evaluation_feed(seat.replica, plan.replicas, device)
    _join(seat, device)
    strategy = make_strategy(spec)
    context = _context(spec, seat, strategy, device, feed)
    trace = Trace(run.path / "trace", seat.rank, spec.trace.steps) if spec.trace else None
    trainable = _lay_out(spec, strategy, context, trace)
    optimizer = _optimizer(spec.optimizer, trainable)
    state = TrainingState(trainable.model, optimizer, is_whole=trainable.owned is None, aliases=trainable.aliases)
    mine = f"rank-{seat.rank}."
    notes = _begin(start, state, strategy, trainable, mine)
    order = {"samples": sources.samples, "seed": spec.seed}
    for note in (*trainable.notes, *notes, *changes_of_order(start, order)):
        warn(note)
    parameters = count_parameters(trainable)
    total = sources.total_steps(position)
    return Training(
        spec=spec,
        run=run,
        strategy=strategy,
        trainable=trainable,
        optimizer=optimizer,
        rate=learning_rate(spec, sources.steps_per_epoch, total),
        feed=feed,
        evaluation=evaluation,
        metrics={name: _metric(target, name, device) for name, target in spec.metrics.items()},
        saving=Saving(
            spec.checkpoint,
            checkpointer,
            state,
            context,
            lambda: {mine + name: value for name, value in strategy.state(trainable).items()},
            {"order": order},
        ),
        logger=_logger(seat, position, total, parameters) if seat.rank == 0 else None,
        position=position,
        total_steps=total,
        epochs=epochs,
        trace=trace,
        frozen=FrozenSet(trainable),
        is_unevaluated=start.is_unevaluated,
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
            seat.run.tell("note", text=text)

    return warn


def _metric(target: Target, name: str, device: torch.device) -> Any:
    metric = build(target, key=("metrics", name))
    return metric.to(device) if hasattr(metric, "to") else metric


def _lay_out(spec: RunSpec, strategy: Strategy, context: Context, trace: Trace | None) -> Trainable:
    """The model, drawn from the same seed in every layout, laid over the ranks."""

    def make() -> torch.nn.Module:
        assert spec.model
        seed_everything(weights_seed(spec.seed))
        model: torch.nn.Module = build(spec.model, key=("model",))
        if not isinstance(model, torch.nn.Module):
            raise PlanError(f"model: {spec.model.target} gives a {type(model).__name__}, which is no torch.nn.Module")
        if context.exact and (reason := why_not_exact(model)):
            raise PlanError(f"numerics: the model cannot be exact: {reason}")
        return model.to(context.dtype) if context.dtype else model

    task = build(spec.task, key=("task",))
    return strategy.build(strategy.materialize(make, context), trace.listen(task) if trace else task, context)


def _begin(start: Start, state: TrainingState, strategy: Strategy, trainable: Trainable, mine: str) -> list[str]:
    """Load what the training starts from; returns what differs from the spec in force. `mine`: names of this rank's extras."""
    if start.weights is not None:
        load_weights(start.weights, state.model, state.aliases, is_whole=state.is_whole)
    if start.checkpoint is None:
        return []
    notes = restore(start.checkpoint, state)
    strategy.load_state(trainable, read_extra(start.checkpoint, mine))
    scaler = trainable.context.scaler
    if scaler is not None and start.checkpoint.data.get("scaler"):
        scaler.load_state_dict(start.checkpoint.data["scaler"])
    return notes


def _context(spec: RunSpec, seat: Seat, strategy: Strategy, device: torch.device, feed: Feed) -> Context:
    assert spec.batch and spec.optimizer
    optimizer = spec.optimizer
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
        exact=spec.numerics == "exact",
        example=lambda: to_device(feed.first(), device, context.dtype),
        optimizer=lambda parameters: build(optimizer, parameters, key=("optimizer",)),
        folder=seat.run.path,
    )
    scaler = strategy.scaler(context) if spec.precision == "fp16" else None
    return dataclasses.replace(context, scaler=scaler)


def _devices(plan: Plan, device: torch.device) -> tuple[torch.device, ...]:
    """What this rank drives: its own device, or all of them where the run has one process."""
    if plan.world > 1 or len(plan.devices) == 1:
        return (device,)
    return tuple(torch.device("cuda", index) if plan.device == "cuda" else device for index in range(len(plan.devices)))


def _logger(seat: Seat, position: Position, total: int | None, parameters: dict[str, Any]) -> JsonlLogger:
    logger = JsonlLogger()
    logger.open(seat.run, resume_step=position.step)
    seat.run.tell("training", attempt=seat.attempt, start_step=position.step, total_steps=total, **parameters)
    return logger


def _optimizer(target: Target, trainable: Trainable) -> torch.optim.Optimizer:
    """Sharded and plain parameters in groups of their own: an optimizer's fused passes take no mixture."""
    # A rank whose stage is frozen has nothing to train, which no optimizer takes.
    parameters = trainable.parameters or [torch.nn.Parameter(torch.empty(0))]
    optimizer: torch.optim.Optimizer = build(target, parameters, key=("optimizer",))
    for group in list(optimizer.param_groups):
        kinds: dict[type, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            kinds.setdefault(type(parameter.data), []).append(parameter)
        group["params"], *others = kinds.values() or [[]]
        for other in others:
            optimizer.add_param_group({**group, "params": other})
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
