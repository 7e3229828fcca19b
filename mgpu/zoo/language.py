"""Learning to continue text, byte by byte."""

from __future__ import annotations

import torch
from torch import nn

from mgpu.train.task import Supervised


class NextByte(Supervised):
    """Cross-entropy a byte; when a run completes, a sample of what the model writes after `prompt`.

    The sample is `length` bytes drawn at `temperature`, by models that can `generate` (`mgpu.zoo:GPT`).
    """

    def __init__(self, prompt: str = "def ", length: int = 200, temperature: float = 0.8) -> None:
        super().__init__(loss=nn.CrossEntropyLoss(), unit="token")
        if not prompt:
            raise ValueError("prompt is empty: the model needs a byte to continue")
        self.prompt = prompt
        self.length = length
        self.temperature = temperature

    def closing(self, model: nn.Module) -> str | None:
        """The prompt and its continuation, the same for the same weights; None where the model cannot `generate`."""
        generate = getattr(model, "generate", None)
        if generate is None:
            return None
        device = next(model.parameters()).device
        prompt = torch.tensor([list(self.prompt.encode())], device=device)
        return printable(bytes(generate(prompt, self.length, self.temperature)[0].tolist()))


def printable(text: bytes) -> str:
    """`text` as UTF-8 that is safe to show: broken characters replaced, control characters other than newline gone."""
    return "".join(mark for mark in text.decode(errors="replace") if mark.isprintable() or mark == "\n")
