"""The model cut into stages, one or more a rank; micro batches flow through them."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from mgpu.parallel._composed import ComposedStrategy, Degrees
from mgpu.parallel._options import PipelineOptions as StageOptions
from mgpu.parallel.base import StrategyOptions


class PipelineOptions(StageOptions):
    """Options of `strategy: pipeline`."""

    replicate: int = Field(default=1, ge=1)
    """Whole copies of the pipeline; each has devices / replicate ranks."""


class Pipeline(ComposedStrategy):
    """`torch.distributed.pipelining`."""

    Options: ClassVar[type[StrategyOptions]] = PipelineOptions
    options: PipelineOptions

    def degrees(self, world: int) -> Degrees:
        return self.divided(world, replicate=self.options.replicate, rest="pipeline")

    def pipeline(self) -> dict[str, Any]:
        return self.options.stages()
