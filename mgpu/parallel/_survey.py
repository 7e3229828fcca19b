"""What one micro batch costs in each stretch of a model, from one pass without values.

A copy of the model whose tensors have no memory (PyTorch's FakeTensors) runs forward once on an example. The operations of
a part count for its stretch, those between parts for the stretch of the part before. Nothing of it depends on how fast or
how busy a machine is.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from mgpu.parallel._blocks import repeated_blocks
from mgpu.parallel._calls import call_of, loss_of
from mgpu.parallel._cuts import Part
from mgpu.parallel._following import tensors_of
from mgpu.parallel._twin import blank_copy, undrawn
from mgpu.parallel.base import Context, MicroBatch, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

BETWEEN_PARTS = 3
"""Passes of an operation that no part has: forward, and backward to two operands."""


class Unknown(Exception):
    """A cost that cannot be worked out, with the reason."""


@dataclass(frozen=True)
class PartCall:
    """One call of a part, as it was when it was made, with blanks for tensors. `name` is the part's."""

    name: str
    stretch: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Survey:
    """Costs by stretch: `work` in floating-point operations of a forward and backward pass, `activations` in bytes kept
    for the backward pass. `output` is the model's, of blanks; `loss_counted` says whether the loss is in the costs."""

    work: list[int]
    activations: list[int]
    calls: list[PartCall]
    output: Any
    loss_counted: bool


def survey(model: nn.Module, parts: Sequence[Part], task: Task, batch: Any, context: Context) -> Survey:
    """Run a copy of `model` on `batch` without values. Unknown where the model needs values, or its code fails so."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    blank = FakeTensorMode(allow_non_fake_inputs=True)
    with undrawn():
        try:
            call = call_of(task, model, MicroBatch(0, batch), context)
            twin = blank_copy(model, blank, context.device).train()
            meter = _Meter(twin, parts, context)
            with blank, torch.enable_grad(), context.autocast(), meter.counting():
                args, kwargs = tree_map_only(torch.Tensor, blank.from_tensor, (call.args, call.kwargs))
                output = twin(*args, **kwargs)
                loss_counted = _pass_loss(task, model, tree_map_only(torch.Tensor, blank.from_tensor, batch), output)
        except Exception as error:
            raise Unknown(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    return Survey(meter.work, meter.activations, meter.calls, output, loss_counted)


def _pass_loss(task: Task, model: nn.Module, batch: Any, output: Any) -> bool:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        loss_of(task, model, batch, output)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return False
    return True


class _Meter:
    """Follows a pass: which stretch is at work, what it computes and what it keeps."""

    def __init__(self, twin: nn.Module, parts: Sequence[Part], context: Context) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        self.twin, self.parts = twin, parts
        count = 1 + max(part.stage for part in parts)
        self.work, self.activations = [0] * count, [0] * count
        self.calls: list[PartCall] = []
        self.counter = FlopCounterMode(display=False, custom_mapping=_formulas())
        self.counted = 0
        self.stretch = 0
        self.recomputed = _recomputed(twin) if context.activation_checkpointing == "full" else ()
        self.keeps = True
        self.known = {value.untyped_storage()._cdata for value in (*twin.parameters(), *twin.buffers())}
        self.kept: dict[tuple[int, int], Any] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        from torch.autograd.graph import saved_tensors_hooks

        handles = [handle for part in self.parts for handle in self._watch(part)]
        try:
            with self.counter, saved_tensors_hooks(self._keep, lambda value: value):
                yield
                self._settle(BETWEEN_PARTS)
        finally:
            for handle in handles:
                handle.remove()
            self.kept.clear()

    def _watch(self, part: Part) -> tuple[Any, Any]:
        module = self.twin.get_submodule(part.name)
        again = any(not name or f"{part.name}.".startswith(f"{name}.") for name in self.recomputed)
        passes = [0]

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._settle(BETWEEN_PARTS)
            self.stretch = part.stage
            self.calls.append(PartCall(part.name, part.stage, *copied((args, kwargs), lambda value: value)))
            given = tensors_of((args, kwargs))
            trains = any(parameter.requires_grad for parameter in module.parameters())
            passes[0] = 1 + trains + any(value.requires_grad for value in given) + again
            if again:
                for value in given:
                    self._keep(value)
                self.keeps = False

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._settle(passes[0])
            self.keeps = True

        return module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)

    def _settle(self, passes: int) -> None:
        """Count what was computed since the last time, as often as a step computes it."""
        total = self.counter.get_total_flops()
        self.work[self.stretch] += (total - self.counted) * passes
        self.counted = total

    def _keep(self, value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        key = self.stretch, storage._cdata
        if self.keeps and storage._cdata not in self.known and key not in self.kept:
            self.kept[key] = storage  # held, so that its address stays its own
            self.activations[self.stretch] += storage.nbytes()
        return value


def copied(tree: Any, copy_of: Callable[[Tensor], Tensor]) -> Any:
    """A deep copy of arguments, `copy_of` of each tensor in it: also of those in objects, as a cache of keys and values."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Copying(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.__deepcopy__:
                return copy_of(args[0])
            return function(*args, **(kwargs or {}))

    memo: dict[int, Any] = {id(value): copy_of(value) for value in tensors_of(tree)}
    with Copying():
        return copy.deepcopy(tree, memo)


def _recomputed(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that activation checkpointing runs a second time; the empty one is the model."""
    return tuple(repeated_blocks(model)) or ("",)


def _formulas() -> dict[Any, Any]:
    """Operations that PyTorch's counter does not know: attention on CPUs, and recurrent layers in one piece."""
    import torch
    from torch.utils.flop_counter import sdpa_flop_count

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def recurrent(given: Any, weights: Any) -> int:
        """Two operations for each weight of a matrix and each element of the sequences."""
        return 2 * int(prod(given[:-1])) * sum(int(prod(shape)) for shape in weights if len(shape) == 2)

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten.mkldnn_rnn_layer: lambda given, first, second, *_, **__: recurrent(given, (first, second)),
        aten._cudnn_rnn: lambda given, weights, *_, **__: recurrent(given, weights),
        aten.miopen_rnn: lambda given, weights, *_, **__: recurrent(given, weights),
    }
