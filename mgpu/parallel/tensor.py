"""Layers split inside: each rank holds columns or rows of the matrices, and all work on the same samples."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from mgpu.parallel._composed import ComposedStrategy, Degrees
from mgpu.parallel._options import TensorOptions as SplitOptions
from mgpu.parallel._tensor_plans import TensorSplit
from mgpu.parallel.base import StrategyOptions


class TensorOptions(SplitOptions):
    """Options of `strategy: tensor`."""

    replicate: int = Field(default=1, ge=1)
    """Whole copies of the model; each is split over devices / replicate ranks."""


class Tensor(ComposedStrategy):
    """`torch.distributed.tensor.parallel.parallelize_module`."""

    Options: ClassVar[type[StrategyOptions]] = TensorOptions
    options: TensorOptions

    def degrees(self, world: int) -> Degrees:
        return self.divided(world, replicate=self.options.replicate, rest="tensor")

    def tensor_split(self) -> TensorSplit:
        return self.options.tensor_split()
