"""The warm process that ranks are forked from: it imports torch once, and runs nothing.

Forking from a process that has imported torch is safe as long as it has run no operation; so each start, and each new
attempt, costs no import. Answers the node: `check`, `start`.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection, wait
from typing import Any

from mgpu.launch.link import Link

PR_SET_PDEATHSIG = 1


def main(control: int, listener: int) -> None:
    """Serve the node on the socket `control`; `listener` is the listening socket that the run's store will use."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    link = Link(socket.socket(fileno=control))
    import torch.multiprocessing as mp  # the import this process exists for

    import mgpu.train.preflight
    import mgpu.train.rank

    port = _host_store(listener)
    link.send(kind="ready")
    ranks: Any = None
    waiting: dict[int, int] = {}
    while True:
        for ready in [link.fileno()] if link.has_message else wait([link.fileno(), *waiting]):
            if isinstance(ready, int) and ready in waiting:
                rank = waiting.pop(ready)
                ranks.processes[rank].join()
                link.send(kind="exited", rank=rank, code=ranks.processes[rank].exitcode)
                continue
            try:
                command = link.receive()
            except EOFError:
                return
            assert command is not None
            if command["do"] == "check":
                link.send(kind="checked", faults=_check(command["run"]))
                continue
            arguments = (command["run"], command["attempt"], port)
            ranks = mp.start_processes(
                mgpu.train.rank.run_rank, args=arguments, nprocs=command["world"], join=False, start_method="fork"
            )
            waiting = {process.sentinel: rank for rank, process in enumerate(ranks.processes)}
            link.send(kind="started", pids=[process.pid for process in ranks.processes], port=port)


def _host_store(listener: int) -> int:
    """Hold the run's TCPStore in a process of its own, so that it outlives any rank; returns its port."""
    port = int(socket.socket(fileno=os.dup(listener)).getsockname()[1])
    process = multiprocessing.get_context("fork").Process(target=_store, args=(listener, port), daemon=True)
    process.start()
    os.close(listener)
    return port


def _store(listener: int, port: int) -> None:
    from torch.distributed import TCPStore

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while store is not None:
        signal.pause()


def _check(path: str) -> list[dict[str, Any]]:
    """Run the preflight in a fork, so that user code never runs in the process that ranks come from."""
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_preflight, args=(path, send))
    process.start()
    send.close()
    try:
        faults: list[dict[str, Any]] = json.loads(receive.recv_bytes())
    except EOFError:
        process.join()
        return [
            {
                "key": [],
                "message": f"the check of the spec's targets died with exit code {process.exitcode}",
                "hint": "",
            }
        ]
    process.join()
    return faults


def _preflight(path: str, send: Connection) -> None:
    from pathlib import Path

    from mgpu.plan import Plan
    from mgpu.runs import Run
    from mgpu.spec import load_spec
    from mgpu.train.preflight import preflight

    os.dup2(2, 1)
    run = Run(Path(path))
    plan = Plan.from_json(json.loads(run.plan_path.read_text()))
    send.send_bytes(json.dumps(preflight(load_spec(run.spec_path).spec, plan)).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
