"""What one rank does from its start to its end. Imported by the spawner before it forks, so it runs no torch op itself."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # forked ranks find it loaded

from mgpu.checkpoint import Checkpointer, Found, restore_state
from mgpu.data.loading import Course, EvaluationCourse, make_loader
from mgpu.data.position import BatchGrid, Position
from mgpu.data.seeding import seed_everything, weights_seed
from mgpu.errors import CheckpointError, DataError
from mgpu.files import write_json
from mgpu.loggers.jsonl import JsonlLogger
from mgpu.parallel.base import Context, StopVote
from mgpu.plan import Plan, make_strategy
from mgpu.runs import Run
from mgpu.spec import RunSpec, Span, Target, load_spec
from mgpu.topology.binding import bind_process
from mgpu.train.loop import Training
from mgpu.train.schedule import LearningRate
from mgpu.train.targets import build

PR_SET_PDEATHSIG = 1


def run_rank(rank: int, path: str, attempt: int, port: int) -> None:
    """The body of the rank's process. Every error is written to failures/<attempt>/rank-<r>.json, then exit 1."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    run = Run(Path(path))
    plan = Plan.from_json(json.loads(run.plan_path.read_text()))
    _redirect(run.log_path(attempt, rank))
    if plan.cpus:
        print(f"rank {rank}: {bind_process(plan.cpus[rank])}")
    os.environ.update(plan.env(rank), MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(TORCHELASTIC_RUN_ID=run.id, TORCHELASTIC_RESTART_COUNT="0", MGPU_RUN=path)
    stop = StopVote()
    _listen_for_stop(stop)
    try:
        spec = load_spec(run.spec_path).spec
        if spec.script is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _run_script(spec.script.path, spec.script.args)
        else:
            _train(run, spec, plan, rank, attempt, port, stop)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        _leave(code)
    except BaseException as error:  # the rank ends here, and the record is how its end is explained
        write_failure(run.failure_path(attempt, rank), error, rank)
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    """End at once: a peer that died would otherwise hold up the teardown of the process group."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - open for the life of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _listen_for_stop(stop: StopVote) -> None:
    def ask(signum: int, frame: FrameType | None) -> None:
        stop.asked = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def write_failure(path: Path, error: BaseException, rank: int) -> None:
    """Record `error` for the judge: type, text, place in user code, traceback, monotonic stamp."""
    frames = traceback.extract_tb(error.__traceback__)
    library = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    own = [frame for frame in frames if not frame.filename.startswith((*library, "<"))]
    place = (own or list(frames))[-1] if frames else None
    path.parent.mkdir(parents=True, exist_ok=True)
    in_torch = bool(frames) and frames[-1].filename.startswith(library[0])
    record = {
        "rank": rank,
        "type": type(error).__name__,
        "message": str(error),
        "place": f"{place.filename}:{place.lineno} in {place.name}" if place else "",
        "victim": in_torch and isinstance(error, RuntimeError),
        "monotonic_ns": time.monotonic_ns(),
        "traceback": "".join(traceback.format_exception(error)),
    }
    write_json(path, record)


def _run_script(path: str, args: tuple[str | int | float, ...]) -> None:
    sys.argv = [path, *map(str, args)]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _train(run: Run, spec: RunSpec, plan: Plan, rank: int, attempt: int, port: int, stop: StopVote) -> None:
    """Assemble the training, run it, and say how it ended."""
    torch.set_num_threads(plan.threads)
    if spec.precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    training = _assemble(run, spec, plan, rank, attempt, port, stop)
    completed = training.run_to_end()
    if training.logger is None:
        return
    closing = getattr(training.trainable.task, "closing", None)
    if completed and closing and (text := closing(training.trainable.model)):
        run.record("note", text=text)
    outcome = "completed" if completed else "stopped"
    run.record(outcome, attempt=attempt, step=training.position.step)
    training.logger.close(outcome)


def _assemble(run: Run, spec: RunSpec, plan: Plan, rank: int, attempt: int, port: int, stop: StopVote) -> Training:
    assert spec.data and spec.model and spec.optimizer and spec.batch and spec.duration
    seed_everything(weights_seed(spec.seed))
    train_data = build(spec.data.train, key=("data", "train"))
    eval_data = build(spec.data.eval, key=("data", "eval")) if spec.data.eval else None
    grid = BatchGrid(n=len(train_data), size=spec.batch.size, micro=spec.batch.micro_size, last=spec.batch.last)
    if grid.batches_per_epoch == 0:
        raise DataError(
            f"{len(train_data)} samples are fewer than one batch of {spec.batch.size}, and batch.last is drop"
        )
    checkpointer = Checkpointer(run.checkpoints, spec.checkpoint.keep)
    found = _newest(run, checkpointer, rank)
    position = Position.from_json(found.data["position"]) if found else Position()
    epochs = spec.duration.count if spec.duration.unit == "epochs" else None
    course = Course(grid, spec.seed, position, _replica(rank, plan), plan.replicas, epochs)
    # Loader processes are forked here, before this rank has threads or a device.
    batches = iter(_loader(train_data, course, spec, plan, spec.data.workers))
    device = _join(plan, rank, port, attempt)
    context = _context(spec, plan, rank, device, stop)
    seed_everything(weights_seed(spec.seed))
    model = build(spec.model, key=("model",)).to(device)
    optimizer = _optimizer(spec.optimizer, model)
    if found:
        restore_state(found, model, optimizer)
        if context.scaler is not None and found.data.get("scaler"):
            context.scaler.load_state_dict(found.data["scaler"])
    strategy = make_strategy(spec)
    trainable = strategy.build(model, build(spec.task, key=("task",)), context)
    total = spec.duration.count * (grid.batches_per_epoch if epochs else 1)
    evaluation = None
    if eval_data is not None:
        keys = EvaluationCourse(len(eval_data), spec.batch.micro_size, context.replica, plan.replicas)
        evaluation = _loader(eval_data, keys, spec, plan, workers=0)
    return Training(
        spec=spec, run=run, strategy=strategy, trainable=trainable, optimizer=optimizer, rate=_rate(spec, grid, total),
        course=course, batches=batches, evaluation=evaluation,
        metrics={name: build(target, key=("metrics", name)).to(device) for name, target in spec.metrics.items()},
        checkpointer=checkpointer, logger=_logger(run, attempt, position, total, model) if rank == 0 else None,
        position=position, total_steps=total,
    )  # fmt: skip


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


def _context(spec: RunSpec, plan: Plan, rank: int, device: torch.device, stop: StopVote) -> Context:
    assert spec.batch
    return Context(
        rank=rank,
        world=plan.world,
        replica=_replica(rank, plan),
        replicas=plan.replicas,
        device=device,
        precision=spec.precision,
        loss_scale=2.0 ** -(spec.batch.size - 1).bit_length(),
        scaler=torch.amp.GradScaler(device.type) if spec.precision == "fp16" else None,
        stop=stop,
        reseed=seed_everything,
    )


def _logger(run: Run, attempt: int, position: Position, total: int, model: torch.nn.Module) -> JsonlLogger:
    logger = JsonlLogger()
    logger.open(run, resume_step=position.step)
    count = sum(parameter.numel() for parameter in model.parameters())
    run.record("training", attempt=attempt, start_step=position.step, total_steps=total, parameters=count)
    return logger


def _replica(rank: int, plan: Plan) -> int:
    return rank * plan.replicas // plan.world


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


def _join(plan: Plan, rank: int, port: int, attempt: int) -> torch.device:
    """Join the process group through the store that the launcher holds; the rank's own device."""
    device = torch.device("cuda", rank) if plan.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if plan.world > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(minutes=5))
        dist.init_process_group(
            plan.backend,
            store=dist.PrefixStore(f"attempt-{attempt}", store),
            rank=rank,
            world_size=plan.world,
            device_id=device if device.type == "cuda" else None,
        )
    return device
