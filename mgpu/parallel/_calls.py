"""A task's one call of its model, taken apart: what it is called with, and what is made of its output."""

from __future__ import annotations

import copy
import functools
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu.errors import TaskError
from mgpu.parallel.base import Context, MicroBatch, Task

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """The arguments that a task calls its model with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @functools.cached_property
    def key(self) -> Any:
        """What the shapes of a pass depend on."""
        from torch import Tensor
        from torch.utils._pytree import tree_flatten

        leaves, structure = tree_flatten((self.args, self.kwargs))
        return str(structure), tuple(
            (tuple(leaf.shape), leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
            if isinstance(leaf, bool | int | str)
            else type(leaf).__name__
            for leaf in leaves
        )


class _Asked(BaseException):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class _StandIn:
    """Looks like the model to the task, which may read its attributes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Asks(_StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Asked(Call(args, kwargs))


_WAYS_IN = {
    "parameters",
    "named_parameters",
    "get_parameter",
    "modules",
    "named_modules",
    "get_submodule",
    "state_dict",
}


class _Answers(_StandIn):
    def __init__(self, model: nn.Module, output: Any) -> None:
        super().__init__(model)
        self._answers = [output]
        self._read: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:
        import torch

        value = super().__getattr__(name)
        if name in _WAYS_IN or isinstance(value, torch.nn.Module | torch.Tensor):
            self._read[name] = None
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._answers:
            raise RuntimeError("the task calls its model twice in one loss: a pipeline passes through its model once")
        return self._answers.pop()


def own_copy(batch: Any) -> Any:
    """A batch that a task may change as it likes: its loss is asked for more than once."""
    from torch import Tensor
    from torch.utils._pytree import tree_map

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.clone()
        return copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf

    return tree_map(copied, batch)


def call_of(task: Task, model: nn.Module, micro_batch: MicroBatch, context: Context) -> Call:
    """What `task` calls the model with for this micro batch."""
    context.reseed(micro_batch.seed)
    try:
        task.loss(_Asks(model), own_copy(micro_batch.batch))  # type: ignore[arg-type]
    except _Asked as asked:
        return asked.call
    raise RuntimeError("the task works out a loss without calling its model: a pipeline cannot run it")


def loss_of(task: Task, model: nn.Module, batch: Any, output: Any) -> tuple[Any, Any]:
    """The loss that `task` makes of the model's `output`."""
    return task.loss(_Answers(model, output), own_copy(batch))  # type: ignore[arg-type]


def loss_at_the_end(task: Task, model: nn.Module, batch: Any, output: Any, splits_backward: bool) -> tuple[Any, Any]:
    """As `loss_of`, on the rank of the last stage, which has but a part of `model`.

    TaskError where it also reads parameters that have no way to it, or from which no gradient has a way back.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    answers = _Answers(model, output)
    try:
        loss_sum, units = task.loss(answers, own_copy(batch))  # type: ignore[arg-type]
        if isinstance(loss_sum, FakeTensor):
            raise RuntimeError("what it reads is on another rank")
        beside = _parameters_beside(loss_sum, output)
    except Exception as error:
        if not answers._read:
            raise
        raise TaskError(
            f"the task's loss fails where it reads {', '.join(answers._read)} of the model, beside calling it: the rank that "
            "works it out has the last stage of the pipeline only",
            hint="return what the loss needs from the model's forward, or use another strategy",
        ) from error
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    if foreign := [parameter for parameter in beside if id(parameter) not in own or splits_backward]:
        names = ", ".join(own.get(id(parameter), f"one of {tuple(parameter.shape)}") for parameter in foreign)
        raise TaskError(
            f"the task's loss reads parameters of the model beside calling it ({names}), whose gradients this pipeline would "
            "lose",
            hint="return what the loss needs from the model's forward, or write schedule: 1f1b for parameters of the last stage",
        )
    return loss_sum, units


class Around:
    """A task in place of another, of which it has all that it does not do in its own way."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)


class PlainLoss(Around):
    """A task of a model whose parameters are but parts between its passes: its loss must come of the output alone."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        from torch.distributed.tensor import DTensor

        loss_sum, units = self.task.loss(model, batch)
        if isinstance(loss_sum, DTensor):
            raise TaskError(
                "the task's loss reads parameters of the model beside calling it, and a rank holds but parts of them",
                hint="return what the loss needs from the model's forward, or use ddp",
            )
        return loss_sum, units


def _parameters_beside(loss: Tensor, output: Any) -> list[Tensor]:
    """The leaves that `loss` depends on by another way than through `output`."""
    from mgpu.parallel._following import tensors_of

    outputs = list(tensors_of(output))
    seen = {value.grad_fn for value in outputs if value.grad_fn is not None}
    given = {id(value) for value in outputs}
    open_ = [loss.grad_fn] if loss.grad_fn is not None and loss.grad_fn not in seen else []
    found = []
    while open_:
        node: Any = open_.pop()
        if hasattr(node, "variable") and id(node.variable) not in given:
            found.append(node.variable)
        following = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= following
        open_ += following
    return found
