"""Models whose passes do not all use the same parameters, or use them in unusual places."""

import torch
from torch import nn


def looks_up(x):
    """A choice that differs from micro batch to micro batch."""
    return bool(x[:, 0].sum() > 0)


class Switch(nn.Module):
    """One of two layers by the input. `spare` is used by nobody's."""

    def __init__(self, width, hidden):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))
        self.spare = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.a(x) if looks_up(x) else self.b(x))


class Experts(nn.Module):
    """Each sample goes to one of the experts; how evenly, is a loss of its own, left in an attribute."""

    def __init__(self, width, experts=4):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.balance = None

    def forward(self, x):
        weights = torch.softmax(self.gate(x), -1)
        self.balance = (weights**2).sum()
        best, chosen = weights.max(-1)
        out = x
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                out = out + (mine * best)[:, None] * torch.tanh(expert(x))
        return out


class Branching(nn.Module):
    """Four blocks of a kind."""

    def __init__(self, kind="switch", hidden=6):
        super().__init__()
        make = {"switch": lambda: Switch(6, hidden), "experts": lambda: Experts(6)}[kind]
        self.blocks = nn.ModuleList(make() for _ in range(4))
        self.head = nn.Linear(6, 1)
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skipping(Branching):
    """Passes over its second block by the input."""

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if index != 1 or looks_up(x):
                x = block(x)
        return self.head(x)


class Either(Branching):
    """Goes through its second or its third block by the input."""

    def forward(self, x):
        other = 2 if looks_up(x) else 1
        for index, block in enumerate(self.blocks):
            if index != other:
                x = block(x)
        return self.head(x)


class Gain(nn.Module):
    """A block with a number of its own: a parameter without dimensions."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gain * torch.tanh(self.linear(x))


class Gained(nn.Module):
    """Blocks and a model with parameters without dimensions; `tied` blocks share a weight with one another."""

    def __init__(self, tied=False):
        super().__init__()
        self.blocks = nn.ModuleList(Gain(6) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(6, 1)
        if tied:
            self.blocks[3].linear.weight = self.blocks[0].linear.weight
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Balanced:
    """Squared error, and the balance of the experts."""

    def loss(self, model, batch):
        x, y = batch
        output = model(x)
        balance = sum(block.balance for block in getattr(model, "module", model).blocks)
        return ((output - y) ** 2).sum() + 0.1 * balance, len(x)

    evaluate = loss


class Penalised:
    """Squared error, and a penalty on weights that the model uses first and last."""

    def __init__(self, names=("head.weight",)):
        self.names = names

    def loss(self, model, batch):
        x, y = batch
        output = model(x)
        penalty = sum((getattr(model, "module", model).get_parameter(name) ** 2).sum() for name in self.names)
        return ((output - y) ** 2).sum() + 0.1 * penalty * len(x), len(x)

    evaluate = loss


class Scaled:
    """Squared error of the output times a parameter of the model, read as an attribute."""

    def loss(self, model, batch):
        x, y = batch
        output = model(x)
        return ((output * getattr(model, "module", model).scale - y) ** 2).sum(), len(x)

    evaluate = loss
