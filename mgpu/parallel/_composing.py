"""What of a spec does not compose with a mesh: found before a process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mgpu.errors import PlanError
from mgpu.parallel.base import Layout

if TYPE_CHECKING:
    from mgpu.parallel._composed import Degrees
    from mgpu.parallel._sharded import Sharding

HEADS = ("heads", "num_heads", "n_head", "n_heads", "num_attention_heads", "num_key_value_heads")


def check_heads(layout: Layout, degree: int) -> None:
    """PlanError by the numbers of heads that the spec itself tells, down to nested arguments."""

    def walk(value: Any, key: tuple[str | int, ...]) -> None:
        for name, inner in value.items() if isinstance(value, dict) else ():
            if name in HEADS and isinstance(inner, int) and inner % degree:
                raise PlanError(
                    f"{inner} heads do not divide by the tensor degree {degree}",
                    key=(*key, name),
                    hint=f"write a multiple of {degree}, or a degree that divides {inner}",
                )
            walk(inner, (*key, name))

    walk(layout.spec.model.args if layout.spec.model else {}, ("model", "args"))


def check_stages(layout: Layout, schedule: str, several: bool, stages: dict[str, Any], degrees: Degrees) -> None:
    """PlanError where the stages cannot be what `stages` (the options of the pipeline) asks for."""
    from mgpu.parallel._schedules import SCHEDULES

    count = SCHEDULES[schedule].stages(degrees.pipeline, stages["chunks"])
    split = stages["split"]
    if not isinstance(split, str) and len(split) != count - 1:
        raise PlanError(
            f"{len(split)} split points make {len(split) + 1} stages, schedule {schedule} on {degrees.pipeline} ranks has "
            f"{count}",
            key=("parallel", "split"),
            hint=f"name {count - 1} modules",
        )
    if layout.spec.compile and SCHEDULES[schedule].splits_backward:
        raise PlanError(
            f"compile does not compose with schedule {schedule}: it works out the gradients of inputs and weights apart, "
            "which a compiled backward pass cannot",
            key=("compile",),
            hint="write schedule: 1f1b, or compile: false",
        )
    if layout.spec.activation_checkpointing != "none" and SCHEDULES[schedule].splits_backward:
        raise PlanError(
            f"activation checkpointing does not compose with schedule {schedule}, which goes backward twice",
            key=("activation_checkpointing",),
            hint="write schedule: 1f1b, or activation_checkpointing: none",
        )


def check_sharding(layout: Layout, sharding: Sharding, degrees: Degrees) -> None:
    """PlanError where `sharding` does not go with the devices or the rest of the mesh."""
    if sharding.offload and layout.device == "cpu":
        raise PlanError(
            "offload keeps shards in host memory, and the devices are CPUs",
            key=("parallel", "offload"),
            hint="leave it out",
        )
    if sharding.on_meta and (degrees.pipeline > 1 or degrees.tensor > 1):
        raise PlanError("meta does not compose with pipeline or tensor", key=("parallel", "meta"), hint="leave it out")
