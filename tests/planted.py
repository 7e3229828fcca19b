"""Faults that other tools have had, each planted in a user's task, optimizer, data set or model, for `mgpu verify` to find."""

import os

import numpy as np
import torch
from toy import Data, Net, Task


class AveragedPerRank(Task):
    """As a DDP script would: the mean over this rank's samples, divided by the number of ranks."""

    def loss(self, model, batch):
        total, units = super().loss(model, batch)
        return total / int(os.environ["WORLD_SIZE"]), units


PASSES = []


class CountingTask(Task):
    def loss(self, model, batch):
        PASSES.append(1)
        return super().loss(model, batch)


class FullCountInTheTail(torch.optim.SGD):
    """Divides by the accumulation of a whole batch, also where the end of an epoch has fewer micro batches."""

    def step(self, closure=None):
        whole = 4 // int(os.environ["WORLD_SIZE"])
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= len(PASSES) / whole
        PASSES.clear()
        return super().step(closure)


class SteppedPerMicroBatch(torch.optim.SGD):
    """Decays its rate once for every forward pass."""

    factor = 1.0

    def step(self, closure=None):
        self.factor *= 0.99 ** len(PASSES)
        PASSES.clear()
        for group in self.param_groups:
            group["lr"] *= self.factor
        return super().step(closure)


class EqualSeeds(Data):
    """Augments from a generator of its own, which has the same seed in every rank and worker."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index):
        x, y, index = super().__getitem__(index)
        return x + float(self.generator.normal()), y, index


class OneLayerNotSynced(Net):
    """DDP leaves out what a module lists here."""

    _ddp_params_and_buffers_to_ignore = frozenset({"first.weight"})


class AnotherEachTime(Task):
    """Noise that no seed decides."""

    def loss(self, model, batch):
        total, units = super().loss(model, batch)
        return total * (1 + 1e-3 * int.from_bytes(os.urandom(2), "big") / 65536), units
