"""What a spec may say. The docstring under a field is its reference: the schema, the docs and the errors show it."""

from __future__ import annotations

import signal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mgpu.spec.values import CheckpointSpan, DeviceRequest, Span, TimeSpan, TrainingSpan, WarmupSpan, WholeNumber


class SpecModel(BaseModel):
    """Strict and frozen: no unknown key, no `true` for 1, no NaN."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Target(SpecModel):
    """An object to build: `{target: module:attribute, args: {...}}`, or the bare text `module:attribute`."""

    target: str = Field(pattern=r"^[^:\s][^:]*:[A-Za-z_][\w.]*$")
    """`package.module:attribute`, or `file.py:attribute` with the file relative to the spec."""
    args: dict[str, Any] = {}
    """Keyword arguments. A value that is itself a mapping with `target` is built first."""


def _as_target(value: object) -> object:
    return {"target": value} if isinstance(value, str) else value


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


BuildTarget = Annotated[Target, BeforeValidator(_as_target)]


class Data(SpecModel):
    """Where samples come from."""

    train: BuildTarget
    """The training data set: an object with `__len__` and `__getitem__`, or an iterable one (torch's IterableDataset)."""
    eval: BuildTarget | None = None
    """The evaluation data set."""
    workers: WholeNumber = Field(default=0, ge=0, le=256)
    """Loader processes of each rank; 0 loads in the rank itself. Never changes what is computed."""
    start: Literal["fork", "spawn", "forkserver"] = "fork"
    """How loader processes are started."""
    collate: BuildTarget | None = None
    """Called with a list of samples, returns a batch (the built object is the function); default: torch's."""
    sampler: BuildTarget | None = None
    """Called with the training data set, returns a torch sampler, which gives the order of every epoch in place of mgpu's
    shuffle. It is listed after seeding from (seed, epoch); one whose order depends on the layout is refused."""
    sharded: bool = False
    """An iterable data set that gives each rank (RANK, WORLD_SIZE) and loader worker a part of its own by itself. Default:
    it gives the same stream to all, and mgpu splits it, so that the layout is no part of the result."""
    uneven: Literal["use_all", "shortest", "error"] = "use_all"
    """With `sharded`, where the parts end at different lengths: train on what is left, end the epoch with the shortest
    part (and say so), or fail naming the lengths."""


class Schedule(SpecModel):
    """The learning rate as a factor on the optimizer's own, a function of the step alone."""

    warmup: WarmupSpan | None = None
    """Linear rise from 0 over this span: the factor of step k (from 0) is (k + 1) / warm-up."""
    shape: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, up to the end of `duration`."""
    floor: float = Field(default=0.0, ge=0.0, le=1.0)
    """The factor that linear and cosine end at."""


class Batch(SpecModel):
    """Samples per optimizer step, and how they are cut."""

    size: WholeNumber = Field(ge=1)
    """The global batch: samples per optimizer step, over all devices."""
    micro: WholeNumber | None = Field(default=None, ge=1)
    """Samples per forward pass of one replica; `size` is a multiple of it. Default: `size` in 8 parts if it divides so."""
    last: Literal["keep", "drop"] = "keep"
    """What happens to the incomplete last global batch of an epoch."""

    @property
    def micro_size(self) -> int:
        """`micro`, or its default, which depends on `size` alone: never on the number of devices."""
        if self.micro is not None:
            return self.micro
        parts = next(parts for parts in (8, 4, 2, 1) if self.size % parts == 0)
        return self.size // parts

    @model_validator(mode="after")
    def _size_is_multiple_of_micro(self) -> Batch:
        if self.micro is not None and self.size % self.micro:
            fits = [m for m in range(1, self.size + 1) if self.size % m == 0]
            near = sorted(sorted(fits, key=lambda m: abs(m - self.micro))[:2])  # type: ignore[operator]
            below = self.size - self.size % self.micro
            sizes = [s for s in (below, below + self.micro) if s]
            raise ValueError(
                f"size {self.size} is not a multiple of micro {self.micro}: "
                f"write micro {' or '.join(map(str, near))}, or size {' or '.join(map(str, sizes))}"
            )
        return self


class Parallel(BaseModel):
    """The strategy and its options, which the strategy itself checks."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)

    strategy: str = "ddp"
    """How work is split over devices: a built-in name, or `package.module:Class`."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class KeepBest(SpecModel):
    """Which checkpoint is the best one."""

    metric: str
    """The name of a metric under `metrics`, or `loss`: as measured on the evaluation data."""
    mode: Literal["min", "max"] = "min"
    """Whether low or high is good."""


class Checkpoint(SpecModel):
    """When to save, and what to keep."""

    every: CheckpointSpan | None = None
    """Save after every span of this length, in steps, epochs or minutes; default: only at the end."""
    keep: WholeNumber = Field(default=3, ge=1)
    """How many of the newest checkpoints stay."""
    keep_best: KeepBest | None = None
    """Keep the checkpoint with the best value of a metric as well. Only steps that are evaluated can be the best."""
    keep_every: TrainingSpan | None = None
    """Keep every checkpoint at a multiple of this span as well."""
    at_exit: bool = True
    """Save at the end of the run, and when it is stopped."""
    asynchronous: bool = Field(default=True, alias="async")
    """Write in the background while training goes on; otherwise training waits until the checkpoint is on disk."""


class Evaluate(SpecModel):
    """When the evaluation data is gone through."""

    every: TrainingSpan | None = None
    """Evaluate after every span of this length; always at the end as well."""


class Watchdog(SpecModel):
    """How long to wait before something is ended, and which signal asks for that."""

    hang: TimeSpan = Span(10, "minutes")
    """No progress for this long is a hang: the stacks of all ranks are written, the odd one is named, exit 3. Counted from
    the last step, or evaluation batch. A script is watched from its first `mgpu.train.beat(step)` on."""
    start: TimeSpan = Span(30, "minutes")
    """The same for what takes its time: loading before the first step, the first step itself, a save, the end."""
    grace: TimeSpan = Span(30, "seconds")
    """How long a stopped run has to save its checkpoint."""
    preempt_signal: Literal["USR1", "USR2", "TERM"] = "USR1"
    """The signal that announces a preemption: save, then exit 75, for a scheduler to start the run again."""

    @property
    def preempt(self) -> signal.Signals:
        return signal.Signals[f"SIG{self.preempt_signal}"]


class Restart(SpecModel):
    """New attempts after a failure. A run is started again only if it has saved a new checkpoint since its last start (a
    script: if it ran for a minute), and never for an error that would come again: an import, or the same error at the same
    step twice."""

    max: WholeNumber = Field(default=0, ge=0)
    """How many times a failed run is started again by itself."""
    window: TimeSpan | None = None
    """Only restarts within the last span of this length count against `max`; default: all of them."""


class Trace(SpecModel):
    """What `mgpu verify` reads: each of the first steps in full, in trace/rank-<r>.jsonl."""

    steps: WholeNumber = Field(ge=1)
    """Record this many steps, then end; nothing is evaluated."""
    samples: WholeNumber | None = Field(default=None, ge=1)
    """Go through only so many samples an epoch, so that the end of an epoch is among the steps."""


class Log(SpecModel):
    """What is written to metrics.jsonl, and to the logs of the ranks."""

    every: WholeNumber = Field(default=1, ge=1)
    """Steps between two logged steps; the last step is always logged."""
    output_mb: WholeNumber = Field(default=256, ge=1)
    """A rank's log that grows beyond this many MB is set aside as rank-N.log.1, in place of the one before it."""


class ClusterSpec(BaseModel):
    """Where the run takes place. Options of an engine are checked by the engine."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)

    engine: str = "local"
    """The cluster engine: a built-in name, or `package.module:Class`."""


class Script(SpecModel):
    """A `torchrun`-compatible script, run under the same supervision in place of model, data, task and optimizer."""

    path: str
    """The script, relative to the spec."""
    args: Annotated[tuple[str | int | float, ...], BeforeValidator(_as_tuple)] = ()
    """Its command line."""


class RunSpec(SpecModel):
    """One training, whole: what is trained, on what, for how long, and how the work is split."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    """The run's name; its id adds the date and four characters. Default: the spec's file name."""
    seed: WholeNumber = Field(default=0, ge=0, lt=2**63)
    """Decides weights, order, augmentation and dropout, together with position only."""
    model: BuildTarget | None = None
    """The module to train: a class or a function that returns one."""
    data: Data | None = None
    """The data sets."""
    task: BuildTarget = Target(target="mgpu.train:Supervised")
    """How a batch becomes a loss."""
    metrics: dict[str, BuildTarget] = {}
    """Evaluation metrics by name: torchmetrics objects, or anything with update(predictions, targets), compute() and reset()."""
    optimizer: BuildTarget | None = None
    """Called with the parameters and `args`."""
    schedule: Schedule = Schedule()
    """The learning rate over the run."""
    batch: Batch | None = None
    """The global batch."""
    duration: TrainingSpan | None = None
    """How long to train: `N steps` or `N epochs`."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32"
    """Arithmetic of the forward pass. Parameters stay in fp32, but for fp64, where all is in double precision."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest norm of the whole gradient."""
    compile: bool | str = False
    """Compile the model's blocks with torch.compile; a text is the name of its backend (true: inductor)."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What is computed again in backward rather than kept: nothing, all but matrix products, or each whole block."""
    numerics: Literal["fast", "exact"] = "fast"
    """`fast` agrees between layouts to rounding; `exact` to the last bit."""
    threads: WholeNumber | None = Field(default=None, ge=1, le=1024)
    """CPU threads of each rank. Default: the CPUs shared out over the ranks; under `exact` 1, the same in every layout."""
    devices: DeviceRequest = DeviceRequest("auto")
    """`auto`, a number of GPUs, a list of GPU indices, or `cpu:N`; `auto:N` takes N GPUs, or N CPU processes without GPUs."""
    parallel: Parallel = Parallel()
    """The strategy."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving."""
    evaluate: Evaluate = Evaluate()
    """Evaluation."""
    init_from: str | None = None
    """Start from the weights of a run (id, prefix or path), of a checkpoint's folder, or of a safetensors file."""
    restart: Restart = Restart()
    """Automatic new attempts."""
    watchdog: Watchdog = Watchdog()
    """Time limits."""
    log: Log = Log()
    """Logging."""
    trace: Trace | None = None
    """Record the first steps in full, then end."""
    loggers: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ("console",)
    """Where metrics are shown beside metrics.jsonl."""
    cluster: ClusterSpec = ClusterSpec()
    """The cluster engine."""
    script: Script | None = None
    """Run a script in place of model, data, task and optimizer."""

    @model_validator(mode="after")
    def _says_what_to_train(self) -> RunSpec:
        trained = ("model", "data", "optimizer", "batch", "duration")
        if self.script is None:
            missing = [name for name in trained if getattr(self, name) is None]
            if missing:
                raise ValueError(f"missing: {', '.join(missing)} (or give a script)")
            return self
        others = ("task", "metrics", "schedule", "evaluate", "checkpoint", "init_from")
        extra = sorted({*trained, *others} & self.model_fields_set)
        if extra:
            raise ValueError(f"a script does its own {', '.join(extra)}: remove them, or remove script")
        return self

    @model_validator(mode="after")
    def _warmup_fits_duration(self) -> RunSpec:
        warmup, duration = self.schedule.warmup, self.duration
        if warmup and duration and warmup.unit == duration.unit and warmup.count > duration.count:
            raise ValueError(f"schedule.warmup: {warmup} is longer than the duration, {duration}")
        return self

    @model_validator(mode="after")
    def _exact_can_be(self) -> RunSpec:
        if self.numerics == "exact" and self.data is not None and self.data.sharded:
            raise ValueError("numerics: exact is not possible with data.sharded, where the data depends on the layout")
        return self

    @model_validator(mode="after")
    def _evaluation_has_data(self) -> RunSpec:
        if self.data is not None and self.data.eval is None:
            if self.evaluate.every is not None:
                raise ValueError("evaluate.every: is set, but data.eval is not")
            if self.metrics:
                raise ValueError("metrics: are set, but data.eval is not")
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> RunSpec:
        best, every, measured = self.checkpoint.keep_best, self.checkpoint.every, self.evaluate.every
        if best is None or self.data is None:
            return self
        if self.data.eval is None:
            raise ValueError("checkpoint.keep_best: needs evaluation data, and data.eval is not set")
        known = sorted({"loss", *self.metrics})
        if best.metric not in known:
            raise ValueError(f"checkpoint.keep_best.metric: {best.metric!r} is not measured: {' or '.join(known)}")
        if every is None or every.unit == "minutes":
            return self
        if measured is None or (measured.unit == every.unit and every.count % measured.count):
            raise ValueError(
                f"checkpoint.keep_best: a checkpoint every {every} is only compared where it is evaluated: "
                f"write evaluate.every: {every}"
            )
        return self
