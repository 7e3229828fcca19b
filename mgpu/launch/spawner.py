"""The warm process that ranks are forked from: it imports torch once, and runs nothing.

Forking from a process that has imported torch is safe as long as it has run no operation; so each start, and each new
attempt, costs no import. Answers the node: `check`, `start`, `collectives`. It is also the last safeguard: once the node
is gone, it ends whatever was forked from it. A signal that asks a run to stop is the node's to answer: here it is only passed on.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import IO, Any, NoReturn

from mgpu.launch import stopping
from mgpu.launch.link import Link, Message
from mgpu.launch.processes import adopt_orphans, end_groups, end_tree
from mgpu.plan.plan import listen
from mgpu.runs.helpers import be_deaf_to_stops, die_with_parent
from mgpu.runs.naming import STORE, name_process


class Spawner:
    """Forks ranks and tells how they end. `board` is the descriptor of the heartbeats."""

    def __init__(self, link: Link, listener: int, board: int) -> None:
        self.link = link
        self.board = board
        self.ranks: dict[int, int] = {}
        """Rank by process id, of those not yet reaped."""
        self.requests: list[int] = []
        self.wakeup, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        self.heard: list[int] = []
        stopping.install(lambda signum, frame: self.heard.append(signum))
        stopping.unblock()
        self.store = 0
        """The process that holds the store; 0 once it has ended."""
        self.port = self._host_store(listener)

    def serve(self) -> None:
        """Until the node has closed its end, or is gone."""
        self.link.send(kind="ready", pid=os.getpid())
        while True:
            if not self.link.has_message:
                select.select([self.link.fileno(), self.wakeup], [], [])
            with contextlib.suppress(BlockingIOError):
                os.read(self.wakeup, 4096)
            self._reap()
            try:
                while self.heard:
                    self.link.send(kind="asked", signum=self.heard.pop(0))
                command = self.link.receive(timeout=0)
            except (EOFError, ConnectionError):
                return
            if command is not None:
                self._answer(command)

    def _answer(self, command: Message) -> None:
        if command["do"] == "check":
            self.link.send(kind="checked", faults=self._check(command["run"]))
        elif command["do"] == "start":
            self.link.send(kind="started", pids=self._start(command), port=self.port, store=self.store)
        elif command["do"] == "collectives":
            for pipe in self.requests:
                _ask(pipe)

    def _start(self, command: Message) -> list[int]:
        from mgpu.train.rank import Start, run_rank

        for pipe in self.requests:
            os.close(pipe)
        self.requests = []
        if not self.store:
            self.port = self._host_store(listen(0).detach())
        pids = []
        for rank in range(command["world"]):
            read, write = os.pipe2(os.O_CLOEXEC)
            start = Start(command["run"], command["attempt"], self.port, self.board, read)
            pid = self._fork(own_group=True)
            if pid == 0:
                os.close(write)
                _run(lambda rank=rank, start=start: run_rank(rank, start))
            os.close(read)
            self.ranks[pid] = rank
            self.requests.append(write)
            pids.append(pid)
        return pids

    def _fork(self, *, own_group: bool) -> int:
        """Fork; 0 in the child, which has its own group, dies with this process, and holds none of its tools.

        The group is set on both sides: neither has to wait for the other to count on it. The signals of a stop are blocked
        in the child, so that none is lost before it has said what they mean to it: `stopping.unblock`.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        stopping.block()
        pid = os.fork()
        if pid:
            stopping.unblock()
            if own_group:
                with contextlib.suppress(OSError):  # it may have ended already
                    os.setpgid(pid, pid)
            return pid
        if own_group:
            os.setpgid(0, 0)
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        stopping.forget()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self.link.fileno())
        for pipe in self.requests:
            os.close(pipe)
        gc.enable()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # as if this process had imported it by itself
        return 0

    def _reap(self) -> None:
        """Take in every child that has ended: ranks, and orphans of ranks, which come to this process."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.store:
                self.store = 0
                self.link.send(kind="store ended", pid=pid, code=os.waitstatus_to_exitcode(status))
            elif pid in self.ranks:
                self.link.send(
                    kind="exited",
                    rank=self.ranks.pop(pid),
                    code=os.waitstatus_to_exitcode(status),
                    seen_ns=time.monotonic_ns(),
                    peak_bytes=usage.ru_maxrss * 1024,
                )

    def _host_store(self, listener: int) -> int:
        """Hold the run's TCPStore in a process of its own, so that it outlives any rank; returns its port."""
        port = int(socket.socket(fileno=os.dup(listener)).getsockname()[1])
        self.store = self._fork(own_group=True)
        if self.store == 0:
            os.close(self.board)
            _run(lambda: _store(listener, port))
        os.close(listener)
        return port

    def _check(self, path: str) -> list[dict[str, Any]]:
        """Run the preflight in a fork, so that user code never runs in the process that ranks come from."""
        with os.fdopen(os.memfd_create("mgpu-preflight"), "r+b") as sheet:  # a pipe ends with all that user code forks
            pid = self._fork(own_group=True)
            if pid == 0:
                _run(lambda: _preflight(path, sheet))
            _, status = os.waitpid(pid, 0)
            end_groups([pid])
            sheet.seek(0)
            told = sheet.read()
        if told:
            faults: list[dict[str, Any]] = json.loads(told)
            return faults
        code = os.waitstatus_to_exitcode(status)
        return [{"key": [], "message": f"the check of the spec's targets died with exit code {code}", "hint": ""}]


def _run(body: Any) -> NoReturn:
    """The life of a forked child: never back into the spawner's code."""
    try:
        body()
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _ask(pipe: int) -> None:
    with contextlib.suppress(OSError):  # that rank may have ended
        os.write(pipe, b"?")


def _store(listener: int, port: int) -> None:
    from torch.distributed import TCPStore

    name_process(STORE)
    be_deaf_to_stops()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while store is not None:
        signal.pause()


def _preflight(path: str, sheet: IO[bytes]) -> None:
    from pathlib import Path

    from mgpu.plan import Plan
    from mgpu.runs import Run
    from mgpu.spec import load_spec
    from mgpu.train.preflight import preflight

    stopping.unblock()
    os.dup2(2, 1)
    run = Run(Path(path))
    plan = Plan.from_json(json.loads(run.plan_path.read_text()))
    faults = json.dumps(preflight(load_spec(run.spec_path).spec, plan, run.path.parent)).encode()
    sheet.write(faults)
    sheet.flush()


def main(control: int, listener: int, board: int, is_script: bool) -> None:
    """Serve the node on the socket `control`; `listener` is the listening socket that the run's store will use."""
    adopt_orphans()
    for descriptor in (control, listener, board):
        os.set_inheritable(descriptor, False)
    link = Link(socket.socket(fileno=control))
    gc.disable()  # a collection in the middle of so many imports finds nothing and takes a fifth of the time

    import mgpu.train.rank

    if not is_script:
        import mgpu.train.assembly
        import mgpu.train.preflight  # noqa: F401
    gc.collect()
    gc.freeze()  # what is shared with the ranks stays shared: their collections do not touch it
    gc.enable()
    spawner = Spawner(link, listener, board)
    try:
        spawner.serve()
    finally:
        end_groups(spawner.ranks)
        end_tree(os.getpid())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "script")
