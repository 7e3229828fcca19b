"""From a checkpoint back into a model and its optimizer: by name, never by position, onto any layout."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from mgpu.checkpoint.folder import Found
from mgpu.checkpoint.reading import Reader, opened
from mgpu.checkpoint.state import TrainingState, kind_of, model_tensors, plain_name
from mgpu.errors import CheckpointError

_SHOWN = 5


def restore(found: Found, state: TrainingState) -> list[str]:
    """Load `found` into the model and optimizer of `state`.

    Returns what is to be told: hyperparameters that the spec in force has changed, parameters that are new to the
    optimizer. Raises CheckpointError, with the names, where the checkpoint is of another model or optimizer.
    """
    with opened(found) as reader:
        restore_model(reader, state)
        return _restore_optimizer(reader, state)


def read_extra(found: Found, prefix: str) -> dict[str, Tensor]:
    """The further tensors whose names begin with `prefix`, on the CPU, by the rest of their names."""
    with opened(found) as reader:
        kinds = {path: kind for path, kind in reader.kinds("extra").items() if path[0].startswith(prefix)}
        tensors = {path: torch.empty(kind.size, dtype=kind.properties.dtype) for path, kind in kinds.items()}
        reader.load("extra", tensors)
    return {path[0].removeprefix(prefix): tensor for path, tensor in tensors.items()}


def restore_model(reader: Reader, state: TrainingState) -> None:
    """Load parameters and buffers; dtype, shape and ties must be the same."""
    tensors, tied, others = model_tensors(state.model, state.aliases)
    stored = reader.kinds("model")
    if not state.is_whole:
        stored = {path: kind for path, kind in stored.items() if path[0] in tensors}
    _refuse_differences(_by_path(tensors), stored, "the model")
    was_tied = {n: other for n, other in reader.found.data.get("tied", {}).items() if state.is_whole or n in tied}
    if tied != was_tied:
        differing = sorted(set(tied.items()) ^ set(was_tied.items()))
        pairs = ", ".join(f"{name} = {other}" for name, other in differing[:_SHOWN])
        raise CheckpointError(f"the checkpoint and the model tie different weights: {pairs}")
    reader.load("model", _by_path({name: tensor for name, tensor in tensors.items() if name not in tied}))
    saved = {n: v for n, v in reader.found.data.get("model", {}).items() if state.is_whole or n in others}
    if others.keys() != saved.keys():
        names = ", ".join(sorted(others.keys() ^ saved.keys()))
        raise CheckpointError(f"the checkpoint and the model have different extra state: {names}")
    if others:
        _set_extra_state(state, saved)


def _by_path(tensors: Mapping[str, Tensor]) -> dict[tuple[str, ...], Tensor]:
    return {(name,): tensor for name, tensor in tensors.items()}


def _set_extra_state(state: TrainingState, saved: Mapping[str, Any]) -> None:
    for prefix, module in state.model.named_modules():
        name = plain_name(state.model, f"{prefix}._extra_state" if prefix else "_extra_state")
        if name in saved:
            module.set_extra_state(saved[name])


def _refuse_differences(
    own: Mapping[tuple[str, ...], Tensor], stored: Mapping[tuple[str, ...], TensorStorageMetadata], owner: str
) -> None:
    faults = [f"{'.'.join(path)} is not in the checkpoint" for path in own if path not in stored]
    faults += [f"{'.'.join(path)} of the checkpoint is not in {owner}" for path in stored if path not in own]
    for path, value in own.items():
        if path in stored and (value.shape != stored[path].size or value.dtype != stored[path].properties.dtype):
            here = f"{value.dtype} {tuple(value.shape)}"
            there = f"{stored[path].properties.dtype} {tuple(stored[path].size)}"
            faults.append(f"{'.'.join(path)} is {here} in {owner} and {there} in the checkpoint")
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(
            f"the checkpoint does not fit {owner}: {'; '.join(faults[:_SHOWN])}{more}",
            hint="resume with the model it was made with, or start a new run",
        )


def _restore_optimizer(reader: Reader, state: TrainingState) -> list[str]:
    optimizer, facts = state.optimizer, reader.found.data["optimizer"]
    if facts["kind"] != kind_of(optimizer):
        raise CheckpointError(
            f"the checkpoint was made with optimizer {facts['kind']}, the spec says {kind_of(optimizer)}",
            hint="to train on from its weights with another optimizer, start a new run with init_from",
        )
    parameters = {state.name_of(p): p for group in optimizer.param_groups for p in group["params"]}
    values: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in facts["state"].items()}
    wanted: dict[tuple[str, ...], Tensor] = {}
    for (name, key), kind in reader.kinds("optimizer").items():
        if name in parameters:
            wanted[name, key] = values.setdefault(name, {})[key] = _like(parameters[name], kind)
    reader.load("optimizer", wanted)
    order = list(parameters)
    packed = {order.index(name): found for name, found in values.items() if name in parameters}
    optimizer.load_state_dict({"state": packed, "param_groups": optimizer.state_dict()["param_groups"]})
    _undo_casts(optimizer, parameters, values)
    notes = _restore_groups(facts["groups"], state)
    _refuse_missing_state(
        optimizer, {parameters[name]: set(found) for name, found in values.items() if name in parameters}
    )
    return [*notes, *_strangers(facts["groups"], parameters)] if state.is_whole else notes


def _refuse_missing_state(optimizer: torch.optim.Optimizer, kept: Mapping[Tensor, set[str]]) -> None:
    """CheckpointError where the optimizer cannot make a step with the values that were kept for it: one of its settings asks
    for more. Tried on a small parameter, with one of torch's own optimizers."""
    parameter = next(iter(kept), None)
    if parameter is None or not type(optimizer).__module__.startswith("torch.optim"):
        return
    taken = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key in taken and key != "params"}
    settings |= {key: False for key in ("fused", "foreach", "capturable") if key in settings}
    small = torch.nn.Parameter(torch.ones([2] * parameter.dim()))
    twin = type(optimizer)([small], **settings)
    small.grad = torch.ones_like(small)
    twin.step()
    lacking = twin.state[small].keys() - kept[parameter]
    for key in lacking:
        del twin.state[small][key]
    try:
        twin.step()
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{kind_of(optimizer)} with the settings of the spec needs {', '.join(sorted(lacking))} of each parameter, which the "
            "checkpoint does not have",
            hint="resume with the settings it was made with; to train on from its weights, start a new run with init_from",
        ) from error


def _like(parameter: Tensor, kind: TensorStorageMetadata) -> Tensor:
    """An empty tensor for a value of the optimizer's state, laid out as `parameter` is where it has its shape."""
    dtype = kind.properties.dtype
    if not isinstance(parameter, DTensor) or not kind.size:
        return torch.empty(kind.size, dtype=dtype, device=parameter.device if kind.size else "cpu")
    if kind.size == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    mesh = parameter.device_mesh
    local = torch.empty(kind.size, dtype=dtype, device=parameter.device)
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _undo_casts(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], values: Mapping[str, Mapping[str, Any]]
) -> None:
    """`load_state_dict` casts state to the dtype of its parameter: a bf16 parameter would lose its fp32 moments."""
    for name, found in values.items():
        for key, value in found.items() if name in parameters else ():
            state = optimizer.state[parameters[name]]
            if isinstance(value, Tensor) and state[key].dtype != value.dtype:
                state[key] = value.to(state[key].device)


def _restore_groups(saved: Iterable[Mapping[str, Any]], state: TrainingState) -> list[str]:
    """Give each group what steps had changed in it, and tell of what the spec has changed."""
    notes = []
    by_parameter = {name: group for group in saved for name in group["parameters"]}
    for index, (group, built) in enumerate(zip(state.optimizer.param_groups, state.as_built, strict=True)):
        first = next((n for n in map(state.name_of, group["params"]) if n in by_parameter), None)
        if first is None:
            continue
        before = by_parameter[first]
        for key, value in before["changed"].items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        for key in sorted(built.keys() & before["built"].keys()):
            if built[key] != before["built"][key]:
                where = f" of group {index}" if len(state.as_built) > 1 else ""
                shown = "lr" if key == "initial_lr" else key
                notes.append(f"{shown}{where} is {built[key]} by the spec, and was {before['built'][key]}")
    return notes


def _strangers(saved: Iterable[Mapping[str, Any]], parameters: Iterable[str]) -> list[str]:
    before = {name for group in saved for name in group["parameters"]}
    now = set(parameters)
    notes = []
    if new := sorted(now - before):
        notes.append(f"new to the optimizer, with no state yet: {', '.join(new[:_SHOWN])}")
    if gone := sorted(before - now):
        notes.append(f"no longer trained, their optimizer state is dropped: {', '.join(gone[:_SHOWN])}")
    return notes
