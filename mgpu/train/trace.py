"""The first steps of a training in full, for `mgpu verify`: who had which samples, and what came of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mgpu.data.feed import Turn
from mgpu.files import append_line
from mgpu.parallel.base import StepLoss, Trainable

PROJECTIONS = 4
"""Random projections a tensor: they tell how far two tensors are apart without keeping either."""
CHUNK = 1 << 20


class Trace:
    """Writes one line a step to trace/rank-<r>.jsonl.

    `micro`: [index, sample ids, hash of the batch] of each micro batch of this rank; `losses`: what its task said of each,
    [sum, units], in the order it was asked. `gradients` and `parameters`, by name:
    `digest` of what the rank holds after the step (gradients before clipping).
    """

    def __init__(self, folder: Path, rank: int, steps: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank-{rank}.jsonl"
        self._path.unlink(missing_ok=True)
        self.steps = steps
        self._micro: list[tuple[int, list[int], str]] = []
        self._losses: list[list[float]] = []
        self._gradients: dict[str, list[float]] = {}

    def listen(self, task: Any) -> Any:
        """`task`, with every answer of its `loss` noted."""
        answer = task.loss

        def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
            loss_sum, units = answer(model, batch)
            self._losses.append([float(loss_sum.detach()), float(units)])
            return loss_sum, units

        task.loss = loss
        return task

    def watch(self, turn: Turn) -> Iterator[tuple[int, Any]]:
        """The micro batches of `turn`, noted as they pass."""
        self._losses = []  # what a strategy tried before the first step is none of them
        for index, batch in turn.micro_batches:
            self._micro.append((index, turn.samples(index), content(batch)))
            yield index, batch

    def before_step(self, trainable: Trainable, scale: float) -> None:
        """Note the gradient. `scale` is what it is still multiplied by (fp16)."""
        self._gradients = {
            name: [value / scale for value in digest(parameter.grad)]
            for name, parameter in trainable.named_parameters.items()
            if parameter.grad is not None
        }

    def after_step(
        self, step: int, trainable: Trainable, totals: StepLoss, norm: Tensor, optimizer: torch.optim.Optimizer
    ) -> None:
        """Write the line of `step`, with the learning rate of each parameter as the optimizer used it."""
        rates = {id(value): float(group["lr"]) for group in optimizer.param_groups for value in group["params"]}
        line = {
            "step": step,
            "micro": self._micro,
            "losses": self._losses,
            "loss": float(totals.loss_sum / totals.units),
            "units": float(totals.units),
            "grad_norm": float(norm),
            "lr": {name: rates[id(value)] for name, value in trainable.named_parameters.items() if id(value) in rates},
            "gradients": self._gradients,
            "parameters": {name: digest(parameter) for name, parameter in trainable.named_parameters.items()},
        }
        append_line(self._path, line)
        self._micro, self._losses, self._gradients = [], [], {}


def content(batch: Any) -> str:
    """A hash of all tensors of a batch, on the host."""
    found = hashlib.sha256()
    _feed(found, batch)
    return found.hexdigest()[:16]


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(str((value.dtype, tuple(value.shape))).encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            found.update(str(key).encode())
            _feed(found, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(found, item)
    else:
        found.update(repr(value).encode())


def digest(value: Tensor) -> list[float]:
    """The Euclidean norm of a tensor and its products with fixed random +1/-1 vectors, in float64.

    For two tensors of one shape, the root mean square of the differences of their projections estimates the norm of their
    difference (Johnson and Lindenstrauss). Equal bits give equal digests.
    """
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # a DTensor is one tensor to the user
    flat = whole.detach().reshape(-1)
    generator = torch.Generator().manual_seed(flat.numel())
    sums = torch.zeros(1 + PROJECTIONS, dtype=torch.float64)
    for part in flat.split(CHUNK):
        numbers = part.double().cpu()
        signs = torch.randint(0, 2, (PROJECTIONS, numbers.numel()), generator=generator).double() * 2 - 1
        sums[0] += numbers.dot(numbers)
        sums[1:] += signs @ numbers
    sums[0] = sums[0].sqrt()
    return [float(number) for number in sums]
