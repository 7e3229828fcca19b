"""Checkpoints on disk: written beside, published by a rename, checked before they are used.

Order of a save: shards → data.json → manifest.json (sizes and hashes) → fsync → rename → fsync of the parent → only
then old ones go. A folder without its final name was never a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mgpu.errors import CheckpointError
from mgpu.files import sync_file, sync_folder, write_json
from mgpu.parallel.base import Trainable

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Found:
    """A published checkpoint whose files have their recorded sizes and hashes. `data` is data.json."""

    step: int
    path: Path
    data: dict[str, Any]


class Checkpointer:
    """The checkpoints of one run. `save` is called by all ranks together; the rest by any."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, step: int, tensors: dict[str, Tensor], data: dict[str, Any]) -> Path:
        """Write and publish a checkpoint of `step`; all ranks return once it is durable, or all raise."""
        final = self.folder / f"step-{step:08d}"
        if final.exists():
            return final
        partial = self.folder / f".{final.name}.partial"
        alone = not dist.is_initialized()
        rank = 0 if alone else dist.get_rank()
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _wait()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.save(tensors, checkpoint_id=partial, no_dist=alone)
        if rank == 0:
            write_json(partial / "data.json", {"step": step, **data})
            write_json(
                partial / "manifest.json", {"step": step, "torch": torch.__version__, "files": _describe(partial)}
            )
            sync_folder(partial)
            partial.rename(final)
            sync_folder(self.folder)
            self.prune()
        _wait()
        return final

    def steps(self) -> list[int]:
        """Steps of the published checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def latest(self) -> tuple[Found | None, list[str]]:
        """The newest good checkpoint, and a warning for each newer one that is damaged or incomplete."""
        warnings = [f"{path.name}: incomplete, passed over" for path in sorted(self.folder.glob(".step-*.partial"))]
        for step in self.steps():
            path = self.folder / f"step-{step:08d}"
            fault = damage(path)
            if fault is None:
                return Found(step, path, json.loads((path / "data.json").read_text())), warnings
            warnings.append(f"{path.name}: {fault}, passed over")
        return None, warnings

    def prune(self) -> None:
        """Remove all but the `keep` newest; each loses its name before its files."""
        for step in self.steps()[self.keep :]:
            path = self.folder / f"step-{step:08d}"
            gone = self.folder / f".{path.name}.removed"
            path.rename(gone)
            shutil.rmtree(gone)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, by its manifest; None if nothing is."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        for name, told in files.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if (path / name).stat().st_size != told["size"]:
                return f"{name} has {(path / name).stat().st_size} bytes in place of {told['size']}"
            if _hash(path / name) != told["sha256"]:
                return f"{name} has another checksum than when it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be read ({type(error).__name__})"
    return None


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    told = {}
    for path in sorted(folder.iterdir()):
        sync_file(path)
        told[path.name] = {"size": path.stat().st_size, "sha256": _hash(path)}
    return told


def _hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def gather_state(trainable: Trainable, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of a training by name (`model.*`, `optimizer.<parameter>.<key>`), and the other optimizer values."""
    tensors = {f"model.{name}": value for name, value in trainable.state_dict().items()}
    plain: dict[str, Any] = {}
    names = {id(parameter): name for name, parameter in trainable.named_parameters.items()}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
            else:
                plain.setdefault(name, {})[key] = value
    return tensors, plain


def restore_state(found: Found, trainable: Trainable, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Load `found` by name; CheckpointError names what is missing, extra or of another shape. Hyperparameters stay.

    Returns what the strategy saved on this rank.
    """
    reader = dcp.FileSystemReader(found.path)
    stored = {
        name: kind
        for name, kind in reader.read_metadata().state_dict_metadata.items()
        if isinstance(kind, TensorStorageMetadata)
    }
    own = {f"model.{name}": value for name, value in trainable.state_dict().items()}
    whole = trainable.owned is None
    _compare(own, {name: kind for name, kind in stored.items() if name.startswith("model.") and (whole or name in own)})
    parameters = trainable.named_parameters
    fresh: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        prefix = f"optimizer.{name}."
        for key, kind in stored.items():
            if key.startswith(prefix) and "." not in key.removeprefix(prefix):
                alike = kind.size == parameter.shape
                make = torch.empty_like(parameter, dtype=kind.properties.dtype, requires_grad=False)
                fresh[key] = make if alike else torch.empty(kind.size, dtype=kind.properties.dtype)
    rank = f"strategy.rank-{trainable.context.rank}."
    strategy = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        for name, kind in stored.items()
        if name.startswith(rank)
    }
    _load({**own, **fresh, **strategy}, reader)
    packed = optimizer.state_dict()
    names = {id(parameter): name for name, parameter in parameters.items()}
    order = [names.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(order):
        prefix = f"optimizer.{name}."
        values = {
            key.removeprefix(prefix): value
            for key, value in fresh.items()
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
        values.update(found.data.get("optimizer", {}).get(name, {}))
        if values:
            states[index] = values
    optimizer.load_state_dict({"state": states, "param_groups": packed["param_groups"]})
    return {name.removeprefix(rank): value for name, value in strategy.items()}


def _load(tensors: dict[str, Tensor], reader: dcp.FileSystemReader) -> None:
    """Each rank reads for itself; torch warns of that once there is no process group, where nothing else is possible."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def _compare(own: dict[str, Tensor], stored: dict[str, TensorStorageMetadata]) -> None:
    faults = [f"{name} is not in the checkpoint" for name in own if name not in stored]
    faults += [f"{name} is not in the model" for name in stored if name not in own]
    for name, value in own.items():
        if name in stored and (value.shape != stored[name].size or value.dtype != stored[name].properties.dtype):
            here, there = (
                f"{value.dtype} {tuple(value.shape)}",
                f"{stored[name].properties.dtype} {tuple(stored[name].size)}",
            )
            faults.append(f"{name} is {here} in the model and {there} in the checkpoint")
    if faults:
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(faults[:5])}")
