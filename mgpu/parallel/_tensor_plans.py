"""Which layer is split how, by a plan of name patterns: what does not fit is refused, and the rest is done."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mgpu.errors import PlanError, suggest
from mgpu.parallel._blocks import repeated_blocks
from mgpu.parallel._sharded import _ties, check_packed
from mgpu.parallel._tensor_attention import check_attention, whole_parameters
from mgpu.parallel._tensor_built_in import known_plan
from mgpu.parallel._tensor_local import check_experts, cut_of, split_parameter
from mgpu.parallel._tensor_styles import OF_PARAMETERS, UNSPLIT, is_transposed, style_of

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


LOGITS = {"colwise_gather": "colwise_logits", "colwise_gather_sequence": "colwise_logits_sequence"}
"""The style of a head for a parallel loss, by the one that it has else."""


@dataclass(frozen=True)
class TensorSplit:
    """A plan: `auto`, or styles by name pattern. `sequence` splits the residual stream along the sequence too."""

    plan: str | Mapping[str, str] = "auto"
    sequence: bool = False
    loss_parallel: bool = False

    def styles(self, model: nn.Module) -> dict[str, str]:
        """The style of each module that is split."""
        return self._matched(model)[0]

    def _matched(self, model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
        """Styles of modules, and of parameters: those that a pattern which names no module names."""
        modules = [name for name, _ in model.named_modules()]
        parameters = [name for name, _ in model.named_parameters()]
        found: dict[str, str] = {}
        of_parameters: dict[str, str] = {}
        for pattern, style in self._plan(model).items():
            if matching := fnmatch.filter(modules, pattern):
                found.update(dict.fromkeys(matching, style))
            else:
                of_parameters.update(dict.fromkeys(fnmatch.filter(parameters, pattern), style))
        if self.loss_parallel:
            blocks = tuple(f"{name}." for name in repeated_blocks(model))
            heads = {name: LOGITS[style] for name, style in found.items() if style in LOGITS}
            found.update({name: style for name, style in heads.items() if not name.startswith(blocks)})
        return found, of_parameters

    def _plan(self, model: nn.Module) -> Mapping[str, str]:
        return self.plan if isinstance(self.plan, Mapping) else known_plan(model, sequence=self.sequence)

    def check(self, model: nn.Module, degree: int, shards: int = 1) -> None:
        """PlanError where the plan is not one for `model`, or what it splits does not divide by `degree` and `shards`."""
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        if isinstance(self.plan, Mapping):
            _refuse_unmatched(self.plan, list(modules), list(parameters))
        found, of_parameters = self._matched(model)
        if not found:
            raise PlanError("the plan splits no module", key=("parallel", "plan"))
        self._check_options(found)
        for name, style in of_parameters.items():
            _check_parameter(name, parameters[name], style, degree)
        for name, style in found.items():
            if style == "attention":
                check_attention(name, modules[name], degree)
            elif style == "experts":
                check_experts(name, modules[name], frozenset(of_parameters))
            elif style == "mla_kv_a_proj":
                _shared_width(model, name)
            elif style not in UNSPLIT:
                _check_module(modules, name, style, degree)
        for name in self._packed(found, of_parameters, model) if shards > 1 else ():
            check_packed(name, parameters[name], shards)

    def _check_options(self, found: Mapping[str, str]) -> None:
        """PlanError for an option that would change nothing."""
        if self.sequence and "sequence" not in found.values():
            raise PlanError(
                "the plan has no layer that works on a part of the sequence",
                key=("parallel", "sequence"),
                hint="it is known for the zoo's GPT; write a plan with the styles scatter, sequence and gather, or leave it out",
            )
        if self.loss_parallel and not set(LOGITS.values()) & set(found.values()):
            raise PlanError(
                "the plan has no head whose outputs are split and then gathered: there are no logits to leave split",
                key=("parallel", "loss_parallel"),
                hint="write a plan that gives the head the style colwise_gather, or leave it out",
            )

    def _packed(self, found: Mapping[str, str], of_parameters: Mapping[str, str], model: nn.Module) -> list[str]:
        """The parameters of which each rank holds several runs of rows."""
        packed = {name: style for name, style in of_parameters.items() if style.startswith("packed_")}
        names = [name for name, style in packed.items() if cut_of(style, model.get_parameter(name).dim())[0] == 0]
        for name, style in found.items():
            own = [f"{name}.{inner}" for inner, _ in model.get_submodule(name).named_parameters(recurse=False)]
            names += own if style == "packed_colwise" else []
            names += [inner for inner in own if style == "attention" and inner.endswith("in_proj_weight")]
        return names

    def describe(self, model: nn.Module) -> str:
        """Which modules and parameters are split how, a line a style: `attention: layers.*.self_attn (4)`."""
        lines: dict[str, Counter[str]] = {}
        for styles in self._matched(model):
            for name, style in styles.items():
                lines.setdefault(style, Counter())[re.sub(r"\b\d+\b", "*", name) or "the model"] += 1
        return "\n".join(
            f"{style}: {', '.join(f'{name} ({count})' if count > 1 else name for name, count in names.items())}"
            for style, names in lines.items()
        )

    def apart(self, model: nn.Module) -> frozenset[str]:
        """The parameters that each tensor peer holds whole and uses on its part of the heads."""
        found: set[str] = set()
        for name, style in self.styles(model).items():
            module = model.get_submodule(name)
            if style == "replicated":
                found.update(f"{name}.{inner}" for inner, _ in module.named_parameters())
            elif style == "attention":
                found.update(f"{name}.{inner}" for inner in whole_parameters(module))
        return frozenset(found)

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Split the layers of `model` that are here over `mesh`; a tied parameter stays one."""
        import torch
        from torch.distributed.tensor.parallel import parallelize_module

        # In evaluation, torch's transformer layers hand their parameters to one fused operator, which knows no split ones.
        torch.backends.mha.set_fastpath_enabled(False)
        if torch.distributed.get_rank() == 0:
            told = f"layers are split over {mesh.size()} ranks; what is not named here is not split\n{self.describe(model)}"
            print(told, file=sys.stderr)
        ties = _ties(model)
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        found, of_parameters = self._matched(model)
        for name, style in of_parameters.items():
            path, _, inner = name.rpartition(".")
            split_parameter(model.get_submodule(path), inner, style, mesh)
        here = {
            name: style_of(
                style, model.get_submodule(name), _shared_width(model, name) if style == "mla_kv_a_proj" else 0
            )
            for name, style in found.items()
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


def _refuse_unmatched(plan: Mapping[str, str], modules: list[str], parameters: list[str]) -> None:
    for pattern, style in plan.items():
        if fnmatch.filter(modules, pattern) and style != "packed_rowwise":
            continue
        if fnmatch.filter(parameters, pattern) and style in OF_PARAMETERS:
            continue
        what = "parameter" if style == "packed_rowwise" else "module"
        raise PlanError(f"no {what} is named {pattern!r}", key=("parallel", "plan"), hint=suggest(pattern, modules))


def _check_module(modules: Mapping[str, nn.Module], name: str, style: str, degree: int) -> None:
    weight = getattr(modules[name], "weight", None)
    if weight is None or weight.dim() < 2:
        return
    outputs, inputs = reversed(weight.shape) if is_transposed(modules[name]) else weight.shape[:2]
    size = inputs if style.startswith("rowwise") else outputs
    parts = 2 * degree if style.startswith("packed_") else degree
    if size % parts:
        raise PlanError(
            f"{name} has {size} {'inputs' if style.startswith('rowwise') else 'outputs'}, which do not divide by "
            f"{'two matrices and ' if parts > degree else ''}the tensor degree {degree}",
            key=("parallel",),
        )
    heads = _heads(modules, name)
    if heads is not None and style == "colwise" and heads % degree:
        raise PlanError(
            f"{heads} heads of {name.rpartition('.')[0]} do not divide by the tensor degree {degree}",
            key=("parallel",),
            hint=f"a degree that divides {heads} fits",
        )


def _check_parameter(name: str, parameter: nn.Parameter, style: str, degree: int) -> None:
    dimension, packed = cut_of(style, parameter.dim())
    size = parameter.shape[dimension]
    if size % (packed * degree):
        raise PlanError(
            f"{name} has {size} in dimension {dimension}, which do not divide by {'two matrices and ' if packed > 1 else ''}"
            f"the tensor degree {degree}",
            key=("parallel",),
        )


def _shared_width(model: nn.Module, name: str) -> int:
    """The width of the rotated keys that all heads share; PlanError where neither the attention nor its configuration has it."""
    attention = model.get_submodule(name.rpartition(".")[0])
    for holder in (attention, getattr(attention, "config", None), getattr(model, "config", None)):
        width = getattr(holder, "qk_rope_head_dim", None)
        if isinstance(width, int) and width > 0:
            return width
    raise PlanError(
        f"{name} has the style mla_kv_a_proj, and its attention has no qk_rope_head_dim", key=("parallel", "plan")
    )


def _heads(modules: Mapping[str, nn.Module], name: str) -> int | None:
    """The number of heads that an attention projection makes, from the width of a head where its module tells it."""
    parent = modules[name.rpartition(".")[0]]
    width = getattr(parent, "head_width", None) or getattr(parent, "head_dim", None)
    outputs = getattr(modules[name], "weight").shape[0]  # noqa: B009
    return outputs // width if isinstance(width, int) and width and outputs % width == 0 else None
