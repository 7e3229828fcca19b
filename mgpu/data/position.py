"""How far a training has come, in samples: what makes a resume exact on any number of replicas."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Position:
    """A place in a training.

    `offset` counts the samples consumed in `epoch`, `samples` those of all epochs, `batches` the global batches, and
    `step` the optimizer steps (fewer than batches where fp16 skipped one). `parts`, where a data set splits itself over
    ranks: the micro batches that each replica has consumed in this epoch.
    """

    epoch: int = 0
    offset: int = 0
    samples: int = 0
    batches: int = 0
    step: int = 0
    parts: tuple[int, ...] = ()

    def stepped(self, step: int) -> Position:
        """The same place, `step` optimizer steps done."""
        return dataclasses.replace(self, step=step)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Position:
        return cls(**{**value, "parts": tuple(value.get("parts", ()))})


@dataclass(frozen=True)
class BatchGrid:
    """How an epoch of `n` samples is cut: global batches of `size`, micro batches of `micro`."""

    n: int
    size: int
    micro: int
    last: Literal["keep", "drop"] = "keep"

    @property
    def batches_per_epoch(self) -> int:
        """Global batches of one epoch that begins at its start."""
        return self.n // self.size if self.last == "drop" else -(-self.n // self.size)

    def window(self, offset: int) -> tuple[int, int]:
        """The positions [start, stop) of the global batch that begins at `offset`; the last one may be shorter."""
        return offset, min(offset + self.size, self.n)

    def micro_batches(self, offset: int) -> list[tuple[int, int]]:
        """The position ranges of the micro batches of that global batch; the last one may be shorter."""
        start, stop = self.window(offset)
        return [(begin, min(begin + self.micro, stop)) for begin in range(start, stop, self.micro)]

    def shares(self, count: int, replicas: int) -> list[range]:
        """Contiguous runs of `count` micro batches, one a replica: sizes differ by at most one, longer ones first.

        >>> BatchGrid(100, 8, 2).shares(5, 3)
        [range(0, 2), range(2, 4), range(4, 5)]
        """
        whole, rest = divmod(count, replicas)
        bounds = [replica * whole + min(replica, rest) for replica in range(replicas + 1)]
        return [range(bounds[replica], bounds[replica + 1]) for replica in range(replicas)]

    def settle(self, position: Position) -> Position:
        """Where training goes on from `position`: a rest that is too short for this grid is dropped by the last rule.

        A resume with a larger global batch can meet such a rest in the middle of what was a whole batch before, and one with
        fewer samples a place beyond their end.
        """
        left = self.n - position.offset
        if self.n and (left <= 0 or (self.last == "drop" and left < self.size <= self.n)):
            return dataclasses.replace(position, epoch=position.epoch + 1, offset=0)
        return position

    def batches_left(self, position: Position, epochs: int) -> int:
        """Global batches from `position` (settled) to the end of so many epochs.

        >>> BatchGrid(10, 4, 2).batches_left(Position(epoch=1, offset=4), 3)
        5
        """
        if position.epoch >= epochs:
            return 0
        here = BatchGrid(self.n - position.offset, self.size, self.micro, self.last).batches_per_epoch
        return here + (epochs - position.epoch - 1) * self.batches_per_epoch

    def advance(self, position: Position) -> Position:
        """The place after the global batch at `position`; the next epoch when no batch is left in this one."""
        start, stop = self.window(position.offset)
        left = self.n - stop
        over = left == 0 or (self.last == "drop" and left < self.size)
        return Position(
            epoch=position.epoch + over,
            offset=0 if over else stop,
            samples=position.samples + stop - start,
            batches=position.batches + 1,
            step=position.step,
        )
