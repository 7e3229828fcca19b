"""How a batch becomes a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn


class Supervised:
    """Batches of (input, target); `loss` is a torch loss module.

    An input that is a mapping is given to the model by name. Of a model that returns several things, as those of the
    transformers library do, `logits` is what is compared.

    unit `sample`: the loss of each sample (its mean over further dimensions), summed over the batch. unit `token`:
    outputs (B, T, C) against targets (B, T), summed over the targets that are not `ignore_index`.
    """

    def __init__(self, loss: nn.Module, unit: Literal["sample", "token"] = "sample") -> None:
        if unit not in ("sample", "token"):
            raise ValueError(f"unit {unit!r}: must be sample or token")
        if isinstance(loss, str):
            raise TypeError(f"loss is the text {loss!r}; in args an object is written {{target: {loss}}}")
        if not hasattr(loss, "reduction"):
            raise TypeError(f"{type(loss).__name__} has no `reduction`: write a task of your own")
        loss.__dict__["reduction"] = "sum" if unit == "token" else "none"
        self.criterion = loss
        self.unit = unit

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        """The sum of the losses, and the number of units."""
        total, units, _, _ = self._compare(model, batch)
        return total, units

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Tensor, Tensor]:
        """The sum of the losses, the number of units, and what metrics compare: predictions and targets."""
        return self._compare(model, batch)

    def _compare(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Tensor, Tensor]:
        inputs, targets = batch
        outputs = _logits(model(**inputs) if isinstance(inputs, Mapping) else model(inputs))
        if self.unit == "token":
            outputs, targets = outputs.flatten(0, 1), targets.flatten()
            counted = targets != getattr(self.criterion, "ignore_index", -100)
            return self.criterion(outputs, targets), counted.sum(), outputs, targets
        losses = self.criterion(outputs, targets)
        return losses.reshape(len(losses), -1).mean(1).sum(), len(losses), outputs, targets


def _logits(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        if "logits" not in outputs:
            raise TypeError(f"the model returns {', '.join(map(str, outputs))} and no logits: write a task of your own")
        return outputs["logits"]
    return getattr(outputs, "logits", outputs)
