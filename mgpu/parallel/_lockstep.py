"""The same number of forward passes on every replica, where a pass is collective and the data does not divide evenly."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mgpu.parallel.base import MicroBatch, Trainable, Window


def passes(trainable: Trainable, window: Window) -> Iterator[tuple[MicroBatch, bool]]:
    """The micro batches of this replica, each with whether it counts.

    In lockstep, a replica that has fewer than another repeats its last one for nothing; one that has none at all gets the
    first of replica 0. Real data, because a backward pass of zeros through made-up data need not be zero, but NaN.
    """
    context = trainable.context
    missing = max(window.counts) - window.counts[context.replica] if trainable.lockstep else 0
    needs_one = trainable.lockstep and min(window.counts) == 0
    micro_batch: MicroBatch | None = None
    given: MicroBatch | None = None
    for micro_batch in window.micro_batches:
        if needs_one and given is None:
            given = _from_first(micro_batch, context.device)
        yield micro_batch, True
    if needs_one and given is None:
        given = _from_first(None, context.device)
    for _ in range(missing):
        spare = micro_batch or given
        assert spare is not None
        yield spare, False


def _from_first(micro_batch: MicroBatch | None, device: torch.device) -> MicroBatch:
    """Rank 0's `micro_batch`, on every rank."""
    import torch
    from torch.utils._pytree import tree_map_only

    holder: list[Any] = [micro_batch]
    torch.distributed.broadcast_object_list(holder, src=0, device=device)
    given: MicroBatch = holder[0]
    return dataclasses.replace(given, batch=tree_map_only(torch.Tensor, lambda value: value.to(device), given.batch))
