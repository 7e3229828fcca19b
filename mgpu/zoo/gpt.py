"""A small decoder-only transformer, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention: (B, T, width) -> (B, T, width).

    Queries, keys and values have a projection each, and the number of heads is read off their output, so that a
    tensor-parallel plan may split them by columns and `o` by rows.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class Mlp(nn.Module):
    """Two linear maps with a GELU between them: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Layer(nn.Module):
    """Attention, then the feed-forward part, each on its normalised input and added to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class GPT(nn.Module):
    """Predicts the next token: tokens (B, T) int64 with T <= context -> logits (B, T, vocabulary).

    The shape of GPT-2 (Radford et al. 2019): learned positions, pre-norm, initial weights N(0, 0.02) with those that
    write to the residual stream divided by sqrt(2 layers). `heads` defaults to one for every 32 of `width`. `tie` makes
    the token embedding the output weights as well. ValueError where `width` is not a multiple of `heads`.
    """

    def __init__(
        self,
        layers: int = 2,
        width: int = 128,
        context: int = 64,
        heads: int | None = None,
        vocabulary: int = 256,
        dropout: float = 0.0,
        tie: bool = True,
    ) -> None:
        super().__init__()
        if heads is None:
            heads = next(count for count in range(max(1, width // 32), 0, -1) if width % count == 0)
        if heads < 1 or width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tie:
            self.head.weight = self.tokens.weight
        self._draw_weights()

    def _draw_weights(self) -> None:
        to_residual = 0.02 / math.sqrt(2 * max(1, len(self.layers)))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_last = name.endswith(("attention.o.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=to_residual if is_last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens are more than the context of {self.context}")
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device)))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, temperature: float = 0.8, seed: int = 0) -> Tensor:
        """Continue `prompt` (B, P >= 1) by `length` tokens: (B, P + length) int64.

        The same weights and seed give the same tokens: the draw has a generator of its own, on the CPU, and dropout is
        off. Temperature 0 takes the likeliest token.
        """
        draw = torch.Generator().manual_seed(seed)
        was_training = self.training
        self.eval()
        try:
            for _ in range(length):
                logits = self(prompt[:, -self.context :])[:, -1].float().cpu()
                if temperature > 0:
                    token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=draw)
                else:
                    token = logits.argmax(-1, keepdim=True)
                prompt = torch.cat([prompt, token.to(prompt.device)], dim=1)
        finally:
            self.train(was_training)
        return prompt
