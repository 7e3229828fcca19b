"""One host's part of a run, as a process. It starts its spawner before anything else, which then imports torch meanwhile.

`python -m mgpu.launch.node PATH ATTEMPT LISTENER [LIFELINE]`. LISTENER is the descriptor of a listening socket for the
run's store. LIFELINE is one of a pipe whose other end the front holds: once that is closed, the node ends everything.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(path: str, attempt: int, listener: int, lifeline: int | None = None) -> int:
    """Run attempts of the run at `path` on this host, from `attempt` on; returns the exit code."""
    from mgpu.launch.processes import adopt_orphans
    from mgpu.launch.spawner_handle import SpawnerHandle
    from mgpu.launch.stopping import StopRequest
    from mgpu.runs.heartbeat import Board

    adopt_orphans()
    if lifeline is not None:
        os.set_inheritable(lifeline, False)
    stop = StopRequest(lifeline)
    stop.listen()
    plan = json.loads((Path(path) / "plan.json").read_text())
    board = Board.create(plan["world"])
    is_script = plan.get("size") is None
    spawner = SpawnerHandle(listener, board.descriptor, is_script=is_script, threads=plan["threads"])
    try:
        from mgpu.launch.supervisor import Supervisor
        from mgpu.runs import Run

        supervisor = Supervisor(Run(path), attempt, spawner, board, stop)
    except BaseException:
        spawner.close()
        raise
    return supervisor.run_to_end()


if __name__ == "__main__":
    code = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is ended and written; taking the interpreter apart would only keep the front waiting
