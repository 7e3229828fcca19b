"""The run as the person who started it sees it: a progress line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from mgpu.loggers._numbers import duration_text, learning_rate_text, loss_text, metric_text, norm_text, rate_text
from mgpu.loggers.base import Logger, Value
from mgpu.runs import Run

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_LINES_A_RUN = 25
_SECONDS_A_LINE = 30.0
_SECONDS_A_REFRESH = 0.1
_BAR_WIDTHS = range(10, 41)
_GAP = "  "
_DROPPED_FIRST = ("grad", "lr", "samples/s", "tokens/s", "bar", "eta", "loss")
"""What a narrow terminal does without, in this order; the step stays."""

_MOVEMENTS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[^\[\]]|[\x00-\x08\x0b-\x1a]"
)
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m|\x1b")


class ConsoleLogger(Logger):
    """Progress on stderr.

    On a terminal, one live line: bar, step, loss, learning rate, speed, time left. Elsewhere (a file, a pipe,
    `TERM=dumb`) about 25 plain lines a run, and one at least every 30 s of training. `NO_COLOR` takes the colours away.
    Everything is printed when it is told: there is no thread and no timer.
    """

    where: ClassVar[Literal["rank0", "front"]] = "front"

    def __init__(
        self, console: Console | None = None, *, total_steps: int | None = None, unit: str | None = None
    ) -> None:
        """`total_steps` and `unit` (`sample` or `token`) are otherwise read from the plan and the `training` event."""
        from rich.console import Console

        self._console = console or Console(stderr=True)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._refreshed = 0.0
        self._given_total, self._given_unit = total_steps, unit
        self._total, self._unit = total_steps, unit
        self._run: Run | None = None
        self._progress = _Progress()

    def open(self, run: Run, *, resume_step: int) -> None:
        self._run = run
        self._begin()

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        if step <= self._progress.step:
            self._begin()  # A new attempt goes back to its checkpoint: the pace of the old one says nothing.
        if self._progress.step < 0:
            self._learn_size()
        is_due = self._progress.advance(step, values, self._total)
        if self._is_live:
            self._show()
        elif is_due:
            self._print_progress()

    def evaluated(self, step: int, values: Mapping[str, Value]) -> None:
        shown = [f"{name} {metric_text(value)}" for name, value in values.items() if name != "step"]
        self.print_line(_GAP.join([f"eval at step {step}", *shown]))

    def close(self, outcome: str) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._progress.step >= 0 and not self._progress.is_printed:
            self._print_progress()

    def print_line(self, text: str, style: str | None = None) -> None:
        """Print whole lines, above the progress line where there is one.

        They are what a rank wrote: colours pass on a terminal, cursor movements never; of a line that rewrote itself
        with carriage returns the last version is shown.
        """
        for line in text.rstrip("\r\n").split("\n"):
            clean = _MOVEMENTS.sub("", line.rstrip("\r").rpartition("\r")[2])
            if self._is_live:
                from rich.text import Text

                self._console.print(Text.from_ansi(clean, style=style or ""), soft_wrap=True, highlight=False)
            else:
                self._console.file.write(_COLOURS.sub("", clean) + "\n")
                self._console.file.flush()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Somebody else writes lines to the terminal meanwhile: the live line is taken away, and then put back."""
        was_live = self._live is not None
        if self._live is not None:
            self._live.stop()
            self._live = None
        yield
        if was_live:
            self._show()

    def _begin(self) -> None:
        self._progress = _Progress()
        self._total, self._unit = self._given_total, self._given_unit

    def _learn_size(self) -> None:
        """Total steps and unit: by now the attempt has told how long its training is, if the plan could not."""
        if self._run is None:
            return
        plan = self._run.plan()
        training = [event for event in self._run.events() if event.get("event") == "training"]
        newest = training[-1] if training else {}
        for total in (newest.get("total_steps"), plan.get("steps")):
            if self._total is None and isinstance(total, int):
                self._total = total
        for unit in (newest.get("unit"), plan.get("unit")):
            if self._unit is None and isinstance(unit, str):
                self._unit = unit

    def _print_progress(self) -> None:
        self._progress.mark_printed()
        self.print_line(_GAP.join(self._progress.cells(self._total, self._unit).values()))

    def _show(self) -> None:
        now = time.monotonic()
        if self._live is not None and now - self._refreshed < _SECONDS_A_REFRESH and self._progress.step != self._total:
            return
        self._refreshed = now
        if self._live is None:
            from rich.live import Live

            # Its redirection would send what this process prints to stdout, for scripts, to stderr.
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(self._progress_line(), refresh=True)

    def _progress_line(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        cells = fit(
            self._progress.cells(self._total, self._unit), self._console.width, with_bar=self._total is not None
        )
        line = Table.grid(padding=(0, len(_GAP), 0, 0), pad_edge=False)
        shown: list[RenderableType] = []
        for name, text in cells.items():
            line.add_column(no_wrap=True)
            if name == "bar":
                shown.append(ProgressBar(self._total, min(self._progress.step, self._total or 0), width=len(text)))
            else:
                shown.append(Text(text, style=_STYLES.get(name, "")))
        line.add_row(*shown)
        return line


_STYLES = {"loss": "bold", "lr": "dim", "eta": "cyan"}


def fit(cells: Mapping[str, str], width: int, *, with_bar: bool) -> dict[str, str]:
    """The cells that fit side by side into `width` columns, behind a bar as long as there is room for.

    The bar is a text of its length, called `bar`. A column is left free: terminals wrap when the last one is written.
    """
    chosen = {"bar": " " * _BAR_WIDTHS.start, **cells} if with_bar else dict(cells)

    def spare() -> int:
        return width - 1 - sum(map(len, chosen.values())) - len(_GAP) * (len(chosen) - 1)

    for name in _DROPPED_FIRST:
        if spare() >= 0:
            break
        chosen.pop(name, None)
    if "bar" in chosen:
        chosen["bar"] = " " * min(_BAR_WIDTHS.start + spare(), _BAR_WIDTHS.stop - 1)
    return chosen


@dataclass
class _Progress:
    """How far an attempt has come, how fast it goes, and which of its steps deserve a plain line."""

    step: int = -1
    values: Mapping[str, Value] = field(default_factory=dict)
    is_printed: bool = False
    _pace: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=50))
    _printed_step: int = -1
    _printed_seconds: float = 0.0

    def advance(self, step: int, values: Mapping[str, Value], total: int | None) -> bool:
        """Take in a step; whether a plain line is due for it."""
        is_first = self.step < 0
        self.step, self.values, self.is_printed = step, values, False
        seconds = self._seconds()
        if seconds is not None:
            self._pace.append((step, seconds))
        if is_first or step == total:
            return True
        if seconds is not None and seconds - self._printed_seconds >= _SECONDS_A_LINE:
            return True
        if total is None:
            return step >= 2 * self._printed_step
        stride = max(1.0, total / _LINES_A_RUN)
        return step // stride > self._printed_step // stride

    def mark_printed(self) -> None:
        self.is_printed, self._printed_step = True, self.step
        self._printed_seconds = self._seconds() or self._printed_seconds

    def seconds_left(self, total: int | None) -> float | None:
        """At the pace of the last steps told; None until there are two of them."""
        if total is None or len(self._pace) < 2:
            return None
        (first, began), (last, ended) = self._pace[0], self._pace[-1]
        return max(0, total - last) * (ended - began) / (last - first)

    def cells(self, total: int | None, unit: str | None) -> dict[str, str]:
        """What is shown of this step, by name, in the order it is shown."""
        left = self.seconds_left(total)
        cells = {"step": f"step {self.step}" if total is None else f"step {self.step}/{total}"}
        for name, key, form in _CELLS:
            value = self.values.get(key)
            if value is not None and (name != "tokens/s" or unit == "token"):
                cells[name] = form(value)
        if left is not None:
            cells["eta"] = f"eta {duration_text(left)}"
        return cells

    def _seconds(self) -> float | None:
        seconds = self.values.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None


_CELLS: tuple[tuple[str, str, Callable[[Value], str]], ...] = (
    ("loss", "loss", lambda value: f"loss {loss_text(value)}"),
    ("lr", "lr", lambda value: f"lr {learning_rate_text(value)}"),
    ("grad", "grad_norm", lambda value: f"grad {norm_text(value)}"),
    ("samples/s", "samples_per_s", lambda value: f"{rate_text(value)} samples/s"),
    ("tokens/s", "units_per_s", lambda value: f"{rate_text(value)} tokens/s"),
)
"""Name of the cell, key of the value, and how it is written."""
