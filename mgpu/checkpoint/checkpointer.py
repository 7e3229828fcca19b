"""Saving, as a rank's training sees it: one call that returns after a copy, and a word on how the save ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mgpu.checkpoint.folder import CheckpointFolder
from mgpu.checkpoint.layout import Layout, Signature, joined, make_layout, signature
from mgpu.checkpoint.publish import Measured, Order, Outcome, Publisher
from mgpu.checkpoint.snapshot import Snapshot
from mgpu.checkpoint.state import State
from mgpu.checkpoint.writer import Connect, Exchange, Work, Writer, WriterGone
from mgpu.errors import CheckpointError
from mgpu.runs.naming import ending

_LONG_WAIT_SECONDS = 1.0
_VERY_LONG_WAIT_SECONDS = 5.0


class Checkpointer:
    """The saves of one attempt, in one rank. `prepare`, `save` and `finish` are called by all ranks together.

    To be made before the rank has threads: it forks the writer. `connect` gives a client of the run's store that only
    this attempt uses (None where there is one rank); `token` is of this attempt.
    """

    def __init__(
        self, publisher: Publisher, *, rank: int, world: int, token: str, connect: Connect | None = None
    ) -> None:
        self.folder: CheckpointFolder = publisher.folder
        self.rank = rank
        self.world = world
        self._token = token
        self._record = publisher.record
        self._work = Work(rank, world, publisher, Exchange(connect))
        self._writer: Writer | None = Writer(self._work)
        self._signature: Signature | None = None
        self._snapshot: Snapshot | None = None
        self._in_flight: Order | None = None
        self._saves = 0
        self._told_of_waiting = False
        self.last: Outcome | None = None

    def started_from(self, step: int) -> None:
        """The checkpoint of `step` is where this attempt begins: until the first save, it is the newest."""
        self.last = Outcome(step)

    def prepare(self, state: State, device: torch.device) -> None:
        """Agree on who writes what, and take the memory for it, so that the first save is as quick as any other."""
        own = signature(state)
        changed = own != self._signature
        if self.world > 1:
            vote = torch.tensor([float(changed)], device=device)
            dist.all_reduce(vote, dist.ReduceOp.MAX)
            changed = bool(vote.item())
        if not changed:
            return
        self.wait()
        layout = make_layout(state, self.rank, self.world)
        if self._snapshot is not None:
            self._snapshot.close()
        self._signature, self._snapshot = own, Snapshot(layout, device)
        self._work.layout = None

    def save(
        self,
        step: int,
        state: State,
        *,
        device: torch.device,
        data: Mapping[str, Any],
        position: Mapping[str, int],
        metrics: Mapping[str, float],
    ) -> None:
        """Save `state` as the checkpoint of `step`. Returns once it is copied; if a save is in flight, that comes first."""
        began = time.monotonic()
        self.wait()
        waited = time.monotonic() - began
        self._tell_of_waiting(waited)
        began = time.monotonic()
        self.prepare(state, device)
        error = self._take(state)
        self._saves += 1
        order = Order(
            number=self._saves,
            step=step,
            token=f"{self._token}-{self._saves}",
            data={"position": dict(position), **state.plain, **data},
            position=position,
            metrics=metrics,
            stall=time.monotonic() - began,
            asked=time.monotonic(),
            waited=waited,
            error=error,
        )
        layout = self._layout_of(order)
        if self.rank and layout is not None:
            order = dataclasses.replace(order, data={} if layout.is_replicated else state.plain)
        self._submit(order)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add what an evaluation has found to the checkpoint of `step`, if that is the newest save."""
        newest = self._in_flight or self.last
        if self.rank or newest is None or newest.step != step:
            return
        try:
            if self._writer is None:
                raise WriterGone
            self._writer.submit(Measured(step, metrics))
        except WriterGone:
            self.wait()
            self._work.publisher.measured(step, metrics)

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight, as far as this rank has heard."""
        return self._in_flight is not None

    def wait(self) -> Outcome | None:
        """How the newest save ended, once it has; None before the first. A long wait is told, now and then."""
        began, pause = time.monotonic(), _VERY_LONG_WAIT_SECONDS
        while self._in_flight is not None and self._settle(pause) is None:
            pause = time.monotonic() - began
            if self.rank == 0:
                text = (
                    f"training has waited {pause:.0f} s for the checkpoint of step {self._in_flight.step} to be written"
                )
                self._record("note", text=text)
        return self.last

    def poll(self) -> Outcome | None:
        """The outcome of the save in flight, if it has just ended."""
        return self._settle(0) if self._in_flight else None

    def linger(self, seconds: float) -> None:
        """Give the save in flight time to be written, by a rank that has failed since: nothing is raised."""
        if self._in_flight is None or self._writer is None:
            return
        what = f"the checkpoint of step {self._in_flight.step}"
        with contextlib.suppress(WriterGone):
            if self._writer.outcome(min(seconds, _LONG_WAIT_SECONDS)) is not None:
                return
            self._record("note", text=f"rank {self.rank} has failed; {what}, from before, is still being written")
            if self._writer.outcome(seconds) is None:
                self._record("note", text=f"{what} was given up: it was not written within {seconds:.0f} s")

    def close(self) -> None:
        """Wait for the save in flight and end the writer."""
        self.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    def _tell_of_waiting(self, seconds: float) -> None:
        if self.rank == 0 and seconds > _LONG_WAIT_SECONDS and not self._told_of_waiting:
            self._told_of_waiting = True
            text = f"training waited {seconds:.1f} s for the save before: checkpoint.every is shorter than a save takes"
            self._record("note", text=text)

    def _take(self, state: State) -> str:
        """Copy the state; what went wrong, if it did. Peers must hear of it, or they would wait for this rank's part."""
        assert self._snapshot is not None
        try:
            self._snapshot.take({joined(path): tensor for path, tensor in state.tensors.items()})
        except (OSError, MemoryError, RuntimeError) as error:
            self._signature = None  # try for the memory again the next time
            return f"no memory for the snapshot ({self._snapshot.layout.bytes} bytes): {error}"
        return ""

    def _submit(self, order: Order) -> None:
        self._in_flight = order
        layout, writer = self._layout_of(order), self._writer
        try:
            if writer is None:
                raise WriterGone
            if layout is not None and self._work.layout is not layout:
                assert self._snapshot is not None
                writer.lay_out(layout, self._snapshot.memory)
                self._work.layout, self._work.memory = layout, self._snapshot.memory
            writer.submit(order)
        except WriterGone:
            if layout is not None and self._snapshot is not None:
                self._work.layout, self._work.memory = layout, self._snapshot.memory
            self._lose_writer()
            self._ended(self._work.carry_out(order))

    def _layout_of(self, order: Order) -> Layout | None:
        return None if order.error or self._snapshot is None else self._snapshot.layout

    def _settle(self, timeout: float | None) -> Outcome | None:
        assert self._in_flight is not None
        try:
            assert self._writer is not None
            outcome = self._writer.outcome(timeout)
        except WriterGone:
            outcome = self._work.take_over(self._in_flight, f"its writer process {self._lose_writer()}")
        if outcome is not None:
            self._ended(outcome)
        return outcome

    def _ended(self, outcome: Outcome) -> None:
        self._in_flight = None
        self.last = outcome

    def _lose_writer(self) -> str:
        """Take its end in and tell of it; how it ended."""
        if self._writer is None:
            return "had ended"
        _, status = os.waitpid(self._writer.pid, 0)
        self._writer = None
        how = ending(os.waitstatus_to_exitcode(status))
        self._record(
            "note", text=f"the checkpoint writer of rank {self.rank} {how}: rank {self.rank} now writes itself"
        )
        return how


def failure(checkpointer: Checkpointer) -> CheckpointError | None:
    """Why a run must not end as if all were well: its last save failed, or none succeeded."""
    last = checkpointer.last
    if last is None or not last.error:
        return None
    steps = checkpointer.folder.steps()
    there = f"the newest checkpoint is of step {steps[0]}" if steps else "there is no checkpoint of this run"
    return CheckpointError(
        f"the checkpoint of step {last.step} was not saved: {last.error}", hint=f"{there}; mend that, then resume"
    )
