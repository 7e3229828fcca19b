"""Weights as a file of their own: `mgpu export` writes it, `init_from` starts a run from it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mgpu.checkpoint.folder import CheckpointFolder, Found
from mgpu.checkpoint.manifest import MANIFEST
from mgpu.checkpoint.packed import blocks_of
from mgpu.checkpoint.reading import read_weights
from mgpu.checkpoint.state import model_tensors
from mgpu.errors import CheckpointError, DamagedCheckpoint
from mgpu.files import sync_file, sync_folder
from mgpu.runs import RunStore

Format = Literal["safetensors", "pt"]
_SHOWN = 5

_SNIPPETS = {
    "safetensors": "from safetensors.torch import load_model\nload_model(model, {file!r})",
    "pt": "import torch\nmodel.load_state_dict(torch.load({file!r}, weights_only=True))",
}


def export(found: Found, output: Path, kind: Format) -> None:
    """Write the weights of `found` to `output`, which appears whole or not at all.

    safetensors holds no tensor twice: of tied weights the first name is stored, and the others are in the file's
    metadata, as `safetensors.torch.load_model` expects them.
    """
    weights = read_weights(found)
    handle, temporary = tempfile.mkstemp(prefix=f".{output.name}.", dir=output.parent)
    os.close(handle)
    try:
        if kind == "safetensors":
            from safetensors.torch import save_file

            tied = found.data.get("tied", {})
            stored = {name: tensor.contiguous() for name, tensor in weights.items() if name not in tied}
            save_file(stored, temporary, metadata={"format": "pt", "step": str(found.step), **tied})
            _sort_header(Path(temporary))
        else:
            torch.save(weights, temporary)
        os.chmod(temporary, 0o644)
        sync_file(Path(temporary))
        os.rename(temporary, output)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(output.parent)


def snippet(output: Path, kind: Format) -> str:
    """How to load an exported file into a model, in Python."""
    return _SNIPPETS[kind].format(file=str(output))


def find_weights(reference: str, runs_dir: Path) -> Found | Path:
    """What `init_from` names: the newest good checkpoint of a run, a checkpoint's folder, or a safetensors file.

    Raises RunNotFound, CheckpointError or DamagedCheckpoint.
    """
    path = Path(reference)
    if path.is_file():
        return path
    if (path / MANIFEST).exists():
        try:
            return Found.at(path)
        except DamagedCheckpoint as damage:
            raise DamagedCheckpoint(f"{path}: {damage.message}") from damage
    return CheckpointFolder(RunStore(runs_dir).find(reference).checkpoints).find()


def load_weights(
    source: Found | Path, model: nn.Module, aliases: Mapping[str, str] = MappingProxyType({}), *, is_whole: bool = True
) -> None:
    """Give `model` the weights of `source`; CheckpointError, with the names, where they do not fit exactly.

    `aliases` and `is_whole` as in `TrainingState`: a part of a model takes its part of the weights.
    """
    weights = read_weights(source) if isinstance(source, Found) else _read_safetensors(source)
    where = source.path if isinstance(source, Found) else source
    own, tied, _ = model_tensors(model, aliases)
    for name, other in tied.items():
        if name not in weights and other in weights:
            weights[name] = weights[other]
    faults = [f"{name} is missing" for name in own if name not in weights]
    if is_whole:
        faults += [f"{name} is not in the model" for name in weights if name not in own]
    for name, target in own.items():
        value = weights.get(name)
        if value is not None and (value.shape != target.shape or value.dtype != target.dtype):
            faults.append(
                f"{name} is {value.dtype} {tuple(value.shape)}, and {target.dtype} {tuple(target.shape)} in the model"
            )
    for name, other in tied.items():
        if not faults and name in weights and not torch.equal(weights[name], weights[other]):
            faults.append(f"{name} and {other} differ, and the model ties them")
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(f"init_from: {where} does not fit the model: {'; '.join(faults[:_SHOWN])}{more}")
    with torch.no_grad():
        for name, target in own.items():
            _fill(target, weights[name])


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            named: Mapping[str, Any] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"init_from: {path} is no safetensors file: {error}") from error
    weights.update({name: weights[other] for name, other in named.items() if other in weights and name not in weights})
    return weights


def _fill(target: Tensor, whole: Tensor) -> None:
    """Copy `whole` into `target`, or its shard of it into a DTensor."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    for block in blocks_of(target):
        block.of_part(target.to_local()).copy_(block.of_whole(whole))


def _sort_header(path: Path) -> None:
    """Equal weights give equal files: the library writes its metadata in an order that changes from call to call.

    A header is its length (8 bytes, little-endian), then JSON of that length, padded with blanks:
    https://github.com/huggingface/safetensors#format
    """
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:  # the tensors begin right after it
            raise CheckpointError(f"the header of the exported weights has {len(text)} bytes in place of {length}")
        file.seek(8)
        file.write(text.ljust(length))
