"""What is saved of a training, by the names of the user's own model.

Tensors have three homes: `model` (parameters and persistent buffers), `optimizer` (its state, by parameter name) and
`extra` (what a strategy adds). All else is plain values, for data.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mgpu.errors import CheckpointError

_INNER = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What torch's own wrappers call the module inside; no name of a user's begins so by chance."""

Path = tuple[str, ...]


@dataclass(frozen=True)
class State:
    """Everything to save of one rank, nothing copied yet.

    `tensors` by path, as in ("optimizer", "first.weight", "exp_avg"). `from_first` are paths whose value on the lowest
    rank counts where ranks differ (buffers). `tied` are second names of tensors, path to path.
    """

    tensors: Mapping[Path, Tensor]
    from_first: frozenset[Path] = frozenset()
    tied: Mapping[Path, Path] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)


def plain_name(model: nn.Module, name: str) -> str:
    """`name` (of a parameter, buffer or module of `model`) without the wrappers on its way."""
    kept, module = [], model
    for part in name.split("."):
        is_wrapper = part in _INNER or (part == "module" and isinstance(module, DistributedDataParallel | DataParallel))
        if not is_wrapper:
            kept.append(part)
        module = getattr(module, part, module)
    return ".".join(kept)


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Parameters and persistent buffers by plain name; second names of tied ones; other values of the state dict.

    Raises CheckpointError for values that JSON cannot hold: only `get_extra_state` of a module can bring them.
    """
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    others: dict[str, Any] = {}
    first: dict[int, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = plain_name(model, key)
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
            if (other := first.setdefault(id(value), name)) != name:
                tied[name] = other
        else:
            others[name] = checked_plain(value, f"{name} of the model")
    return tensors, tied, others


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Plain name of every parameter, by `id`; a tied one has its first."""
    return {id(parameter): plain_name(model, name) for name, parameter in model.named_parameters()}


def checked_plain(value: Any, what: str) -> Any:
    """`value` if JSON gives it back as it was, else CheckpointError naming `what`: files of ours hold no pickles."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [checked_plain(item, what) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: checked_plain(item, what) for key, item in value.items()}
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold",
        hint="it may be a tensor, or a number, text, list or mapping of them",
    )


class TrainingState:
    """The model and optimizer of one rank, as something to save. Made before anything is restored into them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, is_whole: bool = True) -> None:
        """`is_whole` is False where the ranks hold different parts of the model (pipeline stages)."""
        self.is_whole = is_whole
        self.model = model
        self.optimizer = optimizer
        self.names = parameter_names(model)
        self.as_built = [_hyperparameters(group) for group in optimizer.param_groups]
        model_tensors(model)

    def group_names(self) -> list[list[str]]:
        """Names of the parameters of each group of the optimizer."""
        return [[self.name_of(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]

    def name_of(self, parameter: Tensor) -> str:
        if not parameter.numel():
            return ""  # what stands in the optimizer of a rank that has nothing to train
        try:
            return self.names[id(parameter)]
        except KeyError:
            shape = tuple(parameter.shape)
            raise CheckpointError(f"the optimizer has a parameter of shape {shape} that is not the model's") from None

    def gather(self, extra: Mapping[str, Tensor] | None = None) -> State:
        """What there is to save now; `extra` are further tensors by name."""
        tensors, tied, others = model_tensors(self.model)
        trained = set(self.names.values())
        paths: dict[Path, Tensor] = {("model", name): value for name, value in tensors.items() if name not in tied}
        buffers = frozenset(path for path in paths if path[1] not in trained)
        plain: dict[str, dict[str, Any]] = {}
        for parameter, values in self.optimizer.state.items():
            name = self.name_of(parameter)
            for key, value in values.items():
                if isinstance(value, Tensor):
                    paths["optimizer", name, key] = value.detach()
                else:
                    plain.setdefault(name, {})[key] = checked_plain(value, f"{key} of {name} in the optimizer")
        paths.update({("extra", name): value.detach() for name, value in (extra or {}).items()})
        return State(
            tensors=paths,
            from_first=buffers,
            tied={("model", name): ("model", other) for name, other in tied.items()},
            plain={"model": others, "tied": tied, "optimizer": self._optimizer_facts(plain)},
        )

    def _optimizer_facts(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """What of the optimizer is no tensor. Hyperparameters are the spec's, so only what steps changed is restored."""
        groups = []
        for group, built, names in zip(self.optimizer.param_groups, self.as_built, self.group_names(), strict=True):
            now = _hyperparameters(group)
            changed = {key: value for key, value in now.items() if key not in built or built[key] != value}
            groups.append({"parameters": names, "built": built, "changed": changed})
        return {"kind": kind_of(self.optimizer), "state": plain, "groups": groups}


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a group. `lr` of a step is left out: it follows from `initial_lr` and the step."""
    hidden = {"params", "lr"} if "initial_lr" in group else {"params"}
    return {key: _listed(value) for key, value in group.items() if key not in hidden and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def element_bytes(tensors: Iterable[Tensor]) -> int:
    """Size of the values of `tensors`, in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
