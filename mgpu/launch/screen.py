"""A run as people see it on stderr: steps, evaluations, notes, restarts, beside what a rank prints."""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mgpu.files import LineTail, has_room
from mgpu.runs import Run

if TYPE_CHECKING:
    from rich.console import Console

    from mgpu.loggers.console import ConsoleLogger

_ROOM_SECONDS = 1.0
_REPLAYED = ("note", "stop_asked")
"""What is told of the present attempt to whoever begins to watch in the midst of it."""


class RankOutput(Protocol):
    """What a rank prints, shown beside the rest: where and in which form is its own affair."""

    def show(self, display: ConsoleLogger, *, at_end: bool) -> None:
        """Show what is new; `at_end` also a last line that nothing ended."""

    def follow(self, attempt: int) -> None:
        """Go on with the output of `attempt`."""

    def finish_line(self) -> None:
        """What follows begins on a line of its own."""

    def mute(self) -> None:
        """Nobody reads any more."""


class Screen:
    """Shows what the files of a run tell, as they grow. It neither owns the run nor needs it to be there."""

    def __init__(self, run: Run, attempt: int, output: RankOutput) -> None:
        self.run, self.attempt, self.output = run, attempt, output
        self.on_start: Callable[[], None] = lambda: None
        """Called when an attempt has started."""
        self._metrics = LineTail(run.metrics_path)
        self._events = LineTail(run.events_path)
        self._is_full = False
        self._look_again = 0.0

    @functools.cached_property
    def console(self) -> Console:
        """Where people read. Made when first needed: the node is started before Rich is imported."""
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True)

    @functools.cached_property
    def display(self) -> ConsoleLogger:
        from mgpu.loggers.console import ConsoleLogger

        return ConsoleLogger(self.console)

    def skip_to_end(self) -> None:
        """Leave out what was told before."""
        self._metrics.skip_to_end()
        self._events.skip_to_end()

    def catch_up(self) -> None:
        """Show what one has to know who begins to watch now: notes and failed saves of this attempt, its newest step."""
        self._quietly(self._catch_up)

    def show(self, *, at_end: bool = False) -> None:
        """Show what is new. `at_end`: nothing more will come."""
        self._quietly(lambda: self._show(at_end))

    def close(self) -> None:
        """Leave the terminal as it was found."""
        self._quietly(self.output.finish_line)
        self._quietly(lambda: self.display.close(str(self.run.state)))

    def print_line(self, text: str, style: str | None = None) -> None:
        """A line for people, on its own whatever a rank was writing."""
        self.output.finish_line()
        self.display.print_line(text, style=style)

    def tell(self, *lines: str) -> None:
        """Lines for people that are in no file."""
        for line in lines:
            self._quietly(functools.partial(self.print_line, line))

    def look_for_room(self) -> None:
        """Said here, for on a full disk nobody else can: all that the ranks and the node say goes through files of the run."""
        self._quietly(self._look_for_room)

    def _look_for_room(self) -> None:
        now = time.monotonic()
        if now < self._look_again or not self.run.path.exists():
            return
        self._look_again = now + _ROOM_SECONDS
        is_full = not has_room(self.run.path)
        if is_full and not self._is_full:
            text = f"warning: no room is left where {self.run.path} lies ({os.strerror(errno.ENOSPC)}): nothing can be saved"
            self.print_line(f"{text} or logged until there is; training goes on", style="red")
        self._is_full = is_full

    def _quietly(self, show: Callable[[], None]) -> None:
        """A terminal that was closed, or a reader that left, is no reason to lose the run: from then on it is silent."""
        try:
            show()
        except OSError:
            from rich.console import Console

            from mgpu.loggers.console import ConsoleLogger

            self.console = Console(file=open(os.devnull, "w", encoding="utf-8"), quiet=True)  # noqa: SIM115
            self.display = ConsoleLogger(self.console)
            self.output.mute()

    def _show(self, at_end: bool) -> None:
        self.output.show(self.display, at_end=at_end)
        for values in self._metrics.read():
            self.display.log(int(values.get("step", 0)), values)
        for event in self._events.read():
            self._tell(event)

    def _catch_up(self) -> None:
        present: list[dict[str, Any]] = []
        for event in self._events.read():
            if event.get("event") in ("starting", "restarting"):
                present = []
            present.append(event)
        for event in present:
            if event.get("event") == "attempt_started":
                self._begin(event["attempt"])
            elif event.get("event") in _REPLAYED:
                self._tell(event)
        start = next((event.get("start_step") for event in present if event.get("event") == "training"), None)
        self._metrics.skip_to_last()
        for values in self._metrics.read():
            # A line of an earlier attempt would tell a wrong pace: the clock starts anew with each.
            if isinstance(start, int) and values.get("step", 0) > start:
                self.display.log(int(values["step"]), values)

    def _begin(self, attempt: int) -> None:
        self.attempt = attempt
        self.output.follow(attempt)

    def _tell(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "attempt_started":
            self.on_start()
            self._begin(event["attempt"])
        elif kind == "evaluated":
            values = {key: value for key, value in event.items() if key not in ("event", "time", "unix", "step")}
            self.output.finish_line()
            self.display.evaluated(event["step"], values)
        elif kind == "note":
            self.print_line(event["text"])
        elif kind == "stop_asked":
            more = "; once more to end at once" if event["signal"] == "SIGINT" else ""
            self.print_line(f"{event['signal']}: saving a checkpoint, then stopping{more}")
        elif kind == "restarting":
            from mgpu.launch.report import attempt_lines

            self.output.show(self.display, at_end=True)
            for line in attempt_lines(self.run, self.attempt):
                self.print_line(line, style="red")
            wait = f" in {event['wait']:.0f} s" if event["wait"] else ""
            count = f"restart {event['number']} of {event['max']}"
            self.print_line(f"{count}{wait}, from the checkpoint of step {event['from_step']}")


def is_script(run: Run) -> bool:
    """Whether it runs a script of the user's: mgpu makes no steps then, and its output is passed on byte by byte."""
    return run.plan().get("size") is None
