"""Ranks that should be alike and are not: found before the difference is saved, and named."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mgpu.parallel.base import Trainable


def refuse_unfrozen(trainable: Trainable, trained: list[str]) -> None:
    """RuntimeError where parameters were frozen or unfrozen since the model was laid out.

    Neither the optimizer nor the strategy would know: the ranks would train on gradients of their own.
    """
    now = trainable.trained
    if now != trained:
        changed = sorted(set(now) ^ set(trained))
        raise RuntimeError(
            f"{changed[0]} was {'unfrozen' if changed[0] in now else 'frozen'} during the training: what trains is fixed "
            "when the model is laid out; freeze in the model's constructor, and train on with `mgpu resume`"
        )


def refuse_drift(trainable: Trainable) -> None:
    """RuntimeError naming the first parameter or buffer that differs between ranks which hold copies. Collective."""
    if not trainable.copies or trainable.context.world == 1:
        return
    values = trainable.state_dict()
    sums = torch.stack(
        [value.detach().double().nan_to_num().sum().to(trainable.context.device) for value in values.values()]
    )
    bounds = torch.cat([sums, -sums])
    dist.all_reduce(bounds, op=dist.ReduceOp.MIN)
    least, most = bounds.split(len(sums))
    for name, low, high in zip(values, least.tolist(), (-most).tolist(), strict=True):
        if low != high:
            raise RuntimeError(
                f"{name} differs between ranks (sums from {low!r} to {high!r}): they have trained apart since the last "
                "checkpoint; something in the model or the task changes parameters by rank"
            )
