"""User code of the strategy tests: token data of any length, GPTs in double precision, a net with batch norm."""

import os

import torch
from torch import nn

from mgpu.train import Supervised
from mgpu.zoo import GPT


class Tokens:
    """Sample i: `context` tokens drawn from seed i, and the same shifted by one, of which i % 3 do not count."""

    def __init__(self, n=22, context=8, trace=None):
        self.n, self.context, self.trace = n, context, trace

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if self.trace:
            with open(f"{self.trace}-{os.environ['RANK']}.txt", "a", encoding="utf-8") as stream:
                stream.write(f"{index}\n")
        tokens = torch.randint(0, 32, (self.context + 1,), generator=torch.Generator().manual_seed(index))
        targets = tokens[1:].clone()
        targets[: index % 3] = -100
        return tokens[:-1], targets


class Pairs(Tokens):
    """The same for a model that translates: its decoder sees the tokens back to front."""

    def __getitem__(self, index):
        tokens, targets = super().__getitem__(index)
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(0)}, targets


class NextToken(Supervised):
    def __init__(self):
        super().__init__(nn.CrossEntropyLoss(), unit="token")


def gpt(double=False, frozen=(), layers=4, tie=True, heads=4, width=16, context=8, dropout=0.0):
    """A GPT; parameters whose names begin with one of `frozen` do not train."""
    model = GPT(
        layers=layers, width=width, context=context, heads=heads, vocabulary=32, tie=tie, dropout=dropout
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)
    return model.double() if double else model


class Points:
    def __init__(self, n=22):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        x = torch.randn(6, generator=torch.Generator().manual_seed(index)).double()
        return x, x.sum().reshape(1)


class Images:
    """Sample i: an image drawn from seed i, of class i % 4."""

    def __init__(self, n=22, size=64):
        self.n, self.size = n, size

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.randn(3, self.size, self.size, generator=torch.Generator().manual_seed(index)), index % 4


class Classes(Supervised):
    def __init__(self):
        super().__init__(nn.CrossEntropyLoss())


class Block(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)))


class Normed(nn.Module):
    """Batch norm in every block; `unused` parameters get no gradient."""

    def __init__(self, unused=False, norm=True, blocks=4):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(6, norm) for _ in range(blocks)))
        self.head = nn.Linear(6, 1)
        if unused:
            self.spare = nn.Linear(6, 6)
        self.double()

    def forward(self, x):
        return self.head(self.blocks(x))


class Square(Supervised):
    def __init__(self):
        super().__init__(nn.MSELoss())


class Patches(nn.Module):
    """Shaped like a vision transformer: a class token and positions that are parameters of modules which several stages
    share, and a module list inside a module with a forward of its own."""

    class Encoder(nn.Module):
        def __init__(self, width, blocks):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(1, 1, width) / 4)
            self.blocks = nn.Sequential(*(Block(width, norm=False) for _ in range(blocks)))
            self.norm = nn.LayerNorm(width)

        def forward(self, x):
            return self.norm(self.blocks(x + self.positions))

    def __init__(self, blocks=4):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.encoder = self.Encoder(6, blocks)
        self.head = nn.Linear(6, 1)
        self.double()

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x.unsqueeze(1)], dim=1)
        return self.head(self.encoder(x)[:, 0])


class Turned(nn.Module):
    """Blocks that return a transposed view, as torch's attention does, and are given the gradient of one."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.scale = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return torch.tanh(self.mix(self.scale(x).transpose(1, 2)).contiguous()).transpose(1, 2)

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(1, 6)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.head = nn.Linear(6, 1)
        self.double()

    def forward(self, x):
        x = self.stem(x.unsqueeze(-1))
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Remembering(Normed):
    """Returns beside its logits something that no other process can be given."""

    def __init__(self):
        super().__init__(norm=False)

    def forward(self, x):
        return {"logits": super().forward(x), "memory": lambda: x}


class Skipping(Normed):
    """Uses a value of its first block again at the end, past all blocks between."""

    def __init__(self):
        super().__init__(norm=False)

    def forward(self, x):
        first = self.blocks[0](x)
        return self.head(self.blocks[3](self.blocks[2](self.blocks[1](first))) + first)


class Scaled(nn.Module):
    """Blocks that are called with a scale, which the stem makes, before the activations: two values to hand over."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6))

        def forward(self, scale, x):
            return x + scale * self.inner(x)

    def __init__(self, constant=False):
        super().__init__()
        self.stem, self.constant = nn.Linear(6, 6), constant
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.head = nn.Linear(6, 1)
        self.double()

    def forward(self, x):
        scale = torch.full_like(x, 0.5) if self.constant else self.stem(x)
        for block in self.blocks:
            x = block(scale, x)
        return self.head(x)


class UNet(nn.Module):
    """Each block on the way up takes what the block of its width on the way down made, and batch norm in all."""

    class Block(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.mix, self.norm = nn.Conv1d(channels, 4, 3, padding=1), nn.BatchNorm1d(4)

        def forward(self, x):
            return torch.tanh(self.norm(self.mix(x)))

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(1, 4, 1)
        self.down = nn.ModuleList(self.Block(4) for _ in range(4))
        self.up = nn.ModuleList(self.Block(8) for _ in range(4))
        self.head = nn.Linear(24, 1)
        self.double()

    def forward(self, x):
        x, skips = self.stem(x.unsqueeze(1)), []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.head(x.flatten(1))


class Translator(nn.Module):
    """An encoder whose output all blocks of the decoder take, one embedding at the start of both, which the head shares, and
    a bias by positions that the first block makes for all (T5). Tokens in, logits out."""

    class Block(nn.Module):
        def __init__(self, width, biased, crossed):
            super().__init__()
            self.mix, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
            self.bias = nn.Embedding(16, 1) if biased else None
            self.cross = nn.Linear(width, width) if crossed else None

        def forward(self, x, memory=None, bias=None):
            if self.bias is not None:
                places = torch.arange(x.shape[1])
                bias = self.bias((places[:, None] - places).clamp(-8, 7) + 8).squeeze(-1)
            weights = torch.softmax(x @ x.transpose(1, 2) + bias, -1)
            x = x + self.mix(self.norm(weights @ x))
            if self.cross is not None:
                x = x + torch.softmax(x @ memory.transpose(1, 2), -1) @ self.cross(memory)
            return x, bias

    def __init__(self, width=8, layers=2):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.encoder = nn.ModuleList(self.Block(width, i == 0, False) for i in range(layers))
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.decoder = nn.ModuleList(self.Block(width, i == 0, True) for i in range(layers))
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens):
        memory, bias = self.embed(tokens), None
        for block in self.encoder:
            memory, bias = block(memory, None, bias)
        x, bias = self.embed(tokens.flip(1)), None
        x *= 2
        x += memory
        for block in self.decoder:
            x, bias = block(x, memory, bias)
        return self.head(x * self.scale)


class Chosen(nn.Module):
    """Its first block chooses columns, integers that need no gradient, for the last."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, norm=False) for _ in range(4))
        self.head = nn.Linear(3, 1)
        self.double()

    def forward(self, x):
        x = self.blocks[0](x)
        places, large = x.topk(3).indices, x > 0
        for block in self.blocks[1:]:
            x = block(x)
        return self.head((x * large).gather(1, places))


class Overwriting(Normed):
    """Blocks that change in place what they are called with; `kept` uses it afterwards."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return self.linear(x.tanh_())

    def __init__(self, kept=False):
        super().__init__(norm=False)
        self.kept = kept
        for index in range(4):
            self.blocks[index] = self.Block().double()

    def forward(self, x):
        for block in self.blocks:
            before = x = x * 2
            x = block(x)
            x = x + before if self.kept else x
        return self.head(x)


class Finite(Normed):
    """Looks whether what it is given is finite."""

    def __init__(self):
        super().__init__(norm=False)

    def forward(self, x):
        if not bool(x.isfinite().all()):
            raise ValueError("not finite")
        return super().forward(x)


class Asking(Normed):
    """Goes on by the sign of an activation."""

    def __init__(self):
        super().__init__(norm=False)

    def forward(self, x):
        x = self.blocks[0](x)
        return self.head(self.blocks[3](self.blocks[2](self.blocks[1](x if x.sum() > 0 else -x))))


class Reaching(Normed):
    """Takes the weight of a block beside calling it."""

    def __init__(self):
        super().__init__(norm=False)

    def forward(self, x):
        return self.head(self.blocks(x) @ self.blocks[0].linear.weight)


class Returning(Normed):
    """Calls its first block on what its last one made."""

    def __init__(self):
        super().__init__(norm=False)

    def forward(self, x):
        return self.head(self.blocks[0](self.blocks(x)))


class Thawing(nn.Module):
    """Two 1 x 1 layers of weight 1; the first is frozen until the third forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for parameter in self.parameters():
            nn.init.ones_(parameter)
        self.first.weight.requires_grad_(False)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        self.first.weight.requires_grad_(self.passes > 2)
        return self.last(self.first(x))


class Chain(nn.Module):
    """Two stages of one weight, both 1."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x):
        return self.last(self.first(x))


class Numbers:
    """Sample i is i + 1."""

    def __init__(self, n=8):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([float(index + 1)])


class Sum:
    """The loss of a sample is the model's output for it."""

    def loss(self, model, batch):
        return model(batch).sum(), len(batch)


class Apart(Sum):
    """Changes a weight by rank, which no task should."""

    def loss(self, model, batch):
        with torch.no_grad():
            getattr(model, "module", model).last.weight.add_(int(os.environ["RANK"]))
        return super().loss(model, batch)
