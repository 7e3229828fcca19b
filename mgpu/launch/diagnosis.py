"""Which rank is to blame, and for what."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu.errors import EXIT_FAILED, EXIT_SIGNAL_BASE
from mgpu.runs import Run


@dataclass(frozen=True)
class Cause:
    """Why an attempt did not complete. kind: `error`, `killed`, `exit`, `left early`, `victim` (a collective failed
    and no rank says why), `unfinished` (stopped as asked)."""

    kind: str
    rank: int | None
    exit_code: int
    what: str
    place: str = ""
    log: str = ""
    victims: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def judge(run: Run, attempt: int, exits: Mapping[int, int], order: Sequence[int]) -> Cause | None:
    """The cause of an attempt's end; None if it completed.

    The earliest error of a rank's own comes first, then a rank that died without a record (killed, or a plain exit),
    then one that left early with code 0; errors inside a collective are of victims, whose peer was gone.
    """
    records = _records(run, attempt)
    victims = [record for record in records if record["victim"]]
    own = [record for record in records if not record["victim"]]
    recorded = {record["rank"] for record in records}
    silent = [rank for rank in order if exits[rank] != 0 and rank not in recorded]
    early = [rank for rank in order if exits[rank] == 0]
    ends = {event["event"] for event in run.events() if event.get("attempt") == attempt}
    if own:
        first = own[0]
        return _of_record(run, attempt, first, [record["rank"] for record in records if record is not first])
    if silent:
        return _of_exit(run, attempt, silent[0], exits[silent[0]], sorted(recorded))
    if victims and early:
        what = "left early with code 0 while other ranks were still training"
        return Cause(
            "left early",
            early[0],
            EXIT_FAILED,
            what,
            log=str(run.log_path(attempt, early[0])),
            victims=tuple(sorted(recorded)),
        )
    if victims:
        cause = _of_record(run, attempt, victims[0], [record["rank"] for record in victims[1:]])
        return dataclasses.replace(cause, kind="victim")
    if "completed" in ends or (_is_script(run) and len(early) == len(exits) > 0):
        return None
    if "stopped" in ends or not exits:
        return Cause("unfinished", None, EXIT_FAILED, "stopped before its end")
    return Cause(
        "left early", early[0] if early else None, EXIT_FAILED, "left with code 0 before the training was complete"
    )


def _records(run: Run, attempt: int) -> list[dict[str, Any]]:
    folder = run.failure_path(attempt, 0).parent
    found = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")] if folder.is_dir() else []
    return sorted(found, key=lambda record: record["monotonic_ns"])


def _of_record(run: Run, attempt: int, record: dict[str, Any], others: list[int]) -> Cause:
    rank = record["rank"]
    what = f"{record['type']}: {record['message']}"
    return Cause(
        "error", rank, EXIT_FAILED, what, record["place"], str(run.log_path(attempt, rank)), tuple(sorted(others))
    )


def _of_exit(run: Run, attempt: int, rank: int, code: int, others: list[int]) -> Cause:
    log = str(run.log_path(attempt, rank))
    if code < 0:
        what = f"was killed by {signal.Signals(-code).name}"
        return Cause("killed", rank, EXIT_SIGNAL_BASE - code, what, log=log, victims=tuple(others))
    return Cause("exit", rank, code, f"exited with code {code}", log=log, victims=tuple(others))


def _is_script(run: Run) -> bool:
    return '"size": null' in run.plan_path.read_text()
