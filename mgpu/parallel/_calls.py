"""A task's one call of its model, taken apart: what it is called with, and what is made of its output."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu.parallel.base import Context, MicroBatch, Task

if TYPE_CHECKING:
    from torch import nn


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


class _Answers(_StandIn):
    def __init__(self, model: nn.Module, output: Any) -> None:
        super().__init__(model)
        self._answers = [output]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._answers:
            raise RuntimeError("the task calls its model twice in one loss: a pipeline passes through its model once")
        return self._answers.pop()


def call_of(task: Task, model: nn.Module, micro_batch: MicroBatch, context: Context) -> Call:
    """What `task` calls the model with for this micro batch."""
    context.reseed(micro_batch.seed)
    try:
        task.loss(_Asks(model), micro_batch.batch)  # type: ignore[arg-type]
    except _Asked as asked:
        return asked.call
    raise RuntimeError("the task works out a loss without calling its model: a pipeline cannot run it")


def loss_of(task: Task, model: nn.Module, batch: Any, output: Any) -> tuple[Any, Any]:
    """The loss that `task` makes of the model's `output`."""
    return task.loss(_Answers(model, output), batch)  # type: ignore[arg-type]
