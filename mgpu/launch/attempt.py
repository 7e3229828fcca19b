"""One start of a run's ranks on this host: start → watch → end. What it leaves is evidence; `diagnosis` judges it."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgpu.files import write_atomic
from mgpu.launch import memory, stacks
from mgpu.launch.output import LogKeeper
from mgpu.launch.processes import STOPPED, descendants_of, end_all, end_groups, is_alive, send, state_of
from mgpu.launch.spawner_handle import SpawnerGone, SpawnerHandle
from mgpu.launch.stacks import Stack
from mgpu.launch.stopping import StopRequest
from mgpu.launch.watchdog import Hang, HangWatch
from mgpu.plan.plan import Plan
from mgpu.runs import Run
from mgpu.runs.heartbeat import Beat, Board, Ended
from mgpu.runs.liveness import this_process
from mgpu.runs.requests import catches
from mgpu.spec import RunSpec

_TICK_SECONDS = 0.1
_SETTLE_SECONDS = 2.0
"""After the first failure, for the others to record how it hit them."""
_END_SECONDS = 1.5
"""For a script's ranks to tidy up, once the attempt has failed."""
_REAP_SECONDS = 2.0


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended. A negative code is a signal; `by_us` if the supervisor had sent it."""

    rank: int
    code: int
    seen_ns: int
    peak_bytes: int
    by_us: bool


@dataclass
class Evidence:
    """What is known once no rank runs any more."""

    attempt: int
    is_script: bool
    exits: dict[int, Exit] = field(default_factory=dict)
    beats: Mapping[int, Beat] = field(default_factory=dict)
    beats_at_exit: dict[int, dict[int, Beat]] = field(default_factory=dict)
    """All slots, as they were when the rank of the key was seen to be gone."""
    pids: list[int] = field(default_factory=list)
    hang: Hang | None = None
    stacks: Mapping[int, Stack] = field(default_factory=dict)
    orphaned: bool = False
    spawner_gone: str = ""
    folder_gone: bool = False
    """Whether somebody has removed the run's folder: nothing of it can be kept any more."""
    store: int = 0
    """The process that holds the store which the ranks meet in."""
    store_ended: int | None = None
    """How it ended, before its time: an exit code, or a signal as a negative one."""
    store_halted: bool = False
    memory_before: dict[str, memory.Group] = field(default_factory=dict)
    stopped_ns: int | None = None
    """When the ranks were told to stop, if they were."""
    seconds: float = 0.0


class Attempt:
    """Owns the ranks from their fork to their end."""

    def __init__(
        self, run: Run, number: int, spec: RunSpec, plan: Plan, spawner: SpawnerHandle, board: Board, stop: StopRequest
    ) -> None:
        self.run, self.number, self.spec, self.plan = run, number, spec, plan
        self.spawner, self.board, self.stop = spawner, board, stop
        self.evidence = Evidence(number, spec.script is not None)
        self._deadline: float | None = None
        """When a stop must have come to its end."""
        self._first_failure: float | None = None
        self._settled: float | None = None
        """When a failure is over."""

    def start(self) -> None:
        """Fork the ranks and say so."""
        self.board.clear()
        pids, port, store = self.spawner.start(str(self.run.path), self.number, self.plan.world)
        self.evidence.pids, self.evidence.store = pids, store
        for pid in (self.spawner.pid, store, *pids):
            self.evidence.memory_before.update(memory.groups_of(pid))
        self.run.tell(
            "attempt_started",
            attempt=self.number,
            **this_process(),
            master_port=port,
            world=self.plan.world,
            pids=pids,
            heartbeats=self.board.descriptor,
        )

    def watch(self) -> None:
        """Until all ranks are gone, one has failed and the others had time to follow, nobody moves, or it must end."""
        began = time.monotonic()
        hang_watch = HangWatch(self.spec.watchdog)
        events = _identity(self.run.events_path)
        keeper = LogKeeper(self.run, self.number, self.plan.world, self.spec.log.output_mb << 20)
        try:
            while self._living():
                self._take_in(_TICK_SECONDS)
                self.evidence.beats = self.board.all()
                now = time.monotonic()
                if _identity(self.run.events_path) != events:
                    self.evidence.folder_gone = True
                    return
                keeper.tick(now, self.evidence.pids)
                self._look_for_failure(now)
                if self.plan.world > 1 and self._living():
                    self.evidence.store_ended = self.spawner.ended_stores.get(self.evidence.store)
                if self.evidence.store_ended is not None and self.evidence.stopped_ns is None:
                    return
                is_asked = self.stop.look()
                if self.stop.is_orphaned:
                    self.evidence.orphaned = True
                    return
                if is_asked:
                    self._pass_on(now)
                deadlines = [at for at in (self._deadline, self._settled) if at is not None]
                if deadlines and now >= min(deadlines):
                    return
                if not deadlines:
                    self.evidence.hang = hang_watch.check(self.evidence.beats, self._living(), time.monotonic_ns())
                    if self.evidence.hang is not None:
                        self.evidence.store_halted = state_of(self.evidence.store) in STOPPED
                        return
        except SpawnerGone as gone:
            self.evidence.spawner_gone = gone.message
        finally:
            self.evidence.seconds = time.monotonic() - began

    def end(self) -> None:
        """Nothing stays: the group of every rank is ended, whether the rank still lives or not, and all that came of it."""
        living = self._living()
        if living and self._is_unclear():
            self._write_stacks(living)
        if living and self.evidence.is_script and not (self.stop.is_urgent or self.evidence.orphaned):
            for signum in (signal.SIGTERM, signal.SIGCONT):
                end_groups((self.evidence.pids[rank] for rank in living), signum)
            self._wait_for_exits(_END_SECONDS, by_us=True)
        end_groups(self.evidence.pids)
        self._wait_for_exits(_REAP_SECONDS, by_us=True)
        left = [pid for pid in descendants_of(self.spawner.pid) if pid != self.evidence.store]
        end_all(left, _REAP_SECONDS)
        if self.evidence.hang is None:
            self.evidence.beats = self.board.all()

    def _living(self) -> list[int]:
        return [rank for rank in range(len(self.evidence.pids)) if rank not in self.evidence.exits]

    def _take_in(self, timeout: float, *, by_us: bool = False) -> bool:
        """Hear of ends, at most one; whether there was one."""
        told = self.spawner.next_exit(timeout)
        if told is None:
            return False
        beats = self.board.all()
        # A rank that dies of TERM once all were told to stop has only done as it was told.
        told_to = by_us or (self.evidence.stopped_ns is not None and told["code"] == -signal.SIGTERM)
        self.evidence.exits[told["rank"]] = Exit(
            told["rank"], told["code"], told["seen_ns"], told["peak_bytes"], told_to
        )
        self.evidence.beats_at_exit[told["rank"]] = beats
        return True

    def _look_for_failure(self, now: float) -> None:
        """The first failure leaves the others a moment to follow; then the attempt is over. As long as a checkpoint from
        before it is being written, the moment is as long as a stop may take."""
        if self._first_failure is None and self._has_failed():
            self._first_failure = now
            if self.evidence.stopped_ns is None or not self.evidence.is_script:
                self._settled = now + _SETTLE_SECONDS
        if self._settled is not None and any(beat.lingers for beat in self.evidence.beats.values()):
            assert self._first_failure is not None
            self._settled = min(now + _SETTLE_SECONDS, self._first_failure + self.spec.watchdog.grace.seconds)

    def _has_failed(self) -> bool:
        beats, exits = self.evidence.beats, self.evidence.exits.values()
        if any(beat.failed_ns for beat in beats.values()) or any(gone.code for gone in exits):
            return True
        # A script's rank may well be done before the others; a training's rank is done when it says so.
        return not self.evidence.is_script and any(beats[gone.rank].ended is Ended.NO for gone in exits)

    def _pass_on(self, now: float) -> None:
        """Tell the ranks to stop, once; the grace runs from then. An urgent stop ends them now."""
        if self.stop.is_urgent:
            self._deadline = now
        if self.evidence.stopped_ns is not None:
            return
        self.evidence.stopped_ns = time.monotonic_ns()
        grace = self.stop.asked_at + self.spec.watchdog.grace.seconds
        self._deadline = grace if self._deadline is None else min(grace, self._deadline)
        for rank in self._living():
            send(self.evidence.pids[rank], self._stop_signal(self.evidence.pids[rank]))
        assert self.stop.signum is not None
        self.run.tell("stop_asked", attempt=self.number, signal=signal.Signals(self.stop.signum).name)

    def _stop_signal(self, pid: int) -> int:
        """TERM; to a script that handles the preemption signal itself, that one."""
        if self.evidence.is_script and self.stop.is_preemption and catches(pid, self.stop.preempt):
            return self.stop.preempt
        return signal.SIGTERM

    def _wait_for_exits(self, seconds: float, *, by_us: bool) -> None:
        deadline = time.monotonic() + seconds
        while self._living() and (left := deadline - time.monotonic()) > 0:
            try:
                self._take_in(min(left, _TICK_SECONDS), by_us=by_us)
            except SpawnerGone as gone:
                self.evidence.spawner_gone = self.evidence.spawner_gone or gone.message
                end_all((pid for pid in self.evidence.pids if is_alive(pid)), left)
                return

    def _is_unclear(self) -> bool:
        """Whether the stacks of those that still run are needed to tell the cause."""
        if self.evidence.orphaned or self.evidence.spawner_gone or self.evidence.stopped_ns is not None:
            return False
        return self.evidence.hang is not None or self._first_failure is not None

    def _write_stacks(self, living: list[int]) -> None:
        """Into failures/<attempt>/: stacks, of py-spy too where it is installed, and the flight recorder."""
        beats = self.board.all()
        self.spawner.ask_collectives()
        found = dict(stacks.collect({rank: beats[rank] for rank in living}))
        if self.evidence.hang is not None:
            found.update(self._continued(found))
        self.evidence.stacks = found
        for rank, stack in found.items():
            text = stack.whole_text()
            if self.evidence.hang is not None and (native := stacks.with_py_spy(stack.pid)):
                text += f"\npy-spy:\n{native}"
            path = self.run.stacks_path(self.number, rank)
            with contextlib.suppress(OSError):  # a full disk is no reason to keep the ranks
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, text)

    def _continued(self, found: Mapping[int, Stack]) -> dict[int, Stack]:
        """A rank that was stopped answers only once it is continued. The others are stopped first, so that nothing that is
        to be judged goes on; all of them are about to be ended anyway."""
        halted = {rank: self.board.read(rank) for rank, stack in found.items() if stack.state in STOPPED}
        if not halted:
            return {}
        for rank, stack in found.items():
            if rank not in halted:
                send(stack.pid, signal.SIGSTOP)
        answers = stacks.collect(halted, seconds=3.0, wake=True)
        return {
            rank: dataclasses.replace(
                stack, state="T", text=found[rank].text or stack.text, main=found[rank].main or stack.main
            )
            for rank, stack in answers.items()
        }

    def collective_numbers(self) -> dict[int, int]:
        """The newest collective of each rank that wrote its flight recorder."""
        numbers = {}
        for rank in range(self.plan.world):
            entry = _last_entry(self.run.collectives_path(self.number, rank))
            if isinstance(entry.get("collective_seq_id"), int):
                numbers[rank] = entry["collective_seq_id"]
        return numbers


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _last_entry(path: Path) -> dict[str, Any]:
    import json

    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return entries[-1] if entries and isinstance(entries[-1], dict) else {}
