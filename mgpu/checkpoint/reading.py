"""Reading checkpoints without running anything that is in them.

torch's metadata is a pickle: it goes through an unpickler that knows a fixed list of torch's own value classes. Tensors go
through `torch.load(weights_only=True)`. Nothing else is stored, and anything else is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from mgpu.checkpoint.folder import CheckpointFolder, Found
from mgpu.checkpoint.manifest import METADATA
from mgpu.checkpoint.packed import Packed, checkpointable
from mgpu.errors import DamagedCheckpoint

_METADATA_CLASSES = frozenset(
    {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    }
)
_ALLOWED = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    }
)
Kinds = dict[str, TensorStorageMetadata]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def read_metadata(path: Path) -> Metadata:
    """torch's metadata of the checkpoint in `path`; DamagedCheckpoint where it is not that."""
    try:
        metadata = _MetadataUnpickler(io.BytesIO((path / METADATA).read_bytes())).load()
    except Exception as error:  # a pickle that was tampered with may raise anything
        raise DamagedCheckpoint(f"{path / METADATA} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedCheckpoint(f"{path / METADATA} is no metadata of a checkpoint")
    return metadata


class Reader:
    """The tensors of a verified checkpoint, for as long as the `opened` block lasts."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.metadata = read_metadata(found.path)
        for place in self.metadata.storage_data.values():
            if place.relative_path not in found.manifest.files or getattr(place, "transform_descriptors", None):
                raise DamagedCheckpoint(f"{found.path / METADATA} names {place.relative_path!r}, which was not written")
        for name, kind in self.metadata.state_dict_metadata.items():
            if not isinstance(kind, TensorStorageMetadata):
                raise DamagedCheckpoint(f"{found.path / METADATA} lists {name}, which is no tensor")

    def kinds(self, home: str) -> dict[tuple[str, ...], TensorStorageMetadata]:
        """Shape and dtype of the tensors under `home` (`model`, `optimizer`, `extra`), by the rest of their path."""
        paths: Mapping[str, tuple[str, ...]] = self.metadata.planner_data or {}
        kinds = self.metadata.state_dict_metadata
        return {path[1:]: kinds[key] for key, path in paths.items() if path[0] == home}  # type: ignore[misc]

    def load(self, home: str, tensors: Mapping[tuple[str, ...], Tensor]) -> None:
        """Fill `tensors` (by path below `home`) in place; a DTensor gets its own shard, wherever that was written."""
        if not tensors:
            return
        state: dict[str, Any] = {".".join((home, *path)): tensor for path, tensor in tensors.items()}
        planner = _TensorsOnly(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        planner.state_dict = {key: checkpointable(tensor) for key, tensor in state.items()}
        reader = FileSystemReader(self.found.path)
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        try:
            reader.read_data(planner.create_local_plan(), planner).wait()
        except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, KeyError) as error:
            raise DamagedCheckpoint(f"a tensor in {self.found.path} cannot be read: {error}") from error


class _TensorsOnly(DefaultLoadPlanner):
    """torch's own planner would unpickle bytes freely; checkpoints of ours have none. It knows no packed tensors either."""

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.part(index) if isinstance(found, Packed) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise DamagedCheckpoint(f"{read_item.dest_index.fqn} is no tensor")


@contextmanager
def opened(found: Found) -> Iterator[Reader]:
    """Read `found`, and keep retention from removing it meanwhile."""
    with CheckpointFolder(found.path.parent).reading(found.path):
        yield Reader(found)


def read_weights(found: Found) -> dict[str, Tensor]:
    """Every parameter and buffer of the model, on the CPU, whole, by name; tied ones under each of their names."""
    with opened(found) as reader:
        weights = {
            path: torch.empty(kind.size, dtype=kind.properties.dtype) for path, kind in reader.kinds("model").items()
        }
        tied = found.data.get("tied", {})
        for name, other in tied.items():
            weights[(name,)] = weights[(other,)]
        reader.load("model", {path: tensor for path, tensor in weights.items() if path[0] not in tied})
    return {path[0]: tensor for path, tensor in weights.items()}
