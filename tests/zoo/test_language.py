"""NextByte: the loss of bytes, and the sample shown at the end."""

import math

import pytest
import torch
from torch import nn

from mgpu.zoo import GPT, NextByte
from mgpu.zoo.language import printable


class Parrot(nn.Module):
    """Continues any prompt by the bytes it was given, and notes how it was asked."""

    def __init__(self, says):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.says = torch.tensor([list(says)])
        self.asked = None

    def generate(self, prompt, length, temperature):
        self.asked = (bytes(prompt[0].tolist()), length, temperature)
        return torch.cat([prompt, self.says], dim=1)


def test_the_loss_is_summed_over_bytes():
    class Uniform(nn.Module):
        def forward(self, tokens):
            return torch.zeros(*tokens.shape, 256)

    batch = torch.zeros(3, 5, dtype=torch.int64), torch.ones(3, 5, dtype=torch.int64)
    total, units = NextByte().loss(Uniform(), batch)
    assert int(units) == 15
    assert float(total) == pytest.approx(15 * math.log(256), rel=1e-6)
    total, units, predictions, targets = NextByte().evaluate(Uniform(), batch)
    assert float(total) == pytest.approx(15 * math.log(256), rel=1e-6)
    assert int(units) == 15
    assert len(predictions) == len(targets) == 15


def test_the_closing_text_is_the_prompt_continued():
    parrot = Parrot(b"main():\n    pass")
    assert NextByte(prompt="def ", length=15, temperature=0.5).closing(parrot) == "def main():\n    pass"
    assert parrot.asked == (b"def ", 15, 0.5)


def test_the_closing_text_can_be_shown_anywhere():
    assert NextByte().closing(Parrot(b"\x1b[31m\x00\r\t\xff\n\xc3\xa9")) == "def [31m\ufffd\n\u00e9"


def test_closing_twice_says_the_same_and_leaves_the_model_training():
    torch.manual_seed(0)
    model, task = GPT(layers=1, width=16, context=8, dropout=0.5).train(), NextByte(length=20)
    first = task.closing(model)
    torch.manual_seed(1)
    assert first.startswith("def ")
    assert task.closing(model) == first
    assert model.training


def test_a_model_that_cannot_generate_closes_without_text():
    assert NextByte().closing(nn.Linear(1, 1)) is None


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        NextByte(prompt="")


def test_printable_keeps_lines():
    assert printable(b"a\n\tb\x7f\n") == "a\nb\n"
