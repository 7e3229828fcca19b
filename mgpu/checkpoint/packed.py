"""DTensors of which a rank holds several places: matrices packed one after the other, each of them cut over the ranks.

torch's planners take the part of a rank for one block of the whole, by the offset of its first element. A part of several
blocks is `Packed` here, which offers them one by one in the terms of those planners.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Cut = tuple[int | None, int, int]
"""How one dimension of the mesh cuts a dimension of a tensor: split factor (None: plain), number of parts, which is here."""
Run = tuple[int, int, int]
"""Consecutive elements along a dimension: the first in the whole, the first in the part, how many."""


@dataclass(frozen=True)
class Block:
    """A rectangle of the whole tensor that a rank holds, and where it lies in the rank's part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]

    def of_whole(self, whole: Tensor) -> Tensor:
        return _window(whole, self.offsets, self.sizes)

    def of_part(self, part: Tensor) -> Tensor:
        return _window(part, self.local, self.sizes)


def blocks_of(tensor: DTensor) -> list[Block]:
    """The blocks that this rank holds of `tensor`; they may have no elements."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    assert here is not None
    runs = []
    for dimension, size in enumerate(tensor.shape):
        cuts = tuple(
            (place.split_factor if isinstance(place, _StridedShard) else None, mesh.size(index), here[index])
            for index, place in enumerate(tensor.placements)
            if isinstance(place, Shard | _StridedShard) and place.dim % tensor.dim() == dimension
        )
        runs.append(_runs(int(size), cuts))
    return [
        Block(tuple(run[0] for run in found), tuple(run[2] for run in found), tuple(run[1] for run in found))
        for found in itertools.product(*runs)
    ]


@functools.lru_cache(maxsize=4096)
def _runs(size: int, cuts: tuple[Cut, ...]) -> tuple[Run, ...]:
    """The elements along a dimension of `size` that are here after all cuts, as few runs; one without elements if none."""
    if not cuts:
        return ((0, 0, size),)
    kept = torch.arange(size)
    for factor, parts, which in cuts:
        place: Any = Shard(0) if factor is None else _StridedShard(0, split_factor=factor)
        kept = place._split_tensor(kept, parts, with_padding=False, contiguous=True)[0][which]
    if not len(kept):
        return ((0, 0, 0),)
    starts = [0, *((kept[1:] - kept[:-1] != 1).nonzero().flatten() + 1).tolist(), len(kept)]
    return tuple((int(kept[first]), first, after - first) for first, after in itertools.pairwise(starts))


def _window(tensor: Tensor, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


class Packed:
    """A DTensor with several blocks, as `torch.distributed.checkpoint` asks for one (its `_Checkpointable`)."""

    def __init__(self, tensor: DTensor, blocks: list[Block]) -> None:
        self.tensor = tensor
        self.blocks = blocks

    def size(self) -> torch.Size:
        return self.tensor.size()

    def part(self, index: MetadataIndex) -> Tensor:
        """The block at the offset of `index`: a view of this rank's part."""
        block = next(block for block in self.blocks if index.offset == torch.Size(block.offsets))
        return block.of_part(self.tensor.to_local())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes)) for block in self.blocks]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor.to_local())
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.tensor.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]


def checkpointable(tensor: Tensor) -> Any:
    """What torch's planners are given for `tensor`: itself, or its blocks where this rank holds several."""
    if not isinstance(tensor, DTensor) or not any(isinstance(place, _StridedShard) for place in tensor.placements):
        return tensor
    blocks = blocks_of(tensor)
    return Packed(tensor, blocks) if len(blocks) > 1 else tensor
