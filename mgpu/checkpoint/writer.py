"""The process beside each rank that turns snapshots into checkpoints while training goes on.

It is forked before the rank has threads, lives in the rank's process group, dies with it at once, and is deaf to the
signals that ask a rank to stop: the rank waits for it. Writers speak to each other through the run's store, never
through the training's process group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch.distributed as dist

from mgpu.checkpoint.layout import Layout
from mgpu.checkpoint.publish import Measured, Order, Outcome, Publisher
from mgpu.checkpoint.shard import Part, first_error, write_part
from mgpu.checkpoint.snapshot import SharedMemory
from mgpu.runs.helpers import be_deaf_to_stops, die_with_parent, stops_held_back
from mgpu.runs.naming import WRITER, name_process

_NICENESS = 10
_POLL_SECONDS = (0.002, 0.05)

Connect = Callable[[], dist.Store]


class Exchange:
    """Notes between the writers of an attempt; within one process where there is only one."""

    def __init__(self, connect: Connect | None) -> None:
        self._connect = connect
        self._store: dist.Store | None = None
        self._notes: dict[str, str] = {}

    def tell(self, key: str, value: Any) -> None:
        text = json.dumps(dataclasses.asdict(value))
        if self._connect is None:
            self._notes[key] = text
        else:
            self._reach().set(key, text)

    def has(self, key: str) -> bool:
        return key in self._notes if self._connect is None else bool(self._reach().check([key]))

    def hear(self, key: str) -> dict[str, Any]:
        """The note `key`, as soon as it is there. A peer that can no longer tell takes the whole attempt with it."""
        pause, longest = _POLL_SECONDS
        while not self.has(key):
            time.sleep(pause)
            pause = min(longest, 2 * pause)
        found: dict[str, Any] = json.loads(self._notes[key] if self._connect is None else self._reach().get(key))
        return found

    def forget(self, key: str) -> None:
        if self._connect is None:
            self._notes.pop(key, None)
        else:
            self._reach().delete_key(key)

    def _reach(self) -> dist.Store:
        assert self._connect is not None
        if self._store is None:
            self._store = self._connect()
        return self._store


@dataclass
class Work:
    """What a writer does with an order. Also done by the rank itself, should its writer be gone."""

    rank: int
    world: int
    publisher: Publisher
    exchange: Exchange
    layout: Layout | None = field(default=None, init=False)
    memory: SharedMemory | None = field(default=None, init=False)

    def carry_out(self, order: Order) -> Outcome:
        """Write this rank's part; rank 0 publishes once all have written. Returns when the outcome is known."""
        part = dataclasses.replace(self._write(order), plain=order.data if self.rank else {})
        self.exchange.tell(_part_key(order, self.rank), part)
        return self.conclude(order)

    def conclude(self, order: Order) -> Outcome:
        """The end of a save whose own part is told."""
        if self.rank != 0:
            return Outcome(**self.exchange.hear(_outcome_key(order)))
        parts = []
        for rank in range(self.world):
            told = self.exchange.hear(_part_key(order, rank))
            parts.append(Part(**{**told, "places": tuple((start, size) for start, size in told["places"])}))
        if self.layout is None:
            outcome = self.publisher.failed(order, first_error(parts))
        else:
            outcome = self.publisher.publish(order, self.layout, parts)
        self.exchange.tell(_outcome_key(order), outcome)
        for rank in range(self.world):
            self.exchange.forget(_part_key(order, rank))
        return outcome

    def take_over(self, order: Order, error: str) -> Outcome:
        """The end of a save whose writer died in it: by what the others know, or as failed with `error`."""
        if self.exchange.has(_outcome_key(order)):
            return Outcome(**self.exchange.hear(_outcome_key(order)))
        self.exchange.tell(_part_key(order, self.rank), Part(self.rank, order.step, error=error))
        return self.conclude(order)

    def _write(self, order: Order) -> Part:
        if order.error or self.layout is None or self.memory is None:
            return Part(self.rank, order.step, error=order.error or "no snapshot was taken")
        folder = self.publisher.folder.partial_of(order.step, order.token)
        return write_part(folder, self.rank, order.step, self.layout, self.memory)


def _part_key(order: Order, rank: int) -> str:
    return f"save-{order.number}/part-{rank}"


def _outcome_key(order: Order) -> str:
    return f"save-{order.number}/outcome"


class WriterGone(Exception):
    """The writer's process has ended: killed, as nothing else ends it."""


class Writer:
    """A rank's handle of its writer: at most one order at a time."""

    def __init__(self, work: Work) -> None:
        """Fork. To be called while the process has no threads."""
        parent = os.getpid()
        self._end, theirs = multiprocessing.Pipe()
        with stops_held_back():
            self.pid = os.fork()
            if self.pid == 0:
                self._end.close()
                _live(theirs, work, parent)
        theirs.close()

    def lay_out(self, layout: Layout, memory: SharedMemory) -> None:
        """What the orders that follow are about."""
        with _Conversation():
            self._end.send((layout, memory.size))
            send_handle(self._end, memory.handle, self.pid)

    def submit(self, order: Order | Measured) -> None:
        with _Conversation():
            self._end.send(order)

    def outcome(self, timeout: float | None) -> Outcome | None:
        """How the order ended; None while it has not, within `timeout` seconds."""
        with _Conversation():
            if not self._end.poll(timeout):
                return None
            found = self._end.recv()
        assert isinstance(found, Outcome)
        return found

    def close(self) -> None:
        """End the process, which must be idle."""
        with contextlib.suppress(WriterGone), _Conversation():
            # Said in a word: loader processes hold this end of the pipe too, so that closing it would not be seen.
            self._end.send(None)
        self._end.close()
        os.waitpid(self.pid, 0)


class _Conversation:
    """Turns the pipe's end into WriterGone."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, EOFError | OSError):
            raise WriterGone from error


def _live(orders: Connection, work: Work, parent: int) -> None:
    """The body of the writer's process; never returns."""
    try:
        die_with_parent(parent)
        name_process(WRITER)
        be_deaf_to_stops()
        os.nice(_NICENESS)  # where cores are short, training comes first
        _serve(orders, work)
    except BaseException:  # whatever it is, this process is not the rank it was forked from
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve(orders: Connection, work: Work) -> None:
    while True:
        try:
            message = orders.recv()
        except EOFError:  # the rank is gone, and the signal of its death is on its way
            return
        if message is None:
            return
        if isinstance(message, Order):
            orders.send(work.carry_out(message))
            continue
        if isinstance(message, Measured):
            work.publisher.measured(message.step, message.metrics)
            continue
        work.layout, size = message
        if work.memory is not None:
            work.memory.close()
        work.memory = SharedMemory(size, recv_handle(orders))
