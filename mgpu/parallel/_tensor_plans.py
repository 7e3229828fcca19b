"""Which layer is split how: plans of name patterns, the built-in ones, and the one a Hugging Face model carries."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mgpu.errors import PlanError, suggest
from mgpu.parallel._blocks import repeated_blocks
from mgpu.parallel._sharded import _ties
from mgpu.parallel._tensor_styles import STYLES, UNSPLIT, is_transposed, style_of

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

HUGGING_FACE = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "table",
    "rowwise_split_input": "rowwise_split",
    "replicated_with_grad_allreduce": "replicated",
}
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


@dataclass(frozen=True)
class TensorSplit:
    """A plan: `auto`, or styles by name pattern. `sequence` splits the residual stream along the sequence too."""

    plan: str | Mapping[str, str] = "auto"
    sequence: bool = False
    loss_parallel: bool = False

    def styles(self, model: nn.Module) -> dict[str, str]:
        """The style of each module that is split; PlanError where a pattern or a style is not there."""
        plan = self._plan(model)
        names = [name for name, _ in model.named_modules()]
        found: dict[str, str] = {}
        for pattern, style in plan.items():
            matching = fnmatch.filter(names, pattern)
            if not matching and isinstance(self.plan, Mapping):
                raise PlanError(
                    f"no module is named {pattern!r}", key=("parallel", "plan"), hint=suggest(pattern, names)
                )
            found.update(dict.fromkeys(matching, style))
        if self.loss_parallel:
            blocks = tuple(f"{name}." for name in repeated_blocks(model))
            heads = [name for name, style in found.items() if style == "colwise_gather" and not name.startswith(blocks)]
            found.update(dict.fromkeys(heads, "colwise_logits"))
        if not found:
            raise PlanError("the plan splits no module", key=("parallel", "plan"))
        return found

    def _plan(self, model: nn.Module) -> Mapping[str, str]:
        if isinstance(self.plan, Mapping):
            return self.plan
        for name, module in model.named_modules():  # the model, or what it is built round
            prefix = f"{name}." if name else ""
            for kind in type(module).__mro__:
                built_in = BUILT_IN.get((kind.__module__, kind.__qualname__))
                if built_in is GPT and self.sequence:
                    built_in = GPT_SEQUENCE
                if built_in is not None:
                    return {prefix + pattern: style for pattern, style in built_in.items()}
        return _of_hugging_face(model)

    def check(self, model: nn.Module, degree: int) -> None:
        """PlanError where a module of the plan does not divide by `degree`."""
        modules = dict(model.named_modules())
        for name, style in self.styles(model).items():
            weight = getattr(modules[name], "weight", None)
            if weight is None or weight.dim() < 2 or style in UNSPLIT:
                continue
            outputs, inputs = reversed(weight.shape) if is_transposed(modules[name]) else weight.shape[:2]
            size = inputs if style.startswith("rowwise") else outputs
            if size % degree:
                raise PlanError(
                    f"{name} has {size} {'inputs' if style.startswith('rowwise') else 'outputs'}, which do not divide by "
                    f"the tensor degree {degree}",
                    key=("parallel",),
                )
            heads = _heads(modules, name)
            if heads is not None and style == "colwise" and heads % degree:
                raise PlanError(
                    f"{heads} heads of {name.rpartition('.')[0]} do not divide by the tensor degree {degree}",
                    key=("parallel",),
                    hint=f"a degree that divides {heads} fits",
                )

    def apart(self, model: nn.Module) -> frozenset[str]:
        """The parameters that each tensor peer holds whole and uses on its part of the heads."""
        modules = [name for name, style in self.styles(model).items() if style == "replicated"]
        return frozenset(
            f"{name}.{inner}" for name in modules for inner, _ in model.get_submodule(name).named_parameters()
        )

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Split the layers of `model` that are here over `mesh`; a tied parameter stays one."""
        from torch.distributed.tensor.parallel import parallelize_module

        ties = _ties(model)
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        here = {
            name: style_of(style, model.get_submodule(name))
            for name, style in self.styles(model).items()
            if style != "replicated"
            and any(True for _ in model.get_submodule(name).parameters())  # on this pipeline rank
        }
        parallelize_module(model, mesh, here)
        for (holder, name), others in ties:
            first = getattr(holder, name)
            for other, other_name in others:
                second = getattr(other, other_name)
                if getattr(first, "placements", None) != getattr(second, "placements", None):
                    raise PlanError(
                        f"{name} is tied to {other_name}, but the plan splits them in two ways",
                        key=("parallel", "plan"),
                    )
                other._parameters[other_name] = first
        for name, parameter in model.named_parameters():
            if name in frozen:  # some styles make their parameters anew
                parameter.requires_grad_(False)


def _heads(modules: Mapping[str, nn.Module], name: str) -> int | None:
    """The number of heads that an attention projection makes, from the width of a head where its module tells it."""
    parent = modules[name.rpartition(".")[0]]
    width = getattr(parent, "head_width", None) or getattr(parent, "head_dim", None)
    outputs = getattr(modules[name], "weight").shape[0]  # noqa: B009
    return outputs // width if isinstance(width, int) and width and outputs % width == 0 else None


def _of_hugging_face(model: nn.Module) -> dict[str, str]:
    carried: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    for name, module in model.named_modules():
        inner = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if inner and not hasattr(module, "base_model_prefix"):
            continue
        prefix = f"{name}." if name else ""
        if inner and name == getattr(model, "base_model_prefix", name):
            carried.update({f"{prefix}{pattern}": style for pattern, style in inner.items()})
    if not carried:
        raise PlanError(
            f"no tensor-parallel plan is known for {type(model).__qualname__}",
            key=("parallel", "plan"),
            hint=f"write one: plan: {{'layers.*.up': colwise, 'layers.*.down': rowwise}}; styles: {', '.join(STYLES)}",
        )
    unknown = {style for style in carried.values() if style not in HUGGING_FACE}
    if unknown:
        raise PlanError(
            f"the model's own plan uses {', '.join(sorted(map(str, unknown)))}, which is not supported",
            key=("parallel", "plan"),
            hint="write a plan of your own",
        )
    return {pattern: HUGGING_FACE[style] for pattern, style in carried.items()}
