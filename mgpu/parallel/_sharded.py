"""Parameters, gradients and optimizer state cut over ranks by FSDP2, block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mgpu.errors import PlanError
from mgpu.parallel._blocks import repeated_blocks
from mgpu.parallel._participation import Participation

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from mgpu.parallel.base import Context


@dataclass
class Sharding:
    """How to shard. `wrap` is `auto` (repeated blocks), `whole` (no units), class names, or the least size of a unit."""

    wrap: str | int | tuple[str, ...] = "auto"
    reshard_after_forward: bool = True
    offload: bool = False
    on_meta: bool = False
    gather: str = "fp32"
    first_weights: dict[str, Tensor] = field(default_factory=dict)
    roots: list[Any] = field(default_factory=list)
    participation: Participation | None = None
    """Who uses what, once the model is sharded."""
    scalars: list[nn.Parameter] = field(default_factory=list)
    """Parameters without dimensions, which every rank holds: there is nothing to cut."""
    note: str = ""

    def make(self, make: Callable[[], nn.Module], context: Context) -> nn.Module:
        """The model on the host, or without memory; then rank 0 keeps the real weights aside."""
        if not self.on_meta:
            return make()
        import torch

        if context.rank == 0:
            real = make()
            self.first_weights = {**dict(real.named_buffers()), **real.state_dict()}
        with torch.device("meta"):
            return make()

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are gathered one at a time; PlanError where the rule finds none.

        FSDP lets one unit manage a parameter: modules that share one with another are gathered with what holds both.
        """
        found = self._by_rule(model)
        sharing = {id(unit) for unit in sharing_units(model, found)}
        if sharing:
            names = ", ".join(name for name, module in model.named_modules() if id(module) in sharing)
            self.note = f"{names} share parameters with other parts of the model and are not gathered by themselves"
        return [unit for unit in found if id(unit) not in sharing]

    def _by_rule(self, model: nn.Module) -> list[nn.Module]:
        if self.wrap == "auto":
            return list(repeated_blocks(model).values())
        if self.wrap == "whole":
            return []
        if isinstance(self.wrap, int):
            return _by_size(model, self.wrap)
        wanted = (self.wrap,) if isinstance(self.wrap, str) else self.wrap
        found = [module for module in model.modules() if type(module).__name__ in wanted]
        missing = set(wanted) - {type(module).__name__ for module in found}
        if missing:
            raise PlanError(
                f"the model has no {', '.join(sorted(missing))}",
                key=("parallel", "wrap"),
                hint=f"its classes: {', '.join(sorted({type(module).__name__ for module in model.modules()}))}",
            )
        return [module for module in found if module is not model]

    def apply(self, model: nn.Module, roots: list[nn.Module], mesh: DeviceMesh, context: Context) -> None:
        """Shard `roots`, the model itself or its stages on this rank, over `mesh` (1-D, or replicate x shard)."""
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        kinds = {"fp32": None, "bf16": torch.bfloat16}
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=kinds[self.gather], reduce_dtype=torch.float32)
            if kinds[self.gather]
            else MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy() if self.offload else OffloadPolicy(),
            "shard_placement_fn": _beside_packed,
        }
        self.roots = roots
        self.scalars = [parameter for parameter in model.parameters() if parameter.dim() == 0]
        options["ignored_params"] = set(self.scalars)
        chosen = {id(unit) for unit in self.units(model)}
        for root in self.roots:
            for unit in reversed([module for module in root.modules() if id(module) in chosen]):
                if any(parameter.dim() for parameter in unit.parameters()):
                    fully_shard(unit, **options)
            fully_shard(root, **options)
            module: Any
            for module in root.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
        self.participation = Participation(self.roots)
        self.fill(model, context)

    def fill(self, model: nn.Module, context: Context) -> None:
        """Give a model without memory its memory and rank 0's weights."""
        if not self.on_meta:
            return
        import torch
        from torch.distributed.tensor import DTensor, distribute_tensor

        ties = _ties(model)
        model.to_empty(device="cpu" if self.offload else context.device)
        for first, others in ties:
            for holder, name in others:
                setattr(holder, name, getattr(*first))
        with torch.no_grad():
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                whole = torch.empty(value.shape, dtype=value.dtype, device=context.device)
                if context.rank == 0:
                    whole.copy_(self.first_weights[name])
                if context.world > 1:
                    torch.distributed.broadcast(whole, src=0)
                if isinstance(value, DTensor):
                    part = distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)
                    value.to_local().copy_(part.to_local())
                else:
                    value.copy_(whole)
        self.first_weights = {}

    def before_pass(self, module: nn.Module, *, last: bool) -> None:
        """Gradients stay whole on each rank until the last pass of a step, and are then reduced once."""
        for root in self.roots or [module]:
            if hasattr(root, "set_requires_gradient_sync"):
                root.set_requires_gradient_sync(last)

    def settle(self) -> None:
        """Give up what passes without a backward have gathered."""
        for root in self.roots:
            for module in root.modules():
                if hasattr(module, "reshard"):
                    module.reshard()


def sharing_units(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Those of `units` that have a parameter which `model` uses outside of them as well."""
    places: dict[int, set[int]] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                places.setdefault(id(parameter), set()).add(id(module))
    inside = [{id(module) for module in unit.modules()} for unit in units]
    sharing = []
    for unit, own in zip(units, inside, strict=True):
        others = [theirs for theirs in inside if not (theirs <= own or own <= theirs)]
        used = [places[id(parameter)] for parameter in unit.parameters()]
        if any(not at <= own or any(at & theirs for theirs in others) for at in used):
            sharing.append(unit)
    return sharing


def _packed_dimension(parameter: Tensor) -> int | None:
    """The dimension along which tensor peers hold several places of a packed matrix; None of another parameter."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    places = parameter.placements if isinstance(parameter, DTensor) else ()
    return next((place.dim % parameter.dim() for place in places if isinstance(place, _StridedShard)), None)


def _beside_packed(parameter: nn.Parameter) -> Any:
    """Rows by default. What is cut into several runs of rows is sharded by columns: a DTensor can say one such cut only."""
    from torch.distributed.tensor import Shard

    return Shard(1) if _packed_dimension(parameter) == 0 else None


def check_packed(name: str, parameter: nn.Parameter, shards: int) -> None:
    """PlanError where `parameter`, of whose rows each tensor peer holds several runs, cannot be sharded too."""
    if parameter.dim() < 3 and (parameter.dim() == 1 or parameter.shape[1] % shards):
        columns = f"{parameter.shape[1]} columns, which do not divide by" if parameter.dim() == 2 else "no columns for"
        raise PlanError(
            f"{name} holds several matrices, each split over tensor peers, so that it is sharded by columns: it has {columns} "
            f"the {shards} shards",
            key=("parallel",),
            hint="replicate in place of shard, or leave the module out of the tensor plan",
        )


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """The smallest modules with at least `least` parameters of their own, deepest first."""
    found: list[nn.Module] = []
    taken: set[int] = set()
    for module in reversed(list(model.modules())):
        if module is model:
            continue
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if sum(own.values()) >= least:
            found.append(module)
            taken |= set(own)
    return list(reversed(found))


def _ties(model: nn.Module) -> list[tuple[tuple[nn.Module, str], list[tuple[nn.Module, str]]]]:
    """Parameters that several modules share: the first place of each, and the others."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [(found[0], found[1:]) for found in places.values() if len(found) > 1]
