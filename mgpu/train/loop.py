"""The training loop::

for each global batch from the position on:
    forward, backward          the strategy's, leaves the gradient of the whole global batch
    clip, step                 at the learning rate of this step
    log                        when due
    evaluate, save             when due
    stop                       if any rank was asked to: all agree at the same step
evaluate, save                 at the end
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mgpu.checkpoint import Checkpointer, gather_state
from mgpu.data.loading import Course, Share, to_device
from mgpu.data.position import Position
from mgpu.data.seeding import micro_batch_seed
from mgpu.loggers.jsonl import JsonlLogger
from mgpu.parallel.base import MicroBatch, StepLoss, Strategy, Trainable, Window
from mgpu.runs import Run
from mgpu.spec import RunSpec, Span
from mgpu.train.drift import refuse_drift, refuse_unfrozen
from mgpu.train.evaluation import EvaluationData, evaluate
from mgpu.train.schedule import LearningRate


@dataclass
class Training:
    """Everything one rank trains with; `position` says how far it has come."""

    spec: RunSpec
    run: Run
    strategy: Strategy
    trainable: Trainable
    optimizer: torch.optim.Optimizer
    rate: LearningRate
    course: Course
    batches: Iterator[Any]
    evaluation: EvaluationData | None
    metrics: dict[str, Any]
    checkpointer: Checkpointer
    logger: JsonlLogger | None
    position: Position
    total_steps: int

    def run_to_end(self) -> bool:
        """Train to the end, or to an agreed stop; True if the training is complete."""
        clock = Clock()
        self.trainable.module.train()
        trained = self.trainable.trained
        for share in self.course.shares():
            if self.position.step >= self.total_steps:
                break
            totals = self.strategy.forward_backward(self.trainable, self._window(share))
            refuse_unfrozen(self.trainable, trained)
            norm, stepped = self._step()
            before, self.position = self.position, share.after.stepped(self.position.step + stepped)
            done = self._is_last(self.position)
            if stepped and (done or self.position.step % self.spec.log.every == 0):
                self._log(totals, norm, clock)
            if not done and self._due(self.spec.evaluate.every, before):
                self._evaluate()
            if not done and self._due(self.spec.checkpoint.every, before, clock):
                self.save()
            if float(totals.stop_votes) > 0 and not done:
                self.save()
                return False
        self._evaluate()
        self.save()
        return True

    def _window(self, share: Share) -> Window:
        context, seed = self.trainable.context, self.spec.seed

        def micro_batches() -> Iterator[MicroBatch]:
            for index in share.micro_indices:
                batch = to_device(next(self.batches), context.device)
                yield MicroBatch(micro_batch_seed(seed, share.position.batches, index), batch)

        return Window(micro_batches(), share.counts)

    def _step(self) -> tuple[torch.Tensor, bool]:
        """Clip and step. With fp16, a gradient that overflowed is skipped: no step is counted."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.rate.factor(self.position.step)
        scaler = self.trainable.context.scaler
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
        return norm, stepped

    def _is_last(self, position: Position) -> bool:
        return position.step >= self.total_steps or (
            self.course.epochs is not None and position.epoch >= self.course.epochs
        )

    def _due(self, every: Span | None, before: Position, clock: Clock | None = None) -> bool:
        """Whether a span of training ended with this step. Time is rank 0's, so that all ranks agree."""
        if every is None:
            return False
        if every.unit == "steps":
            return self.position.step != before.step and self.position.step % every.count == 0
        if every.unit == "epochs":
            return self.position.epoch != before.epoch and self.position.epoch % every.count == 0
        assert clock is not None
        late = torch.tensor([float(clock.since_save() >= every.seconds)], device=self.trainable.context.device)
        if self.trainable.context.world > 1:
            torch.distributed.broadcast(late, 0)
        if late.item():
            clock.saved()
        return bool(late.item())

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

    def _evaluate(self) -> None:
        if self.evaluation is None:
            return
        values = evaluate(self.trainable, self.evaluation, self.metrics, self.spec.seed)
        if self.logger is not None:
            self.run.record("evaluated", step=self.position.step, **values)

    def closing(self) -> str | None:
        """What the task has to say at the end. On all ranks: where the model is spread, calling it is collective."""
        closing = getattr(self.trainable.task, "closing", None)
        if closing is None:
            return None
        with torch.no_grad():
            text: str | None = closing(self.trainable.model)
        self.trainable.settle()
        return text

    def save(self) -> None:
        """A checkpoint of this step, by all ranks together."""
        started = time.monotonic()
        refuse_drift(self.trainable)
        tensors, plain = gather_state(self.trainable, self.optimizer)
        rank = self.trainable.context.rank
        own = self.strategy.state(self.trainable)
        tensors.update({f"strategy.rank-{rank}.{name}": value for name, value in own.items()})
        scaler = self.trainable.context.scaler
        data = {
            "position": self.position.to_json(),
            "optimizer": plain,
            "scaler": scaler.state_dict() if scaler else None,
        }
        path = self.checkpointer.save(self.position.step, tensors, data)
        if self.logger is not None:
            seconds = round(time.monotonic() - started, 3)
            self.run.record("saved", step=self.position.step, path=str(path.name), seconds=seconds)


class Clock:
    """Rates since the last logged step, on the monotonic clock."""

    def __init__(self) -> None:
        self._started = self._last = self._save = time.monotonic()
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

    def since_save(self) -> float:
        return time.monotonic() - self._save

    def saved(self) -> None:
        self._save = time.monotonic()
