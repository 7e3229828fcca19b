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


class Ragged(Numbers):
    """Sample i is a sequence of numbers, each as long as it likes."""

    def __getitem__(self, index):
        return torch.tensor(self.values[index], dtype=torch.float32)


def as_list():
    """A collate function that leaves samples of different lengths apart."""
    return list


class TokenMean:
    """loss = w * x a token; the batch is a list of sequences."""

    def loss(self, model, batch):
        tokens = torch.cat(batch)
        return model(tokens).sum(), len(tokens)


class Sentences:
    """Sample i is (tokens, next tokens) of length 7, where all but the first 1 + i % 7 targets are ignored."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        tokens = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(index))
        targets = tokens[1:].clone()
        targets[1 + index % 7 :] = -100
        return tokens[:-1], targets


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


class Drawn:
    """Sample i is (1, a number from NumPy's global generator, i)."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.ones(1), torch.tensor([np.random.randint(10**9)]), index


class Notes:
    """Writes down (id, drawn) of every sample; loss = w."""

    def __init__(self, path):
        self.path = path

    def loss(self, model, batch):
        x, drawn, index = batch
        with open(f"{self.path}-{os.environ['RANK']}.txt", "a", encoding="utf-8") as stream:
            stream.writelines(f"{int(i)} {int(d)}\n" for i, d in zip(index, drawn, strict=True))
        return model(x).sum(), len(x)


class MeanOfTargets:
    """A metric of the user's own, with nothing that adds up over ranks."""

    def __init__(self):
        self.reset()

    def update(self, predictions, targets):
        self.values += targets.flatten().tolist()

    def compute(self):
        return sum(self.values) / len(self.values)

    def reset(self):
        self.values = []


class CountOfTargets(MeanOfTargets):
    def compute(self):
        return len(self.values)


class EvaluatedProduct(Product):
    """As Product; evaluation hands on (w * x, x)."""

    def evaluate(self, model, batch):
        outputs = model(batch)
        return outputs.sum(), len(batch), outputs, batch


class Stream(torch.utils.data.IterableDataset):
    """The samples of Data in their order; without a length unless `sized`."""

    def __init__(self, n=22):
        self.data = Data(n)

    def __iter__(self):
        return (self.data[index] for index in range(self.data.n))


class UnevenStream(torch.utils.data.IterableDataset):
    """Splits itself: rank 0 gives ten samples 3.0, rank 1 gives six samples 5.0."""

    def __iter__(self):
        rank = int(os.environ["RANK"])
        return iter([torch.tensor(float(3 + 2 * rank))] * (10 - 4 * rank))


class Backwards(torch.utils.data.Sampler):
    """The samples from the last to the first."""

    def __init__(self, data):
        self.n = len(data)

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(range(self.n - 1, -1, -1))


def split_by_rank(data):
    return torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)


class Normed(nn.Module):
    """A model with batch norm, whose running statistics see every micro batch."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class Frozen(Net):
    """Its first layer does not train, until a task unfreezes it."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


class Unfreezing(Task):
    """Unfreezes everything before its forward pass number `at`."""

    def loss(self, model, batch):
        if self.passes + 1 == self.at:
            model.requires_grad_(True)
        return super().loss(model, batch)


class Counting(Net):
    """Keeps a buffer of what its own rank has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += x.sum()
        return super().forward(x)
