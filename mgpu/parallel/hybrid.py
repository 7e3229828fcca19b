"""A mesh of several strategies: replicas of shards of pipelines of split layers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from mgpu.errors import PlanError
from mgpu.parallel._composed import ComposedStrategy, Degrees, degree_product
from mgpu.parallel._options import PipelineOptions, ShardingOptions, TensorOptions
from mgpu.parallel._sharded import Sharding
from mgpu.parallel._tensor_plans import TensorSplit
from mgpu.parallel.base import StrategyOptions

Degree = Literal["auto"] | int


class HybridOptions(ShardingOptions, PipelineOptions, TensorOptions):
    """Options of `strategy: hybrid`: the degrees of the mesh, and those of its parts."""

    replicate: Degree = 1
    """Whole copies of the model."""
    shard: Degree = 1
    """Ranks that parameters are sharded over (FSDP)."""
    pipeline: Degree = 1
    """Ranks that stages are spread over."""
    tensor: Degree = 1
    """Ranks that layers are split over."""
    context: int = Field(default=1, ge=1)
    """Ranks that a sequence is split over; not supported above 1."""


class Hybrid(ComposedStrategy):
    """Up to four degrees; one of them may be `auto`: what the others leave of the devices."""

    Options: ClassVar[type[StrategyOptions]] = HybridOptions
    options: HybridOptions

    def degrees(self, world: int) -> Degrees:
        options = self.options
        if options.context > 1:
            raise PlanError(
                f"context {options.context}: context parallelism is not supported",
                key=("parallel", "context"),
                hint="PyTorch's needs its own attention kernels on GPUs; use tensor with sequence: true",
            )
        asked = {name: getattr(options, name) for name in ("replicate", "shard", "pipeline", "tensor")}
        free = [name for name, size in asked.items() if size == "auto"]
        wrong = [name for name, size in asked.items() if size != "auto" and size < 1]
        if len(free) > 1 or wrong:
            raise PlanError(
                f"{' and '.join(free or wrong)}: {'one degree may be auto' if free else 'a degree is at least 1'}",
                key=("parallel", (free or wrong)[-1]),
            )
        given = {name: size for name, size in asked.items() if size != "auto"}
        if free:
            product = 1
            for size in given.values():
                product *= size
            given[free[0]] = world // product if world % product == 0 else 1
        degree_product("hybrid", {name: given[name] for name in asked}, world)
        return Degrees(**given)

    def sharding(self) -> Sharding | None:
        return self.options.sharding() if self.options.shard != 1 else None

    def tensor_split(self) -> TensorSplit | None:
        return self.options.tensor_split() if self.options.tensor != 1 else None

    def pipeline(self) -> dict[str, Any] | None:
        return self.options.stages() if self.options.pipeline != 1 else None
