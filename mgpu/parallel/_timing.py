"""How long each stretch of a model takes on a device: every part alone, forward and backward, on made-up inputs of the shapes
that a survey has found. Only one part at a time is on the device, so the model need not fit it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mgpu.parallel._calls import loss_of
from mgpu.parallel._cuts import Part
from mgpu.parallel._survey import Survey, Unknown, copied
from mgpu.parallel._twin import undrawn
from mgpu.parallel.base import Context, Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

REPEATS = 5
"""The shortest of so many passes counts: what else a machine does only makes one longer."""


def seconds_of(
    model: nn.Module, parts: Sequence[Part], survey: Survey, task: Task, batch: Any, context: Context
) -> list[float]:
    """Seconds of each stretch for one micro batch; Unknown where a part fails on made-up inputs.

    Parts that are alike and called alike are timed once. The loss belongs to the last stretch.
    """
    modules = {part.name: part.module for part in parts}
    seconds, known = [0.0] * len(survey.work), dict[Any, float]()
    with undrawn():
        try:
            for call in survey.calls:
                module = modules[call.name]
                key = _kind(module), _shapes((call.args, call.kwargs))
                if key not in known:
                    known[key] = _time_part(module, call.args, call.kwargs, context)
                seconds[call.stretch] += known[key]
            seconds[-1] += _time_loss(model, task, batch, survey.output, context)
        except Exception as error:
            raise Unknown(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    return seconds


def _kind(module: nn.Module) -> Any:
    """Alike for modules that take equally long: written out the same, with the same tensors."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return type(module), repr(module), tuple((name, value.shape, value.dtype) for name, value in tensors)


def _shapes(tree: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_flatten

    leaves, structure = tree_flatten(tree)
    return str(structure), tuple(
        (value.shape, value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else repr(value)
        for value in leaves
    )


def _time_part(module: nn.Module, args: Any, kwargs: Any, context: Context) -> float:
    module = copy.deepcopy(module).to(context.device).train()

    def run(given: Any) -> None:
        with context.autocast():
            output = module(*given[0], **given[1])
        _backward(output)

    return _shortest(run, (args, kwargs), context)


def _time_loss(model: nn.Module, task: Task, batch: Any, output: Any, context: Context) -> float:
    def run(given: Any) -> None:
        with context.autocast():
            loss_sum, _ = loss_of(task, model, batch, given)
        _backward(loss_sum)

    return _shortest(run, output, context)


def _backward(output: Any) -> None:
    import torch

    from mgpu.parallel._following import tensors_of

    ends = [value for value in tensors_of(output) if value.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(value) for value in ends])


def _made_up(tree: Any, device: torch.device) -> Any:
    """`tree` with values in the place of blanks: normal ones, or zeros where they may be indices, or true."""
    import torch

    def value_of(blank: Tensor) -> Tensor:
        value = torch.empty(blank.shape, dtype=blank.dtype, device=device)
        if blank.dtype == torch.bool:
            return value.fill_(True)
        if not (blank.is_floating_point() or blank.is_complex()):
            return value.zero_()
        value.normal_().requires_grad_(blank.requires_grad)
        return value.clone()  # no leaf: a part may change it in place

    return copied(tree, value_of)


def _shortest(run: Callable[[Any], None], blanks: Any, context: Context) -> float:
    """The least time that `run` takes for values in the place of blanks; the first, which finds kernels and memory, is none."""
    return min([_seconds(run, _made_up(blanks, context.device), context) for _ in range(1 + REPEATS)][1:])


def _seconds(run: Callable[[Any], None], given: Any, context: Context) -> float:
    import torch

    def wait() -> None:
        if context.device.type != "cpu":
            torch.accelerator.synchronize(context.device)

    wait()
    begin = time.perf_counter()
    run(given)
    wait()
    return time.perf_counter() - begin
