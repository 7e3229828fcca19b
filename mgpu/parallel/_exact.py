"""`numerics: exact`: one gradient, to the last bit, on any number of ranks.

Floating-point sums depend on their order, so the order is fixed: the gradients of a step's M micro batches are added along
a binary tree over the micro-batch index that knows only M. The node (start, 2^l), start a multiple of 2^l, is the sum of
its halves; where the right half lies beyond M, it is its left half. A rank owns a run of micro batches and adds up the
largest nodes inside it as it goes (a binary counter: at most log2 of its run + 1 gradients are kept). Then parts travel by
all-to-all, the owner of each part finishes the tree, and an all-gather returns the sum: no rank count is left in it. With
runs that are whole nodes this is the traffic of a ring all-reduce.

What else differs between layouts is taken care of elsewhere: seeds a micro batch, threads a rank (plan), kernels (rank).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mgpu.parallel._exact_statistics import MicroBatchStatistics
from mgpu.parallel.base import Context, StepLoss, Task, Trainable, Window, backward_one

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Node:
    """One node of the tree: `size` micro batches from `start` on, a power of two that divides `start`."""

    start: int
    size: int


def sibling_follows(left: Node, right: Node) -> bool:
    """Whether the two are the halves of one node."""
    return left.size == right.size and left.start % (2 * left.size) == 0


def largest_nodes(start: int, stop: int) -> list[Node]:
    """The nodes that a rank with the micro batches [start, stop) is left with.

    >>> [(node.start, node.size) for node in largest_nodes(3, 8)]
    [(3, 1), (4, 4)]
    """
    nodes: list[Node] = []
    for index in range(start, stop):
        nodes.append(Node(index, 1))
        while len(nodes) > 1 and sibling_follows(nodes[-2], nodes[-1]):
            right = nodes.pop()
            nodes[-1] = Node(nodes[-1].start, right.size * 2)
    return nodes


class Counter:
    """The gradients of one rank's run, added up along the tree as they come."""

    def __init__(self, start: int) -> None:
        self._next = start
        self._nodes: list[tuple[Node, list[Tensor]]] = []

    def add(self, gradients: list[Tensor]) -> None:
        """Take in the gradients of the next micro batch, which from now on belong to the counter."""
        import torch

        self._nodes.append((Node(self._next, 1), gradients))
        self._next += 1
        while len(self._nodes) > 1 and sibling_follows(self._nodes[-2][0], self._nodes[-1][0]):
            right, addend = self._nodes.pop()
            left, total = self._nodes[-1]
            if total:
                torch._foreach_add_(total, addend)
            self._nodes[-1] = (Node(left.start, left.size + right.size), total)

    def sums(self) -> list[list[Tensor]]:
        """One list of gradients for each node of `largest_nodes`."""
        return [total for _, total in self._nodes]


def finish_tree(sums: dict[Node, Tensor], count: int) -> Tensor:
    """The root: the sum over `count` micro batches, from nodes that cover them. Adds in place."""

    def value(start: int, size: int) -> Tensor:
        known = sums.get(Node(start, size))
        if known is not None:
            return known
        half = size // 2
        left = value(start, half)
        return left.add_(value(start + half, half)) if start + half < count else left

    return value(0, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class ExactTrainable(Trainable):
    """A model that is whole and unwrapped on every rank."""

    statistics: MicroBatchStatistics = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "statistics", MicroBatchStatistics(self.model))

    def micro_batch(self) -> contextlib.AbstractContextManager[None]:
        return self.statistics.of_one_micro_batch()


def lay_out(model: nn.Module, task: Task, context: Context) -> ExactTrainable:
    """What `forward_backward` here takes; the weights are alike on all ranks."""
    return ExactTrainable(model=model, module=model, task=task, context=context, copies=context.world > 1)


def why_not_exact(model: nn.Module) -> str:
    """What in `model` depends on the layout, whatever the order of sums; empty where nothing is known to."""
    import torch

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            return f"{name} is a SyncBatchNorm, which normalises over whatever the ranks hold at once: use BatchNorm"
        if getattr(module, "sparse", False) is True:
            return f"{name} gives sparse gradients, whose sums have no fixed order: write sparse=False"
    return ""


def forward_backward(trainable: Trainable, window: Window) -> StepLoss:
    """Like every strategy's, with the same bits in any layout. The model is whole on every rank, and not wrapped."""
    import torch

    assert isinstance(trainable, ExactTrainable)
    context = trainable.context
    parameters = trainable.parameters
    count = sum(window.counts)
    first = sum(window.counts[: context.replica])
    counter = Counter(first)
    sums: list[Tensor] = []
    used = [0.0] * len(parameters)
    for micro_batch in window.micro_batches:
        sums.append(backward_one(trainable, micro_batch))
        gradients = []
        for number, parameter in enumerate(parameters):
            used[number] = max(used[number], float(parameter.grad is not None))
            gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        counter.add(gradients)
    losses = torch.zeros(2 * count + len(parameters) + 1, dtype=torch.float64, device=context.device)
    if sums:
        losses[2 * first : 2 * (first + len(sums))] = torch.cat(sums)
    losses[2 * count :] = torch.tensor([*used, float(context.stop.asked)], dtype=torch.float64)
    if context.replicas > 1:
        torch.distributed.all_reduce(losses)  # one rank's number and zeros: exact in any order
    loss_sum, units = losses[: 2 * count].view(count, 2).sum(0)
    if not all(used):  # else there is no need to wait for the device
        used = losses[2 * count : -1].tolist()
    factor = 1.0 / (units * context.loss_scale)
    for indices in _by_dtype(parameters):
        mine = [[total[i] for i in indices] for total in counter.sums()]
        whole = _sum_over_ranks(mine, window.counts, context.replica, [parameters[i] for i in indices], factor)
        for index, gradient in zip(indices, whole, strict=True):
            parameters[index].grad = gradient if used[index] else None
    trainable.statistics.settle(window.counts, context.replica, context.device)
    return StepLoss(loss_sum=loss_sum, units=units, stop_votes=losses[-1])


def _by_dtype(parameters: Sequence[Tensor]) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for index, parameter in enumerate(parameters):
        groups.setdefault(parameter.dtype, []).append(index)
    return list(groups.values())


def _sum_over_ranks(
    mine: list[list[Tensor]], counts: Sequence[int], replica: int, like: list[Tensor], factor: Tensor
) -> list[Tensor]:
    """The gradients of `like` over all replicas, times `factor`. `mine`: this replica's nodes, in order."""
    import torch
    import torch.distributed as dist

    bounds = [sum(counts[:index]) for index in range(len(counts) + 1)]
    nodes = [largest_nodes(bounds[index], bounds[index + 1]) for index in range(len(counts))]
    world, total = len(counts), bounds[-1]
    if world == 1:
        columns = zip(*mine, strict=True)
        whole = [finish_tree(dict(zip(nodes[0], column, strict=True)), total) for column in columns]
        torch._foreach_mul_(whole, factor.to(whole[0].dtype))
        return whole
    sizes = [parameter.numel() for parameter in like]
    part = -(-sum(sizes) // world)
    dtype, device = like[0].dtype, like[0].device
    sent = torch.zeros(world, len(mine), part, dtype=dtype, device=device)
    for number, gradients in enumerate(mine):
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        padded = torch.nn.functional.pad(flat, (0, world * part - flat.numel()))
        sent[:, number] = padded.view(world, part)
    received = torch.empty(sum(map(len, nodes)) * part, dtype=dtype, device=device)
    dist.all_to_all_single(received, sent.view(-1), [len(of) * part for of in nodes], [len(mine) * part] * world)
    order = [node for of in nodes for node in of]
    owned = finish_tree(dict(zip(order, received.split(part), strict=True)), total)
    owned.mul_(factor.to(dtype))
    whole_flat = torch.empty(world * part, dtype=dtype, device=device)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name since torch 2.13
    gather(whole_flat, owned)
    parts = whole_flat[: sum(sizes)].split(sizes)
    return [value.view_as(parameter) for value, parameter in zip(parts, like, strict=True)]
