"""A run on this host, from its first attempt to its last: check → (start → watch → end → tell) → again, or not."""

from __future__ import annotations

import os
import time

from mgpu.errors import EXIT_COMPLETED, EXIT_FAILED, EXIT_PREEMPTED, EXIT_REFUSED, EXIT_SIGNAL_BASE
from mgpu.files import write_json
from mgpu.launch.attempt import Attempt, Evidence
from mgpu.launch.diagnosis import Cause, judge
from mgpu.launch.processes import end_tree
from mgpu.launch.restarting import SCRIPT_SECONDS, Decision, Ending, decide
from mgpu.launch.spawner_handle import SpawnerGone, SpawnerHandle
from mgpu.launch.stopping import StopRequest
from mgpu.plan.plan import Plan
from mgpu.runs import Run, State
from mgpu.runs.heartbeat import Board
from mgpu.runs.liveness import this_process
from mgpu.spec import load_spec

_POLL_SECONDS = 0.1
_ENDS_OF_A_STOP = ("unfinished", "victim", "killed", "left early")


class _GivenUp(Exception):
    """A stop, or the loss of the front, before any rank was started."""


class Supervisor:
    """Runs attempts until one completes or none may follow."""

    def __init__(self, run: Run, attempt: int, spawner: SpawnerHandle, board: Board, stop: StopRequest) -> None:
        self.run, self.number = run, attempt
        self.spawner, self.board, self.stop = spawner, board, stop
        self.spec = load_spec(run.spec_path).spec
        self.plan = Plan.from_json(run.plan())
        self.endings: list[Ending] = []
        stop.preempt = self.spec.watchdog.preempt
        spawner.while_waiting = self._give_up_if_asked
        spawner.when_asked = stop.hear_of

    def run_to_end(self) -> int:
        """Supervise; returns the exit code. Whatever happens, no process is left."""
        try:
            return self._run()
        finally:
            self.spawner.close()
            end_tree(os.getpid())

    def _run(self) -> int:
        try:
            self.spawner.wait_until_ready()
            faults = [] if self.spec.script is not None else self.spawner.check(str(self.run.path))
            if faults:
                write_json(self.run.path / "refused.json", faults)
                return EXIT_REFUSED
            while True:
                self.spawner.while_waiting = self._give_up_if_asked
                code, decision = self._attempt()
                if decision.wait is None:
                    return code
                self._wait(decision.wait)
                self.number += 1
        except _GivenUp:
            if self.stop.is_orphaned:
                return EXIT_FAILED
            state, code = self._stopped()
            return self._tell(state, code, None, Decision(None))
        except SpawnerGone as gone:
            cause = Cause(
                "supervisor", None, EXIT_FAILED, gone.message, log=str(self.run.node_log_path(self.number, 0))
            )
            return self._tell(State.LOST, EXIT_FAILED, cause, Decision(None))

    def _attempt(self) -> tuple[int, Decision]:
        before = self._progress()
        attempt = Attempt(self.run, self.number, self.spec, self.plan, self.spawner, self.board, self.stop)
        self.spawner.while_waiting = lambda: None  # once ranks exist, a stop goes to them
        attempt.start()
        try:
            attempt.watch()
        finally:
            attempt.end()
        evidence = attempt.evidence
        if evidence.orphaned:
            # Nobody is left to tell, and the state is worked out from that: lost.
            return EXIT_FAILED, Decision(None)
        cause = judge(self.run, evidence, attempt.collective_numbers())
        state, code = self._outcome(cause, evidence)
        decision = Decision(None)
        if state is State.FAILED and cause is not None:
            progressed = self._progress() != before
            if evidence.is_script:
                progressed = evidence.seconds >= SCRIPT_SECONDS
            self.endings.append(Ending(cause, time.time(), progressed))
            decision = decide(self.spec.restart, self.endings, self._restarts(), time.time())
        return self._tell(state, code, cause, decision), decision

    def _outcome(self, cause: Cause | None, evidence: Evidence) -> tuple[State, int]:
        """A stop that was asked for, by the node or by a signal to a rank itself, is no failure."""
        if cause is not None and cause.kind == "supervisor":
            return State.LOST, cause.exit_code
        asked_ranks = [beat.asked for beat in evidence.beats.values() if beat.asked]
        if evidence.is_script and evidence.stopped_ns is not None:
            # Told to stop, a script may leave with any code, 0 too; whether it had come to its end, only it knows.
            return self._stopped()
        is_asked = self.stop.signum is not None or bool(asked_ranks)
        if is_asked and cause is not None and cause.kind in _ENDS_OF_A_STOP:
            return self._stopped(asked_ranks[0] if asked_ranks else None)
        if cause is None:
            return State.COMPLETED, EXIT_COMPLETED
        return State.FAILED, cause.exit_code or EXIT_FAILED

    def _stopped(self, asked_rank: int | None = None) -> tuple[State, int]:
        signum = self.stop.signum if self.stop.signum is not None else asked_rank
        assert signum is not None
        if signum == self.stop.preempt:
            return State.PREEMPTED, EXIT_PREEMPTED
        return State.INTERRUPTED, EXIT_SIGNAL_BASE + signum

    def _tell(self, state: State, code: int, cause: Cause | None, decision: Decision) -> int:
        told = None if state is State.COMPLETED or cause is None else cause.to_json()
        extra = {"not_restarted": decision.why} if decision.why else {}
        self.run.tell(
            "attempt_ended",
            attempt=self.number, state=str(state), exit_code=code, step=self.run.last_step, cause=told, **extra,
        )  # fmt: skip
        if decision.wait is not None:
            used = len(self._restarts()) + 1
            self.run.tell(
                "restarting",
                **this_process(), wait=decision.wait, number=used, max=self.spec.restart.max, from_step=self._saved(),
            )  # fmt: skip
        return code

    def _progress(self) -> tuple[int, int]:
        """What a new checkpoint changes, also one of an earlier step than a damaged one, or one whose event was lost."""
        saves = sum(event.get("event") == "saved" for event in self.run.events())
        return saves, next(iter(self.run.checkpoint_steps()), 0)

    def _saved(self) -> int:
        return self.run.last_saved() or 0

    def _restarts(self) -> list[float]:
        return [event["unix"] for event in self.run.events() if event.get("event") == "restarting"]

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._give_up_if_asked()
            time.sleep(min(left, _POLL_SECONDS))

    def _give_up_if_asked(self) -> None:
        if self.stop.look() or self.stop.is_orphaned:
            raise _GivenUp
