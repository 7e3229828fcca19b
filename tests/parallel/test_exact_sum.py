"""The tree of `numerics: exact`: the same bits from any split, against a recursion written out by hand."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu.parallel._exact import Counter, Node, finish_tree, largest_nodes, why_not_exact


def by_definition(values, start, size):
    """The node (start, size) over `values`, a list of tensors."""
    if size == 1:
        return values[start].clone()
    left = by_definition(values, start, size // 2)
    middle = start + size // 2
    return left + by_definition(values, middle, size // 2) if middle < len(values) else left


def gradients(count, seed):
    """Magnitudes from 1e-8 to 1e8, so that another order of the sum shows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-8, 9, (count, 1), generator=generator)
    return list(torch.randn(count, 7, generator=generator) * sizes)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), count=st.integers(1, 70))
def test_any_split_gives_the_bits_of_the_tree(data, count):
    values = gradients(count, count)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=6)))
    sums = {}
    for start, stop in itertools.pairwise([0, *cuts, count]):
        counter = Counter(start)
        for value in values[start:stop]:
            counter.add([value.clone()])
        nodes = largest_nodes(start, stop)
        assert len(nodes) == len(counter.sums())
        sums.update({node: total for node, (total,) in zip(nodes, counter.sums(), strict=True)})
    expected = by_definition(values, 0, 1 << (count - 1).bit_length())
    assert torch.equal(finish_tree(sums, count), expected)


def test_the_order_matters_for_these_values():
    """Else the test above could not fail."""
    values = gradients(12, 12)
    assert not torch.equal(sum(values[1:], values[0]), by_definition(values, 0, 16))


@pytest.mark.parametrize(
    "run, nodes",
    [
        ((0, 8), [(0, 8)]),
        ((3, 8), [(3, 1), (4, 4)]),
        ((2, 11), [(2, 2), (4, 4), (8, 2), (10, 1)]),
        ((5, 5), []),
    ],
)
def test_nodes_worked_out_by_hand(run, nodes):
    assert largest_nodes(*run) == [Node(start, size) for start, size in nodes]


@given(start=st.integers(0, 200), length=st.integers(0, 200))
def test_a_run_leaves_few_nodes_that_cover_it(start, length):
    nodes = largest_nodes(start, start + length)
    assert [index for node in nodes for index in range(node.start, node.start + node.size)] == list(
        range(start, start + length)
    )
    assert all(node.start % node.size == 0 for node in nodes)
    assert len(nodes) <= 2 * max(1, length).bit_length()


def test_what_cannot_be_exact_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    assert "1 is a SyncBatchNorm" in why_not_exact(model)
    assert "sparse" in why_not_exact(torch.nn.Embedding(3, 2, sparse=True))
    assert why_not_exact(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))) == ""
