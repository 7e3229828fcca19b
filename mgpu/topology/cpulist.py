"""CPU and node lists as Linux writes them: `0-31,64-95` (man 7 cpuset, "List format")."""

from __future__ import annotations

import re
from collections.abc import Iterable

LIST = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*,?")
MOST = 65536


def parse_list(text: str) -> tuple[int, ...]:
    """The numbers of a list, ascending and each once; ValueError where `text` is none.

    >>> parse_list("0-2,8")
    (0, 1, 2, 8)
    """
    if not text.strip():
        return ()
    if not LIST.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is no list like 0-31,64-95")
    found: set[int] = set()
    for part in text.strip().rstrip(",").split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not low <= high < MOST:
            raise ValueError(f"{text!r}: {part} is no range")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def runs(numbers: Iterable[int]) -> list[range]:
    """The stretches of consecutive numbers, ascending.

    >>> runs([0, 1, 2, 8])
    [range(0, 3), range(8, 9)]
    """
    found: list[range] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def format_list(numbers: Iterable[int]) -> str:
    """The shortest list of `numbers`; `parse_list` reads it back."""
    return ",".join(f"{run.start}-{run.stop - 1}" if len(run) > 1 else str(run.start) for run in runs(numbers))
