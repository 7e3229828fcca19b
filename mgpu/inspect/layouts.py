"""Which layouts of a training are compared, and how they are written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mgpu.errors import Refusal, SpecError
from mgpu.launch.starting import lay_out
from mgpu.plugins import plugin_names
from mgpu.spec import LoadedSpec, load_spec

EVERY_STRATEGY = "all"
_ON_CPU = ("cpu:1", "cpu:2", "cpu:4")
_ON_GPU = ("1", "2", "4", "8")
_TEXT = re.compile(
    r"\s*(?:(?P<strategy>[A-Za-z_][\w.]*(?::[A-Za-z_]\w*(?![\w=]))?)(?P<options>(?::\w+=[^:=,@]+)*)@)?"
    r"(?P<devices>[a-z]+(?::\d+)?|\d+)\s*"
)


@dataclass(frozen=True)
class Layout:
    """`devices`, `strategy@devices` or `strategy:option=value@devices`; `strategy` None is the spec's own.

    >>> str(Layout.parse("hybrid:replicate=2:pipeline=2@cpu:4"))
    'hybrid:replicate=2:pipeline=2@cpu:4'
    """

    devices: str
    strategy: str | None = None
    options: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Layout:
        match = _TEXT.fullmatch(text)
        if match is None:
            raise Refusal(f"layout {text!r}", hint="write devices, or strategy@devices: cpu:2, ddp@cpu:4")
        return cls(match["devices"], match["strategy"], tuple((match["options"] or "").split(":")[1:]))

    @property
    def overrides(self) -> list[str]:
        """The layout as changes to a spec."""
        chosen = [f"devices={self.devices}"]
        if self.strategy is None:
            return chosen
        options = [f"{name}: {value}" for name, _, value in (option.partition("=") for option in self.options)]
        return [*chosen, f"parallel={{{', '.join([f'strategy: {self.strategy}', *options])}}}"]

    def __str__(self) -> str:
        return f"{':'.join([self.strategy, *self.options])}@{self.devices}" if self.strategy else self.devices


def choose(
    path: Path, overrides: Sequence[str], loaded: LoadedSpec, asked: Sequence[str], tell: Callable[[str], None]
) -> list[Layout]:
    """The layouts to compare, the reference first. What is asked for and does not fit the spec is refused; without `asked`,
    and of `all`, those that do not fit are left out, and of `all` that is told."""
    if not asked:
        names = _ON_CPU if lay_out(loaded).device == "cpu" else _ON_GPU
        return [layout for layout in map(Layout.parse, names) if not _fault(path, overrides, layout)]
    if list(asked) == [EVERY_STRATEGY]:
        fitting = []
        for layout in _every_strategy(lay_out(loaded).device):
            if fault := _fault(path, overrides, layout):
                tell(f"{layout} is left out: {fault}")
            else:
                fitting.append(layout)
        return fitting
    layouts = [Layout.parse(text) for text in asked]
    for layout in layouts:
        if fault := _fault(path, overrides, layout):
            raise Refusal(f"layout {layout}: {fault}")
    return layouts


def _every_strategy(device: str) -> list[Layout]:
    """Every built-in strategy on two devices, after `single` on one; hybrid as two pipelines of two stages."""
    one, two, four = ("cpu:1", "cpu:2", "cpu:4") if device == "cpu" else ("1", "2", "4")
    found = [Layout(one, "single")]
    for name in plugin_names("mgpu.parallel"):
        if name == "hybrid":
            found.append(Layout(four, name, ("replicate=2", "pipeline=2")))
        elif name != "single":
            found.append(Layout(two, name))
    return found


def _fault(path: Path, overrides: Sequence[str], layout: Layout) -> str:
    """Why the plan refuses the layout; empty where it does not."""
    try:
        lay_out(load_spec(path, [*overrides, *layout.overrides]))
    except SpecError as error:
        return " ".join(error.lines())
    return ""
