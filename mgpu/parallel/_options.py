"""Options that more than one strategy has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mgpu.parallel._schedules import SCHEDULES
from mgpu.parallel._sharded import Sharding
from mgpu.parallel._tensor_plans import TensorSplit
from mgpu.parallel._tensor_styles import STYLES
from mgpu.parallel.base import StrategyOptions

ScheduleName = Literal["gpipe", "1f1b", "looped", "interleaved", "zero-bubble", "zbv", "dualpipev", "sequential"]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
assert set(ScheduleName.__args__) == set(SCHEDULES)  # type: ignore[attr-defined]


class ShardingOptions(StrategyOptions):
    """How parameters are sharded."""

    wrap: Literal["auto", "whole"] | int | Names = "auto"
    """What is gathered at a time: `auto` (each repeated block), class names, the least number of parameters, or the `whole`
    model, which may then go through other blocks on one rank than on another."""
    reshard_after_forward: bool = True
    """Give gathered parameters up after the forward pass and gather them again for backward: less memory, more traffic."""
    gather: Literal["fp32", "bf16"] = "fp32"
    """The precision in which parameters travel and compute; gradients are reduced in fp32."""
    offload: bool = False
    """Keep shards in host memory, on the device only while used (needs an accelerator)."""
    meta: bool = False
    """Build the model without memory on all ranks but the first, for models that do not fit one device."""

    def sharding(self) -> Sharding:
        return Sharding(self.wrap, self.reshard_after_forward, self.offload, self.meta, self.gather)


class TensorOptions(StrategyOptions):
    """How layers are split inside."""

    plan: Literal["auto"] | dict[str, Literal[STYLES]] = "auto"  # type: ignore[valid-type]
    """Styles by name pattern, as `layers.*.up: colwise`. `auto` knows the zoo's GPT, torchvision's VisionTransformer, GPT-2 of
    transformers, models that carry a `_tp_plan`, and in others torch's MultiheadAttention (by heads) and the layers of its
    Transformer. What is split how is told when the run starts."""
    sequence: bool = False
    """Split the activations between the split layers along the sequence: of the zoo's GPT, or as your plan says."""
    loss_parallel: bool = False
    """Leave the logits split for the loss, which must be cross-entropy: where the plan splits the head (colwise_gather)."""

    def tensor_split(self) -> TensorSplit:
        return TensorSplit(self.plan, self.sequence, self.loss_parallel)


class PipelineOptions(StrategyOptions):
    """How the model is cut into stages, and in which order micro batches go through them."""

    schedule: ScheduleName = "1f1b"
    """The order of passes; `sequential` runs one micro batch at a time."""
    split: Literal["auto", "time", "flops", "weights"] | Names = "auto"
    """Names of the modules that stages 1, 2, ... begin with. Or what the dearest stage of a stack of blocks shall have least
    of: `time` (of a micro batch, forward and backward, measured block by block when the run starts), `flops` (the
    floating-point operations of a micro batch), or the number of `weights`. `auto` is time on accelerators and flops on
    CPUs, and weights where neither can be had. A run keeps its cuts when it resumes."""
    chunks: int = Field(default=2, ge=1)
    """Stages a rank, where the schedule leaves that open (looped, interleaved, zero-bubble)."""

    def stages(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "split": self.split, "chunks": self.chunks}
