"""The tensor-parallel plan that a model of Hugging Face carries, in our styles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

STYLES_OF = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "table",
    "rowwise_rep": "rowwise_split",
    "rowwise_split_input": "rowwise_split",
    "replicated_with_grad_allreduce": "replicated",
    "packed_colwise": "packed_colwise",
    "packed_rowwise": "packed_rowwise",
    "moe_tp_experts": "experts",
    "mla_kv_a_proj": "mla_kv_a_proj",
    "local_params": "local",
}
"""Ours for theirs (transformers.distributed.tensor_parallel)."""


def carried_plan(model: nn.Module) -> dict[str, str]:
    """The plan that `model` carries, or nothing; PlanError where it uses a style that we do not have."""
    carried: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    for name, module in model.named_modules():
        inner = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if inner and not hasattr(module, "base_model_prefix"):
            continue
        prefix = f"{name}." if name else ""
        if inner and name == getattr(model, "base_model_prefix", name):
            carried.update({f"{prefix}{pattern}": style for pattern, style in inner.items()})
    unknown = {style for style in carried.values() if style not in STYLES_OF}
    if unknown:
        raise PlanError(
            f"the model's own plan uses {', '.join(sorted(map(str, unknown)))}, which is not supported",
            key=("parallel", "plan"),
            hint="write a plan of your own",
        )
    return {pattern: STYLES_OF[style] for pattern, style in carried.items()}
