"""User models round torch's own multi-head attention: every way of calling it, and torch's own layers that contain it."""

import torch
from torch import nn

LENGTH = 8


def later(length=LENGTH):
    """True where a position comes after that of the row."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def left_out(tokens):
    """True at tokens above 25, but never at the first position."""
    return (tokens > 25) & (torch.arange(tokens.shape[1]) > 0)


class Attentive(nn.Module):
    """Attention with a causal mask; with learned keys, padding and a learned mask for each head; over other widths, with
    averaged weights; and of one sequence at a time, with the weights of each head."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Parameter(torch.randn(LENGTH, 16) / 4)
        self.causal = nn.MultiheadAttention(16, 4, dropout, batch_first=True)
        self.masked = nn.MultiheadAttention(16, 4, dropout, add_bias_kv=True, add_zero_attn=True)
        self.distance = nn.Parameter(torch.randn(4, LENGTH, LENGTH) / 4)
        self.wide, self.narrow = nn.Linear(16, 12), nn.Linear(16, 8)
        self.cross = nn.MultiheadAttention(16, 4, dropout, kdim=8, vdim=12, bias=False, batch_first=True)
        self.alone = nn.MultiheadAttention(16, 4)
        self.head = nn.Linear(16 + 2 * LENGTH, 32)
        for attention in (self.causal, self.masked, self.alone):
            nn.init.normal_(attention.in_proj_bias)
            nn.init.normal_(attention.out_proj.bias)
        self.double()

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        x = x + self.causal(x, x, x, need_weights=False, attn_mask=later(), is_causal=True)[0]
        turned, mask = x.transpose(0, 1), self.distance.repeat(len(x), 1, 1)
        padding = torch.zeros_like(tokens, dtype=x.dtype).masked_fill(left_out(tokens), -torch.inf)
        mixed, none = self.masked(turned, turned, turned, padding, need_weights=False, attn_mask=mask)
        assert none is None
        x = x + mixed.view(-1, 16).view(turned.shape).transpose(0, 1)  # its memory lies as torch's own lies
        mixed, averaged = self.cross(x, self.narrow(x), self.wide(x), key_padding_mask=left_out(tokens))
        x = x + mixed
        each = [self.alone(row, row, x[0], attn_mask=later(), average_attn_weights=False) for row in x]
        x = x + torch.stack([row for row, _ in each])
        weights = torch.stack([told for _, told in each])
        return self.head(torch.cat([x, averaged, weights[:, 1] * weights[:, 3]], dim=-1))


class Layers(nn.Module):
    """torch's encoder and decoder layers; in evaluation, one fused operator may stand for an encoder layer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Parameter(torch.randn(LENGTH, 16) / 4)
        layer = {"d_model": 16, "nhead": 4, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer, norm_first=True, bias=False), 1)
        self.head = nn.Linear(16, 32)
        self.double()

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        # The last position stays: where it is padding, the fused operator gives zeros in place of what a layer gives.
        read = self.encoder(x, src_key_padding_mask=(torch.arange(LENGTH) == 2).expand(len(x), -1))
        return self.head(self.decoder(x, read, tgt_mask=later(), tgt_is_causal=True))


class Mixture(nn.Module):
    """Three experts, whose matrices are stacked as (experts, inputs, outputs), two of them side by side, with a bias; each
    token goes to two. A gain for each of four heads is a parameter of the module that has the heads."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 16, 2 * 8) / 4)
            self.bias = nn.Parameter(torch.randn(3, 1, 2 * 8) / 4)
            self.down = nn.Parameter(torch.randn(3, 8, 16) / 4)

        def forward(self, x, shares):
            gate, up = (x @ self.up + self.bias).chunk(2, dim=-1)
            return (torch.tanh(gate) * up @ self.down * shares.T.unsqueeze(-1)).sum(0)

    class Gained(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
            self.gains = nn.Parameter(torch.tensor([1.0, 2.0, -1.0, 0.5]))

        def forward(self, x):
            heads = self.into(x).unflatten(-1, (-1, 4))
            return self.out((torch.sin(heads) * self.gains.unsqueeze(-1)).flatten(-2))

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.router, self.experts, self.gained = nn.Linear(16, 3), self.Experts(), self.Gained()
        self.head = nn.Linear(16, 32)
        self.double()

    def forward(self, tokens):
        x = self.tokens(tokens).flatten(0, 1)
        scores = self.router(x)
        shares = scores.masked_fill(scores == scores.amin(-1, keepdim=True), -torch.inf).softmax(-1)
        x = x + self.experts(x, shares=shares)
        return self.head(x + self.gained(x)).unflatten(0, tokens.shape)
