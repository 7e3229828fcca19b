"""What users do in their models and tasks, and may."""

import random

import torch
from stack import Points
from torch import nn


class Named(Points):
    """Samples that are dicts, as of Hugging Face."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Long(Points):
    """Sample i has 3 to 5 rows."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x.repeat(3 + index % 3, 1) * torch.arange(1, 4 + index % 3)[:, None], y


class Popping:
    """Takes the targets out of the batch."""

    def loss(self, model, batch):
        target = batch.pop("labels")
        return ((model(batch["x"]) - target) ** 2).sum(), len(target)


class InPlace:
    """Changes inputs and targets in place before it calls the model."""

    def loss(self, model, batch):
        x, y = batch
        x.mul_(0.5)
        y.mul_(0.5).add_(1)
        return ((model(x) - y) ** 2).sum(), len(x)


class Mixup:
    """Mixes inputs, and then targets, by a number that it draws."""

    def loss(self, model, batch):
        x, y = batch
        part = random.betavariate(0.4, 0.4) * float(torch.rand(()))
        output = model(part * x + (1 - part) * x.flip(0))
        return ((output - part * y - (1 - part) * y.flip(0)) ** 2).sum(), len(x)


class Block(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, x):
        x = self.linear(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) if x.dim() == 3 else self.norm(x)
        return torch.tanh(x)


class Staged(nn.Module):
    """Calls its blocks by names that mgpu has for things of its own."""

    def __init__(self, norm=False):
        super().__init__()
        self.stages = nn.ModuleList(Block(norm) for _ in range(4))
        self.model = nn.Linear(6, 1)
        self.double()

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        x = self.model(x)
        return x.mean(1) if x.dim() == 3 else x


class Halfway(Staged):
    """Only its first two blocks have a batch norm: not every stage has one."""

    def __init__(self):
        super().__init__(norm=True)
        for stage in self.stages[2:]:
            stage.norm = nn.Identity()


class Counting(Staged):
    """Counts its passes in a buffer, a new one each time, and uses the count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.passes = self.passes + 1
        return super().forward(x) * (1 + 0.01 * self.passes)


class Hooked(Staged):
    """Doubles its input by a hook on itself."""

    def __init__(self):
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (2 * args[0],))


class Mixed(nn.Module):
    """Its first parameter is in bfloat16, the others are in float32."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 1.5, dtype=torch.bfloat16))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        x = x.float() * self.scale.float()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Plain:
    """Squared error, in the model's precision."""

    def loss(self, model, batch):
        x, y = batch
        output = model(x)
        return ((output - y.to(output.dtype)) ** 2).sum(), len(x)


def by_dimensions(parameters, lr):
    """Weight decay for matrices alone, as users write it."""
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    others = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)
