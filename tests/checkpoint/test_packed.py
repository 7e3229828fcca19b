"""Which blocks of a tensor a rank holds, worked out by hand."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mgpu.checkpoint.layout import local_items
from mgpu.checkpoint.packed import Packed, blocks_of, checkpointable
from mgpu.checkpoint.state import State

THREE = _StridedShard(0, split_factor=3)


@pytest.fixture(name="held")
def make_held():
    """A tensor as the last of several ranks holds it, by the sizes of its mesh; nothing is sent."""

    def held(mesh, shape, local, placements):
        world = torch.tensor(mesh).prod().item()
        dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
        part = torch.arange(float(torch.tensor(local).prod())).view(local)
        stride = torch.empty(shape).stride()
        return DTensor.from_local(
            part, init_device_mesh("cpu", mesh), placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    yield held
    dist.destroy_process_group()


def test_a_packed_matrix_is_held_in_as_many_blocks_as_it_has_matrices(held):
    """Rows 0-3, 4-7 and 8-11 are a matrix each, and the second of two ranks holds the last two of each."""
    tensor = held((2,), (12, 2), (6, 2), [THREE])
    blocks = blocks_of(tensor)
    assert [(block.offsets, block.sizes, block.local) for block in blocks] == [
        ((2, 0), (2, 2), (0, 0)), ((6, 0), (2, 2), (2, 0)), ((10, 0), (2, 2), (4, 0)),
    ]  # fmt: skip
    whole = torch.arange(24.0).view(12, 2)
    assert [block.of_whole(whole)[0, 0] for block in blocks] == [4, 12, 20]
    assert [block.of_part(tensor.to_local())[0, 0] for block in blocks] == [0, 4, 8]
    items = local_items(State({("model", "w"): tensor}))
    assert [tuple(item.index.offset) for item in items] == [(2, 0), (6, 0), (10, 0)]
    assert isinstance(packed := checkpointable(tensor), Packed)
    assert packed.part(items[1].index).tolist() == [[4, 5], [6, 7]]


def test_columns_may_be_sharded_beside_it(held):
    blocks = blocks_of(held((2, 2), (12, 4), (6, 2), [Shard(1), THREE]))
    assert [(block.offsets, block.sizes) for block in blocks] == [((2, 2), (2, 2)), ((6, 2), (2, 2)), ((10, 2), (2, 2))]


def test_of_stacked_matrices_the_dimension_of_their_rows_is_cut(held):
    """Three experts with two matrices of four rows each."""
    blocks = blocks_of(held((2,), (3, 8, 2), (3, 4, 2), [_StridedShard(1, split_factor=2)]))
    assert [(block.offsets, block.sizes) for block in blocks] == [((0, 2, 0), (3, 2, 2)), ((0, 6, 0), (3, 2, 2))]


@pytest.mark.parametrize("mesh, local, placements, offset", [
    ((2, 2), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (6, 0)),  # of FSDP on rows that tensor peers share
    ((3,), (2, 2), [Shard(0)], (6, 0)),  # 3 + 3 + 2 rows
    ((5,), (0, 2), [Shard(0)], (0, 0)),  # 2 + 2 + 2 + 2 + 0
    ((2,), (8, 1), [Shard(-1)], (0, 1)),
    ((2,), (8, 2), [Replicate()], (0, 0)),
])  # fmt: skip
def test_what_lies_together_is_one_block(held, mesh, local, placements, offset):
    tensor = held(mesh, (8, 2), local, placements)
    (block,) = blocks_of(tensor)
    assert (block.offsets, block.sizes) == (offset, local)
    assert checkpointable(tensor) is tensor


def test_a_number_is_one_block_without_sides(held):
    (block,) = blocks_of(held((2,), (), (), [Replicate()]))
    assert block.of_whole(torch.tensor(3.0)) == 3
