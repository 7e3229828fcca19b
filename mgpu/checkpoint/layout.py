"""Which rank writes which part of a checkpoint, worked out by all ranks together and kept until the state changes shape.

Sharded tensors (DTensors) are written by the ranks that hold them; of what several ranks hold, one writes: parameters and
optimizer state are spread so that all write alike, buffers come from the lowest rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from mgpu.checkpoint.packed import Packed, checkpointable
from mgpu.checkpoint.state import Path, State

_ALIGNMENT = 64
Signature = tuple[Any, ...]


@dataclass(frozen=True)
class Piece:
    """A tensor, or a chunk of one, that this rank writes; `start` is its place in the rank's snapshot, in bytes."""

    index: MetadataIndex
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The pieces of this rank, in the order they are written, and what rank 0 needs to know of all.

    `indices` are, for each rank, the indices of its pieces in order; `metadata` is torch's, but for where pieces lie;
    `is_replicated` whether all ranks have the same names.
    """

    pieces: tuple[Piece, ...]
    indices: tuple[tuple[MetadataIndex, ...], ...]
    metadata: Metadata
    tied: Mapping[str, str]
    is_replicated: bool

    @property
    def bytes(self) -> int:
        """Room that the snapshot takes."""
        last = self.pieces[-1] if self.pieces else None
        return last.start + last.bytes if last else 0


def signature(state: State) -> Signature:
    """Alike for states that have the same layout."""
    return (
        tuple(
            (path, tensor.dtype, tensor.shape, (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else ())
            for path, tensor in state.tensors.items()
        ),
        tuple(state.tied.items()),
    )  # fmt: skip


def joined(path: Path) -> str:
    """The key that torch.distributed.checkpoint gives to a value of a nested state dict."""
    return ".".join(path)


def make_layout(state: State, rank: int, world: int) -> Layout:
    """Agree on the layout; collective over all ranks."""
    items = local_items(state)
    first = {joined(path) for path in state.from_first}
    mappings = {joined(path): path for path in (*state.tensors, *state.tied)}
    mine = (SavePlan(items), first, {joined(path): joined(other) for path, other in state.tied.items()}, mappings)
    everyone: list[Any] = [mine]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, mine)
    plans = shared_out([plan for plan, *_ in everyone], set().union(*(names for _, names, *_ in everyone)))
    plans, metadata = create_default_global_save_plan(plans)
    paths = {key: path for *_, known in everyone for key, path in known.items()}
    return Layout(
        pieces=_placed(plans[rank].items),
        indices=tuple(tuple(item.index for item in plan.items) for plan in plans),
        metadata=dataclasses.replace(metadata, planner_data=paths),
        tied={name: other for _, _, tied, _ in everyone for name, other in tied.items()},
        is_replicated=all(known == mappings for *_, known in everyone),
    )


def local_items(state: State) -> list[WriteItem]:
    """One item for each tensor or shard that this rank holds; an empty shard of a tensor is none."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({joined(path): checkpointable(tensor) for path, tensor in state.tensors.items()})
    return [
        item
        for item in planner.create_local_plan().items
        if item.type is not WriteItemType.SHARD or _elements(item) or not math.prod(_data(item).size)
    ]


def shared_out(plans: Sequence[SavePlan], from_first: Iterable[str]) -> list[SavePlan]:
    """Leave each item to one of the ranks that hold it: the one with least to write, or the lowest."""
    from_first = frozenset(from_first)
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = _elements(item) * _data(item).properties.dtype.itemsize
    load = [0] * len(plans)
    writer: dict[MetadataIndex, int] = {}
    for index in sorted(holders, key=lambda index: len(holders[index])):  # where there is no choice first
        ranks = holders[index]
        writer[index] = ranks[0] if index.fqn in from_first else min(ranks, key=lambda rank: (load[rank], rank))
        load[writer[index]] += sizes[index]
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def local_tensor(state: Mapping[str, Tensor], piece: Piece) -> Tensor:
    """The values of `piece`, where they are now."""
    found = checkpointable(state[piece.index.fqn])
    if isinstance(found, Packed):
        return found.part(piece.index)
    found = find_state_dict_object({piece.index.fqn: found}, piece.index)
    assert isinstance(found, Tensor)
    return found


def _placed(items: Iterable[WriteItem]) -> tuple[Piece, ...]:
    pieces, start = [], 0
    for item in items:
        data = _data(item)
        assert data.chunk is not None
        piece = Piece(item.index, data.properties.dtype, tuple(data.chunk.sizes), start)
        pieces.append(piece)
        start += -(-piece.bytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(pieces)


def _data(item: WriteItem) -> Any:
    assert item.tensor_data is not None
    return item.tensor_data


def _elements(item: WriteItem) -> int:
    return math.prod(_data(item).chunk.sizes)
