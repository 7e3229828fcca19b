"""Where every thread of every rank is, right now: asked for by a signal that the rank answers in C, however stuck it is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mgpu import frames
from mgpu.frames import Frame
from mgpu.launch.processes import STOPPED, children_of, send_to_main_thread, state_of
from mgpu.runs.heartbeat import Beat
from mgpu.runs.naming import words_for
from mgpu.runs.requests import STACKS_SIGNAL, catches

_POLL_SECONDS = 0.01
_QUIET_SECONDS = 0.1
_PY_SPY_SECONDS = 10


@dataclass(frozen=True)
class Stack:
    """One process's stacks. `state` is its letter in /proc; `main` are the frames of its main thread, innermost last.

    `what` it is: a rank, or for what a rank has forked the words of `naming`.
    """

    pid: int
    state: str
    text: str
    main: tuple[Frame, ...] = ()
    children: tuple[Stack, ...] = ()
    what: str = "rank"

    @property
    def place(self) -> str:
        """The user's innermost line."""
        return frames.place(self.main)

    @property
    def in_collective(self) -> bool:
        """Whether it takes part in a collective, and so waits for others."""
        return frames.is_in_collective(self.main)

    @property
    def waits_in(self) -> str:
        """The function of the innermost call."""
        return self.main[-1].function if self.main else ""

    @property
    def in_loader(self) -> bool:
        """Whether it waits for its data loader."""
        return frames.is_in_loader(self.main)

    def whole_text(self) -> str:
        """For a person: this process's stacks and its children's."""
        parts = [self.text.rstrip() or _silent(self)]
        parts += [f"{child.what} {child.pid}:\n{child.text.rstrip() or _silent(child)}" for child in self.children]
        return "\n\n".join(parts) + "\n"


def collect(beats: Mapping[int, Beat], seconds: float = 2.0, *, wake: bool = False) -> dict[int, Stack]:
    """The stacks of live ranks, by rank. No harm is done: a rank that does not answer in time has an empty text.

    With `wake`, a rank that is stopped is continued to answer: it does so before it runs another instruction.

    Processes that were forked from a rank write into the same descriptor, so they are asked after it.
    """
    beats = {rank: beat for rank, beat in beats.items() if beat.pid}
    texts = _ask({rank: (beat.pid, beat) for rank, beat in beats.items()}, seconds, wake)
    children: dict[int, list[Stack]] = {rank: [] for rank in beats}
    for rank, beat in beats.items():
        for child in children_of(beat.pid):
            text = _ask({rank: (child, beat)}, min(seconds, 0.5), wake)[rank]
            children[rank].append(Stack(child, state_of(child), text, _main_thread(text), what=words_for(child)))
    return {
        rank: Stack(beat.pid, state_of(beat.pid), texts[rank], _main_thread(texts[rank]), tuple(children[rank]))
        for rank, beat in beats.items()
    }


def with_py_spy(pid: int) -> str:
    """The stack with native frames, by py-spy where that is installed and allowed; else empty."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--native", "--pid", str(pid)],
            capture_output=True, text=True, timeout=_PY_SPY_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _ask(asked: Mapping[int, tuple[int, Beat]], seconds: float, wake: bool) -> dict[int, str]:
    """Signal all, then wait until each has written and fallen quiet."""
    texts = dict.fromkeys(asked, "")
    ends: dict[int, tuple[str, int]] = {}
    for rank, (pid, beat) in asked.items():
        path = f"/proc/{pid}/fd/{beat.stacks}"
        try:
            before = os.stat(path).st_size
            if not catches(pid, STACKS_SIGNAL) or (state_of(pid) in STOPPED and not wake):
                continue
            send_to_main_thread(pid, STACKS_SIGNAL)
            if wake:
                os.kill(pid, signal.SIGCONT)
        except OSError:
            continue
        ends[rank] = path, before
    deadline, sizes, changed = time.monotonic() + seconds, dict.fromkeys(ends, -1), time.monotonic()
    while ends and time.monotonic() < deadline:
        now = {rank: _size(path) for rank, (path, _) in ends.items()}
        if now != sizes:
            sizes, changed = now, time.monotonic()
        wrote = all(now[rank] > before for rank, (_, before) in ends.items())
        if wrote and time.monotonic() - changed >= _QUIET_SECONDS:
            break
        time.sleep(_POLL_SECONDS)
    for rank, (path, before) in ends.items():
        texts[rank] = _read(path, before)
    return texts


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _read(path: str, start: int) -> str:
    try:
        with open(path, "rb") as stream:
            stream.seek(start)
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def _main_thread(text: str) -> tuple[Frame, ...]:
    """faulthandler writes the newest thread first, so the main thread last, and of each the innermost frame first."""
    last = text.rstrip().rpartition("\n\n")[2]
    return tuple(reversed(frames.parse(last)))


def _silent(stack: Stack) -> str:
    if stack.state in STOPPED:
        return "stopped by a signal (SIGSTOP): it cannot answer until it is continued"
    return f"no answer (process state {stack.state or 'gone'})"
