"""Which rank is to blame, and for what.

The judge takes what ended first and of itself:

1. what the supervisor saw itself: a hang, the loss of its own helper processes
2. the earliest of: an error of a rank's own (its record is stamped before its sockets close, so before anybody can feel
   it); a death without a record (killed, a plain exit), at the time it was seen
3. a rank that left with code 0 while others were training
4. a rank that never came to the collective that the others gave up waiting for
5. the earliest error out of a collective, if nobody has a better one

Errors out of collectives otherwise are echoes: their rank is a victim.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgpu import frames
from mgpu.errors import EXIT_FAILED, EXIT_HUNG, EXIT_SIGNAL_BASE
from mgpu.files import FULL
from mgpu.launch import memory
from mgpu.launch.attempt import Evidence, Exit
from mgpu.launch.output import written
from mgpu.launch.processes import STOPPED
from mgpu.launch.watchdog import odd_rank
from mgpu.runs import Run
from mgpu.runs.heartbeat import Ended
from mgpu.runs.naming import ending

_TAIL_BYTES = 1 << 16
_FATAL = "Fatal Python error:"
_LAST_WORDS = 6


@dataclass(frozen=True)
class Cause:
    """Why an attempt did not complete.

    kind: `error`, `killed`, `exit`, `left early`, `hang`, `missing` (in a collective), `victim` (a collective failed and
    no rank says why), `supervisor`, `folder` (the run's was removed), `unfinished` (stopped as asked). `step` is the one
    the rank was in, counted from 1, 0 where that is not known.
    """

    kind: str
    rank: int | None
    exit_code: int
    what: str
    place: str = ""
    log: str = ""
    victims: tuple[int, ...] = ()
    step: int = 0
    details: tuple[str, ...] = ()
    advice: str = ""
    host: str = dataclasses.field(default_factory=socket.gethostname)
    deterministic: bool = False

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def judge(run: Run, evidence: Evidence, numbers: Mapping[int, int]) -> Cause | None:
    """The cause of an attempt's end; None if it completed. `numbers`: the ranks' newest collectives, where known."""
    return _Judge(run, evidence, numbers).verdict()


class _Judge:
    def __init__(self, run: Run, evidence: Evidence, numbers: Mapping[int, int]) -> None:
        self.run, self.evidence, self.numbers = run, evidence, numbers
        self.records = _records(run, evidence.attempt)
        self.by_rank = {record["rank"]: record for record in self.records}

    def verdict(self) -> Cause | None:
        evidence = self.evidence
        if evidence.spawner_gone:
            return self._cause("supervisor", None, EXIT_SIGNAL_BASE + signal.SIGKILL, evidence.spawner_gone)
        if evidence.store_ended is not None:
            return self._of_store(evidence.store_ended)
        if evidence.folder_gone:
            what = f"{self.run.path} was removed while the run was under way"
            return dataclasses.replace(self._cause("folder", None, EXIT_FAILED, what), deterministic=True)
        own = [record for record in self.records if not record["echo"]]
        echoes = [record for record in self.records if record["echo"]]
        silent = self._silent_deaths()
        if evidence.hang is not None and not own and not silent:
            return self._of_hang()
        if own and not (silent and silent[0].seen_ns < own[0]["monotonic_ns"]):
            return self._of_record(own[0])
        if silent:
            return self._of_death(silent[0])
        early = self._early_leavers()
        if early and (echoes or not evidence.is_script):
            return self._of_early(early[0])
        if echoes:
            return self._of_missing(echoes[0]) or self._of_record(echoes[0], kind="victim")
        ends = [beat.ended for beat in evidence.beats.values()]
        if not evidence.is_script and Ended.STOPPED in ends:
            return self._cause("unfinished", None, EXIT_FAILED, "stopped before its end")
        if len(evidence.exits) == len(evidence.pids) and not any(gone.by_us for gone in evidence.exits.values()):
            return None
        return self._cause("unfinished", None, EXIT_FAILED, "was ended before its end")

    def _silent_deaths(self) -> list[Exit]:
        """Ends without a record, the likeliest origin first: a library whose peer is gone aborts, so aborts come last."""
        found = [
            gone
            for gone in self.evidence.exits.values()
            if gone.code != 0 and not gone.by_us and gone.rank not in self.by_rank
        ]
        return sorted(found, key=lambda gone: (gone.code == -signal.SIGABRT, gone.seen_ns))

    def _early_leavers(self) -> list[int]:
        left = [gone for gone in self.evidence.exits.values() if gone.code == 0 and not gone.by_us]
        if not self.evidence.is_script:
            left = [gone for gone in left if self.evidence.beats[gone.rank].ended is Ended.NO]
        return [gone.rank for gone in sorted(left, key=lambda gone: gone.seen_ns)]

    def _of_hang(self) -> Cause:
        evidence = self.evidence
        assert evidence.hang is not None
        odd = odd_rank(evidence.beats, evidence.stacks, self.numbers)
        if evidence.store_halted and odd.rank is None:
            store = f"the process that holds the run's store ({evidence.store}) is stopped by a signal"
            odd = dataclasses.replace(odd, what=store)
        step = evidence.beats[odd.rank].step if odd.rank is not None else 0
        phase = evidence.beats[odd.rank if odd.rank is not None else evidence.hang.ranks[0]].phase.words
        where = f"in step {step} (last finished: {step - 1})" if step else f"while {phase}"
        details = [f"no progress for {evidence.hang.seconds:.0f} s"]
        details += self._where_the_others_are(odd.rank)
        folder = self.run.stacks_path(evidence.attempt, 0).parent
        return dataclasses.replace(
            self._cause("hang", odd.rank, EXIT_HUNG, f"{odd.what}, {where}", place=odd.place, step=step),
            victims=tuple(rank for rank in sorted(evidence.stacks) if odd.rank not in (None, rank)),
            details=tuple(details),
            advice=f"stacks of all ranks and threads: {folder}",
        )

    def _where_the_others_are(self, odd: int | None) -> list[str]:
        """One line for all ranks that are in the same place."""
        places: dict[str, list[int]] = {}
        for rank, stack in sorted(self.evidence.stacks.items()):
            if rank != odd:
                beat = self.evidence.beats[rank]
                step = f"step {beat.step}" if beat.step else beat.phase.words
                where = f"wait in a collective, {stack.waits_in}" if stack.in_collective else stack.place or "no stack"
                places.setdefault(f"{step}: {where}", []).append(rank)
        return [f"rank {_listed(ranks)}: {where}" for where, ranks in places.items()]

    def _of_store(self, code: int) -> Cause:
        """Without it ranks would wait for each other until the watchdog comes."""
        pid = self.evidence.store
        what = f"the process that holds the run's store ({pid}) {ending(code)}"
        cause = self._cause("killed", None, EXIT_SIGNAL_BASE - code if code < 0 else code or EXIT_FAILED, what)
        why = memory.explanation(pid, self.evidence.memory_before, 0) if code == -signal.SIGKILL else ""
        return dataclasses.replace(cause, details=(why,) if why else ())

    def _of_record(self, record: dict[str, Any], kind: str = "error") -> Cause:
        rank, code = record["rank"], record["exit_code"]
        what = _text(record)
        if record["type"] == "SystemExit":
            kind = "exit"
            told = "" if record["message"] == str(code) else f": {record['message']}"
            what = f"exited with code {code}{told}"
        place, details = record["place"], [f"because of {text}" for text in record.get("causes", ())]
        if record["loader"]:
            place = self._place_of_crash(rank) or place  # loaders write into the log of their rank
            what = f"in its data loader: {what}"
            details.append(memory.explanation(0, self.evidence.memory_before, 0))
        others = [other for other in self.records if other is not record]
        alike = [other["rank"] for other in others if not other["echo"] and _text(other) == _text(record)]
        if alike:
            details.append(f"the same on rank {_listed(alike)}")
        details += [f"rank {o['rank']}, later: {_text(o)}" for o in others if not o["echo"] and o["rank"] not in alike]
        cause = self._cause(kind, rank, code, what, place=place, step=record["step"])
        return dataclasses.replace(
            cause,
            victims=tuple(sorted(other["rank"] for other in others if other["echo"])),
            details=tuple(filter(None, details)),
            deterministic=record["deterministic"],
        )

    def _of_death(self, gone: Exit) -> Cause:
        rank, pid = gone.rank, self.evidence.pids[gone.rank]
        step = self.evidence.beats[rank].step
        victims = tuple(sorted(other for other in self.by_rank if other != rank))
        if gone.code > 0 and (number := self.evidence.beats[rank].unrecorded):
            what = f"failed, and its error could not be written down: {os.strerror(number)}"
            cause = self._cause("error", rank, gone.code, what, step=step)
            advice = f"make room where {self.run.path} lies, then resume" if number in FULL else ""
            return dataclasses.replace(cause, victims=victims, details=self._last_words(rank), advice=advice)
        if gone.code > 0:
            cause = self._cause("exit", rank, gone.code, f"exited with code {gone.code}", step=step)
            return dataclasses.replace(cause, victims=victims, details=self._last_words(rank))
        cause = self._cause("killed", rank, EXIT_SIGNAL_BASE - gone.code, ending(gone.code), step=step)
        place, details, advice = "", self._last_words(rank), ""
        if gone.code == -signal.SIGKILL:
            why = memory.explanation(pid, self.evidence.memory_before, gone.peak_bytes)
            details = (why or f"from outside; it had used up to {memory.size_text(gone.peak_bytes)}", *details)
            advice = "give it more memory, or a smaller batch.micro, or fewer data.workers" if why else ""
        else:
            place = self._place_of_crash(rank)
        return dataclasses.replace(cause, place=place, victims=victims, details=details, advice=advice)

    def _of_early(self, rank: int) -> Cause:
        then = self.evidence.beats_at_exit[rank]
        step = then[rank].step
        others = sorted(set(then) - {rank})
        when = f" in step {step} (last finished: {step - 1})" if step else ""
        cause = self._cause("left early", rank, EXIT_FAILED, f"left early with code 0{when}", step=step)
        by_step: dict[int, list[int]] = {}
        for other in others:
            by_step.setdefault(then[other].step, []).append(other)
        details = tuple(
            f"rank {_listed(ranks)} {'was' if len(ranks) == 1 else 'were'} in step {at}"
            for at, ranks in sorted(by_step.items())
            if at
        )
        victims = tuple(other for other in others if self.evidence.beats[other].ended is Ended.NO)
        return dataclasses.replace(cause, victims=victims, details=details)

    def _of_missing(self, echo: dict[str, Any]) -> Cause | None:
        """Somebody gave up waiting, and others still run, elsewhere: it is they who did not come."""
        absent = [rank for rank, stack in sorted(self.evidence.stacks.items()) if not stack.in_collective]
        absent = [rank for rank in absent if rank not in self.by_rank]
        if not absent:
            return None
        rank = absent[0]
        stack, step = self.evidence.stacks[rank], self.evidence.beats[rank].step
        where = f" in step {step}" if step else ""
        halted = ", it is stopped by a signal (SIGSTOP)" if stack.state in STOPPED else ""
        what = f"did not come to the collective that rank {echo['rank']} waited in{where}{halted}"
        cause = self._cause("missing", rank, EXIT_HUNG, what, place=stack.place, step=step)
        return dataclasses.replace(
            cause,
            victims=tuple(sorted(self.by_rank)),
            details=(f"rank {echo['rank']}: {_text(echo)}",),
            advice=f"stacks: {self.run.stacks_path(self.evidence.attempt, rank)}",
        )

    def _cause(self, kind: str, rank: int | None, code: int, what: str, *, place: str = "", step: int = 0) -> Cause:
        log = self.run.node_log_path(self.evidence.attempt, 0)
        if rank is not None:
            log = self.run.log_path(self.evidence.attempt, rank)
        return Cause(kind, rank, code, what, place, str(log), step=step)

    def _tail(self, rank: int) -> str:
        log = self.run.log_path(self.evidence.attempt, rank)
        kept = b""
        for block in written(log, skip=max(0, log.stat().st_size - _TAIL_BYTES) if log.exists() else 0):
            kept = (kept + block)[-_TAIL_BYTES:]
        return kept.decode(errors="replace")

    def _last_words(self, rank: int) -> tuple[str, ...]:
        """The end of the log of a rank that left no record; a crash report of faulthandler is told by its place."""
        lines = self._tail(rank).partition(_FATAL)[0].splitlines()
        words = [line.rpartition("\r")[2].rstrip() for line in lines]
        return tuple(f"| {line}" for line in [line for line in words if line][-_LAST_WORDS:])

    def _place_of_crash(self, rank: int) -> str:
        """By what faulthandler wrote at the end of the log: the crashed thread is the one called current."""
        crash = self._tail(rank).rpartition(_FATAL)[2]
        current = crash.partition("Current thread")[2].partition("\n\n")[0]
        return frames.place(list(reversed(frames.parse(current))))


def _records(run: Run, attempt: int) -> list[dict[str, Any]]:
    """The ranks' own records, earliest first; one that cannot be read is left out."""
    folder = run.failure_path(attempt, 0).parent
    found = []
    for path in folder.glob("rank-*.json"):
        if path.name.count(".") > 1:
            continue
        try:
            found.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda record: record["monotonic_ns"])


def _text(record: dict[str, Any]) -> str:
    return f"{record['type']}: {record['message']}" if record["message"] else str(record["type"])


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
