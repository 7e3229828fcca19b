"""The training loop::

for each global batch from the position on:
    forward, backward          the strategy's, leaves the gradient of the whole global batch
    clip, step                 at the learning rate of this step
    log                        when due
    save                       when due
    stop                       if any rank was asked to: all agree at the same step
    evaluate                   when due; its metrics are added to the checkpoint
save, evaluate                 at the end

A checkpoint never waits for an evaluation, which is long, may fail, and is broken off by a stop; what it then lacks is made up
for when the run is resumed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mgpu.data.feed import Feed, Turn
from mgpu.data.loading import to_device
from mgpu.data.position import Position
from mgpu.data.seeding import micro_batch_seed
from mgpu.loggers.jsonl import JsonlLogger
from mgpu.parallel.base import MicroBatch, StepLoss, Strategy, Trainable, Window
from mgpu.runs import Run
from mgpu.runs.heartbeat import Phase
from mgpu.spec import RunSpec
from mgpu.train.drift import FrozenSet, check_alike
from mgpu.train.evaluation import evaluate
from mgpu.train.feeding import EvaluationFeed
from mgpu.train.heart import beat, beating
from mgpu.train.saving import Saving, has_ended
from mgpu.train.schedule import LearningRate
from mgpu.train.trace import Trace


@dataclass
class Training:
    """Everything one rank trains with; `position` says how far it has come."""

    spec: RunSpec
    run: Run
    strategy: Strategy
    trainable: Trainable
    optimizer: torch.optim.Optimizer
    rate: LearningRate
    feed: Feed
    evaluation: EvaluationFeed | None
    metrics: dict[str, Any]
    saving: Saving
    logger: JsonlLogger | None
    position: Position
    total_steps: int | None
    epochs: int | None
    trace: Trace | None
    frozen: FrozenSet
    is_unevaluated: bool = False
    """Whether the evaluation of the step it begins at is still to come."""

    def run_to_end(self) -> bool:
        """Train to the end, or to an agreed stop; True if the training is complete."""
        clock = Clock()
        self.trainable.module.train()
        started_at, phase = self.position.step, Phase.FIRST_STEP
        if self.is_unevaluated and not self._is_last(self.position) and not self._evaluate():
            return self._stop(unevaluated=True)
        for turn in [] if self._is_last(self.position) else self.feed.turns():
            beat(self.position.step + 1, phase)
            totals = self.strategy.forward_backward(self.trainable, self._window(turn))
            self.frozen.check(self.position.step)
            norm, stepped = self._step(totals)
            self.strategy.confirm(self.trainable, totals)
            phase = Phase.TRAINING
            before, self.position = self.position, turn.after.stepped(self.position.step + stepped)
            done = self._is_last(self.position)
            if stepped and (done or self.position.step % self.spec.log.every == 0):
                self._log(totals, norm, clock)
            if stepped and self.position.step == started_at + 1:
                self._check_alike()
            if done:
                break
            due = self.evaluation is not None and has_ended(self.spec.evaluate.every, before, self.position)
            if self.saving.is_due(before, self.position):
                self._check_before_save()
                self.saving.save(self.position, unevaluated=due)
            if float(totals.stop_votes) > 0:
                return self._stop(unevaluated=due)
            if due and not self._evaluate():
                return self._stop(unevaluated=True)
        if self.trace is None and self.evaluation is not None:
            self._check_before_save()
            self.saving.save_last(self.position, unevaluated=True)
            if not self._evaluate():
                return self._stop(unevaluated=True)
        self._finish()
        return True

    def _stop(self, *, unevaluated: bool) -> bool:
        """The end of a training that is asked to stop; `unevaluated` tells the next attempt where to begin."""
        self._finish(unevaluated=unevaluated)
        return False

    def _finish(self, *, unevaluated: bool = False) -> None:
        """As after an evaluation there may still be a save to wait for, this too is the time of a save."""
        self._check_before_save()
        self.saving.finish(self.position, unevaluated=unevaluated)

    def _window(self, turn: Turn) -> Window:
        context, seed = self.trainable.context, self.spec.seed

        def micro_batches() -> Iterator[MicroBatch]:
            for index, batch in self.trace.watch(turn) if self.trace else turn.micro_batches:
                placed = to_device(batch, context.device, context.dtype)
                yield MicroBatch(micro_batch_seed(seed, turn.position.batches, index), placed)

        return Window(micro_batches(), turn.counts)

    def _step(self, totals: StepLoss) -> tuple[torch.Tensor, bool]:
        """Clip and step. With fp16, a gradient that overflowed is skipped: no step is counted."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.rate.factor(self.position.step)
        scaler = self.trainable.context.scaler
        if self.trace:
            self.trace.before_step(self.trainable, scaler.get_scale() if scaler else 1.0)
        if scaler is None:
            norm = self.strategy.clip(self.trainable, self.spec.clip_norm)
            self.optimizer.step()
            stepped = True
        else:
            scaler.unscale_(self.optimizer)
            norm = self.strategy.clip(self.trainable, self.spec.clip_norm)
            scale = scaler.get_scale()
            scaler.step(self.optimizer)
            scaler.update()
            stepped = scaler.get_scale() >= scale
        self.optimizer.zero_grad(set_to_none=True)
        if self.trace and stepped:
            self.trace.after_step(self.position.step + 1, self.trainable, totals, norm, self.optimizer)
        return norm, stepped

    def _is_last(self, position: Position) -> bool:
        return (
            (self.total_steps is not None and position.step >= self.total_steps)
            or (self.epochs is not None and position.epoch >= self.epochs)
            or (self.trace is not None and position.step >= self.trace.steps)
        )

    def _check_before_save(self) -> None:
        beat(self.position.step, Phase.SAVING)
        self._check_alike()

    def _check_alike(self) -> None:
        check_alike(self.trainable, self.position.step)

    def _log(self, totals: StepLoss, norm: torch.Tensor, clock: Clock) -> None:
        if self.logger is None:
            return
        units = float(totals.units)
        values = {
            "step": self.position.step,
            "epoch": self.position.epoch,
            "samples": self.position.samples,
            "loss": float(totals.loss_sum) / units if units else float("nan"),
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": float(norm),
            **clock.rates(self.position.samples, units),
        }
        self.logger.log(self.position.step, values)

    def _evaluate(self) -> bool:
        """False if it was broken off, as all ranks agree, because of a stop."""
        if self.evaluation is None:
            return True
        batches = beating(self.evaluation, self.position.step, Phase.EVALUATING)
        counts = self.evaluation.counts
        values = evaluate(self.trainable, batches, counts, self.metrics, self.spec.seed)
        if values is None:
            return False
        self.saving.measured(self.position.step, values)
        if self.logger is not None:
            self.run.tell("evaluated", step=self.position.step, **values)
        return True

    def closing(self) -> str | None:
        """What the task has to say at the end. On all ranks: where the model is spread, calling it is collective."""
        closing = getattr(self.trainable.task, "closing", None)
        if closing is None:
            return None
        with torch.no_grad():
            text: str | None = closing(self.trainable.model)
        self.trainable.settle()
        return text


class Clock:
    """Rates since the last logged step, on the monotonic clock."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._samples: int | None = None

    def rates(self, samples: int, units: float) -> dict[str, float]:
        """Seconds since the attempt began training, samples and units a second since the last call."""
        now = time.monotonic()
        span = max(now - self._last, 1e-9)
        rates = {"seconds": now - self._started}
        if self._samples is not None:
            rates["samples_per_s"] = (samples - self._samples) / span
            rates["units_per_s"] = units / span
        self._last, self._samples = now, samples
        return rates
