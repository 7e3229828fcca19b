"""User code for tests: a data set with random augmentation, a model with dropout, a task that records and misbehaves.

Copied beside each test's spec, so that ranks load it from a file as a user's own.
"""

import os
import signal
import time

import numpy as np
import torch
from torch import nn

from mgpu.train import Supervised


class Data:
    """Sample i is (x, y, i): x is fixed by i but for noise drawn from the global generators."""

    def __init__(self, n=24, path=None, noise=0.1):
        self.n, self.noise = n, noise
        if path:
            with open(path, encoding="utf-8"):
                pass

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        fixed = torch.randn(8, generator=torch.Generator().manual_seed(index))
        x = fixed + self.noise * (torch.randn(8) + torch.from_numpy(np.random.randn(8)).float())
        return x, fixed.sum().reshape(1), index


class Net(nn.Module):
    def __init__(self, dropout=0.2):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x))))


class Task(Supervised):
    """Records the ids it is given; `fail` says what happens to `fail_rank` at its forward pass number `at`."""

    def __init__(self, trace=None, delay=0.0, fail=None, fail_rank=1, at=4):
        super().__init__(nn.MSELoss())
        self.trace, self.delay = trace, delay
        self.fail, self.fail_rank, self.at = fail, fail_rank, at
        self.passes = 0

    def loss(self, model, batch):
        x, y, index = batch
        self.passes += 1
        if self.trace:
            with open(f"{self.trace}-{os.environ['RANK']}.txt", "a", encoding="utf-8") as stream:
                stream.write(" ".join(str(int(i)) for i in index) + "\n")
        time.sleep(self.delay)
        if self.fail and self.passes == self.at and int(os.environ["RANK"]) == self.fail_rank:
            misbehave(self.fail)
        return super().loss(model, (x, y))

    def evaluate(self, model, batch):
        return super().evaluate(model, batch[:2])


def misbehave(how):
    if how == "raise":
        raise ValueError("bad sample 17")
    if how == "exit":
        os._exit(75)
    if how == "leave":
        raise SystemExit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


class Numbers:
    """Sample i is its number."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return torch.tensor(float(self.values[index]))


class OneWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.w * x


class Product:
    """loss = w * x a sample: its gradient is the mean of x."""

    def loss(self, model, batch):
        return model(batch).sum(), len(batch)
