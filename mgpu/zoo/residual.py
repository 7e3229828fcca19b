"""A small residual network for images, with group norm: no sample's output depends on the others of its batch."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Two 3 x 3 convolutions added to their input: (B, before, H, W) -> (B, after, H / stride, W / stride).

    Pre-activation (He et al. 2016); a 1 x 1 convolution carries the input where the shape changes.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm_1 = nn.GroupNorm(math.gcd(8, before), before)
        self.conv_1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm_2 = nn.GroupNorm(math.gcd(8, after), after)
        self.conv_2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv_1(functional.relu(self.norm_1(x)))
        out: Tensor = self.shortcut(x) + self.conv_2(functional.relu(self.norm_2(inner)))
        return out


class ResidualNet(nn.Module):
    """Classifies images: (B, channels, H, W) float -> logits (B, classes). H and W may be any size from 2 on.

    `blocks` residual blocks at `width` channels, then `blocks` at twice the width and half the resolution.
    """

    def __init__(
        self, width: int = 32, blocks: int = 2, classes: int = 10, channels: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        first = [Block(width, width, stride=1) for _ in range(blocks)]
        second = [Block(2 * width if i else width, 2 * width, stride=1 if i else 2) for i in range(blocks)]
        self.layers = nn.ModuleList([*first, *second])
        last = 2 * width if blocks else width
        self.norm = nn.GroupNorm(math.gcd(8, last), last)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(last, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        pooled = functional.relu(self.norm(x)).mean((2, 3))
        logits: Tensor = self.head(self.dropout(pooled))
        return logits
