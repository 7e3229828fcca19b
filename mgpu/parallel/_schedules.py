"""The schedules of a pipeline: their names, what they need, and how long they leave ranks idle. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from mgpu.errors import PlanError


@dataclass(frozen=True)
class Schedule:
    """`kind` is the class in torch.distributed.pipelining, None for one micro batch at a time.

    `several` tells whether a rank has more than one stage; `v` places them in a V (the last stage beside the first).
    """

    name: str
    kind: str | None
    several: bool = False
    v: bool = False
    rounds: bool = False
    """Micro batches come in rounds of at least as many as there are ranks, all equal."""
    at_least_stages: bool = False
    splits_backward: bool = False
    """It works out the gradients of inputs and of weights apart."""

    def stages(self, ranks: int, chunks: int) -> int:
        """How many stages `ranks` ranks have; `chunks` a rank where the schedule leaves that open."""
        return ranks * (2 if self.v else chunks if self.several else 1)

    def owners(self, ranks: int, chunks: int) -> list[int]:
        """The rank of each stage."""
        stages = self.stages(ranks, chunks)
        if self.v:
            return [*range(ranks), *reversed(range(ranks))]
        return [stage % ranks for stage in range(stages)]

    def fault(self, micro_batches: int, ranks: int, chunks: int) -> str:
        """Why the schedule cannot run so many micro batches; empty where it can."""
        stages = self.stages(ranks, chunks)
        if self.at_least_stages and micro_batches < stages:
            return f"{self.name} needs at least as many micro batches a step as stages: {micro_batches} for {stages} stages"
        rounds = max(1, micro_batches // ranks)
        if self.rounds and micro_batches % rounds:
            return (
                f"{self.name} needs micro batches in equal rounds: {micro_batches} do not divide by {rounds} rounds "
                f"of {ranks} ranks"
            )
        return ""

    def bubble(self, micro_batches: int, ranks: int, chunks: int) -> float:
        """The share of a step that a rank waits, where forward, input gradient and weight gradient take equally long.

        1F1B and GPipe: (p - 1) / (m + p - 1) (Huang et al. 2019); interleaving divides the numerator by the stages of a
        rank (Narayanan et al. 2021); zero bubble leaves a third of it, and none in a V (Qi et al. 2023) with 2p micro
        batches; DualPipeV: (DeepSeek-AI 2025).
        """
        waits = 3.0 * (ranks - 1)
        busy = 3.0 * micro_batches
        if self.kind is None:
            return 1 - 1 / ranks
        if self.name == "zbv":
            waits = 0.0 if micro_batches >= 2 * ranks else waits / 3
        elif self.name == "dualpipev":
            waits = max(0.0, 2.0 * (ranks / 2 - 1))
        elif self.several:
            waits /= chunks * (3 if self.name == "zero-bubble" else 1)
        return waits / (waits + busy)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", "ScheduleGPipe"),
        Schedule("1f1b", "Schedule1F1B", at_least_stages=True),
        Schedule("looped", "ScheduleLoopedBFS", several=True),
        Schedule("interleaved", "ScheduleInterleaved1F1B", several=True, rounds=True),
        Schedule("zero-bubble", "ScheduleInterleavedZeroBubble", several=True, rounds=True, splits_backward=True),
        Schedule("zbv", "ScheduleZBVZeroBubble", several=True, v=True, splits_backward=True),
        Schedule("dualpipev", "ScheduleDualPipeV", several=True, v=True, at_least_stages=True, splits_backward=True),
        Schedule("sequential", None),
    )
}


def check_schedule(schedule: Schedule, counts: tuple[int, ...], ranks: int, chunks: int) -> tuple[str, ...]:
    """The plan's notes; PlanError where a full step cannot be run."""
    for count in sorted(set(counts)):
        if fault := schedule.fault(count, ranks, chunks):
            enough = next((m for m in range(count, 64 * ranks) if not schedule.fault(m, ranks, chunks)), None)
            raise PlanError(
                fault,
                key=("parallel", "schedule"),
                hint=f"{enough} micro batches a step and replica fit (batch.micro), or write schedule: gpipe",
            )
    if not counts:
        return ()
    stages = schedule.stages(ranks, chunks)
    bubble = schedule.bubble(min(counts), ranks, chunks)
    return (
        f"pipeline of {stages} stages, schedule {schedule.name}: ranks wait {bubble:.0%} of a step in theory "
        f"({min(counts)} micro batches)",
    )
