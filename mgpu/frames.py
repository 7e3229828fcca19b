"""Which line of a stack is the user's own, and what a stack waits for. Told by the files its frames lie in."""

from __future__ import annotations

import functools
import importlib.util
import re
import site
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_MGPU = f"{Path(__file__).parent}/"
_OWN_CODE_OF_USERS = f"{_MGPU}zoo/"
_COLLECTIVE = ("distributed/", "nn/parallel/", "autograd/")
_LOADER = "utils/data/"
_PASSED_OVER = ("_ops.py", "utils/_contextlib.py", "_compile.py")
_LINE = re.compile(r'^\s*File "([^"]+)", line (\d+),? in (.+?)$', re.MULTILINE)


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@functools.cache
def _torch() -> str:
    """The folder of torch, which is not imported for it; a name that matches nothing where there is none."""
    found = importlib.util.find_spec("torch")
    return f"{Path(found.origin).parent}/" if found is not None and found.origin else "\0"


@functools.cache
def _libraries() -> tuple[str, ...]:
    return (*site.getsitepackages(), sysconfig.get_path("stdlib"), "<")


def parse(text: str) -> list[Frame]:
    """The frames of a traceback, or of what faulthandler writes, in the order of the text."""
    return [Frame(match[1], int(match[2]), match[3]) for match in _LINE.finditer(text)]


def users(stack: Iterable[Frame]) -> list[Frame]:
    """The frames that are the user's own code, in the order given."""
    return [frame for frame in stack if not _is_ours(frame.file) and not frame.file.startswith(_libraries())]


def place(innermost_last: Sequence[Frame]) -> str:
    """`file:line in function` of the innermost frame of the user's own code, or else the innermost."""
    return "".join(map(str, (users(innermost_last) or list(innermost_last))[-1:]))


def is_in_collective(innermost_last: Sequence[Frame]) -> bool:
    """Whether the innermost call is one of torch.distributed, of DDP, or the backward pass that runs DDP's hooks."""
    return _innermost(innermost_last).startswith(_COLLECTIVE)


def is_in_loader(frames: Iterable[Frame]) -> bool:
    """Whether a data loader is at work, or waited for."""
    return any(frame.file.startswith(_torch() + _LOADER) for frame in frames)


def _is_ours(file: str) -> bool:
    return file.startswith((_torch(), "<")) or (file.startswith(_MGPU) and not file.startswith(_OWN_CODE_OF_USERS))


def _innermost(innermost_last: Sequence[Frame]) -> str:
    """The innermost file, relative to torch's folder, past torch's own wrappers; empty if it is none of torch's."""
    for frame in reversed(innermost_last):
        if not frame.file.startswith(_torch()):
            return ""
        inside = frame.file.removeprefix(_torch())
        if inside not in _PASSED_OVER:
            return inside
    return ""
