"""Parameters, gradients and optimizer state sharded over ranks; each rank has its own part of the batch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from mgpu.parallel._composed import ComposedStrategy, Degrees
from mgpu.parallel._options import ShardingOptions
from mgpu.parallel._sharded import Sharding
from mgpu.parallel.base import StrategyOptions


class FsdpOptions(ShardingOptions):
    """Options of `strategy: fsdp`."""

    replicate: int = Field(default=1, ge=1)
    """Groups of ranks that each hold all shards (HSDP): traffic between groups is gradients only."""


class Fsdp(ComposedStrategy):
    """`torch.distributed.fsdp.fully_shard` (FSDP2)."""

    Options: ClassVar[type[StrategyOptions]] = FsdpOptions
    options: FsdpOptions

    def degrees(self, world: int) -> Degrees:
        return self.divided(world, replicate=self.options.replicate, rest="shard")

    def sharding(self) -> Sharding:
        return self.options.sharding()
