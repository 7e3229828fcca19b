"""How many parameters a model has, how many train, and what share of them each rank holds."""

from __future__ import annotations

from typing import Any

import torch

from mgpu.parallel._gradients import local
from mgpu.parallel.base import Trainable


def count_parameters(trainable: Trainable) -> dict[str, Any]:
    """`parameters` and `trainable` of the whole model, and `held`: parameters a rank, rank 0 first. Collective."""
    named = trainable.named_parameters
    mine = {name: (value.numel(), value.requires_grad) for name, value in named.items()}
    held = sum(local(value).numel() for value in named.values())
    told: list[Any] = [(mine, held)]
    if trainable.context.world > 1:
        told = [None] * trainable.context.world
        torch.distributed.all_gather_object(told, (mine, held))
    whole = {name: value for counted, _ in told for name, value in counted.items()}
    return {
        "parameters": sum(count for count, _ in whole.values()),
        "trainable": sum(count for count, trains in whole.values() if trains),
        "held": [held for _, held in told],
    }
