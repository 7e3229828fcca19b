"""The plans that need not be written: of models by their class, of torch's own blocks, and those that models carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mgpu.errors import PlanError
from mgpu.parallel._tensor_attention import keeps_methods
from mgpu.parallel._tensor_hugging_face import carried_plan
from mgpu.parallel._tensor_styles import STYLES

if TYPE_CHECKING:
    from torch import nn

GPT = {
    "layers.*.attention.q": "colwise", "layers.*.attention.k": "colwise", "layers.*.attention.v": "colwise",
    "layers.*.attention.o": "rowwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise",
    "tokens": "table", "head": "colwise_gather",
}  # fmt: skip
GPT_SEQUENCE = {
    **GPT,
    "layers.0": "scatter", "layers.*.attention_norm": "sequence", "layers.*.mlp_norm": "sequence",
    "layers.*.attention": "gather", "layers.*.mlp": "gather", "norm": "sequence", "head": "colwise_gather_sequence",
    "layers.*.attention.o": "rowwise_scatter", "layers.*.mlp.down": "rowwise_scatter",
}  # fmt: skip
VISION_TRANSFORMER = {
    "encoder.layers.*.self_attention": "attention",
    "encoder.layers.*.mlp.0": "colwise",
    "encoder.layers.*.mlp.3": "rowwise",
}
GPT2 = {
    # One matrix makes queries, keys and values one after the other: no cut of it is a cut into heads.
    "h.*.attn.c_attn": "colwise_gather", "h.*.attn.q_attn": "colwise_gather", "h.*.attn.c_proj": "rowwise_split",
    "h.*.crossattention.c_attn": "colwise_gather", "h.*.crossattention.q_attn": "colwise_gather",
    "h.*.crossattention.c_proj": "rowwise_split",
    "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise", "wte": "table",
}  # fmt: skip
GPT2_HEAD = {**{f"transformer.{pattern}": style for pattern, style in GPT2.items()}, "lm_head": "colwise_gather"}
BUILT_IN = {
    ("mgpu.zoo.gpt", "GPT"): GPT,
    ("torchvision.models.vision_transformer", "VisionTransformer"): VISION_TRANSFORMER,
    ("transformers.models.gpt2.modeling_gpt2", "GPT2Model"): GPT2,
    ("transformers.models.gpt2.modeling_gpt2", "GPT2LMHeadModel"): GPT2_HEAD,
}
ENCODER_LAYER = {"self_attn": "attention", "linear1": "colwise", "linear2": "rowwise"}
BLOCKS = {
    ("torch.nn.modules.transformer", "TransformerEncoderLayer"): ENCODER_LAYER,
    ("torch.nn.modules.transformer", "TransformerDecoderLayer"): {**ENCODER_LAYER, "multihead_attn": "attention"},
    ("torch.nn.modules.activation", "MultiheadAttention"): {"": "attention"},
}
"""Plans of blocks, for models that are known by nothing else. A class with methods of its own is another block."""


def known_plan(model: nn.Module, *, sequence: bool) -> Mapping[str, str]:
    """Styles by name pattern, for `model` or what it is built round; PlanError where none is known."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for kind in type(module).__mro__:
            built_in = BUILT_IN.get((kind.__module__, kind.__qualname__))
            if built_in is GPT and sequence:
                built_in = GPT_SEQUENCE
            if built_in is not None:
                return {prefix + pattern: style for pattern, style in built_in.items()}
    plan = carried_plan(model) or _of_blocks(model)
    if not plan:
        raise PlanError(
            f"no tensor-parallel plan is known for {type(model).__qualname__}",
            key=("parallel", "plan"),
            hint=f"write one: plan: {{'layers.*.up': colwise, 'layers.*.down': rowwise}}; styles: {', '.join(STYLES)}",
        )
    return plan


def _of_blocks(model: nn.Module) -> dict[str, str]:
    """The plan of a model that is built of known blocks."""
    return {
        ".".join(filter(None, (name, inner))): style
        for name, module in model.named_modules()
        for kind in type(module).__mro__
        for inner, style in BLOCKS.get((kind.__module__, kind.__qualname__), {}).items()
        if keeps_methods(type(module), kind)
    }
