"""Following the values of a forward pass through the code between a model's parts, by a `TorchFunctionMode`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mgpu.parallel._routes import Value

if TYPE_CHECKING:
    from torch import Tensor, nn


class Following:
    """Tells `handle` of each operation in the code between parts that takes a marked value; inside parts it is away."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        from torch.overrides import TorchFunctionMode

        self.marks: Any = {}
        self.clear()
        self.inside = 0
        following = self

        class Mode(TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if (
                    not following.inside
                    and not asks_for_shape(function)
                    and (values := following.values_in((args, kwargs)))
                ):
                    return handle(function, args, kwargs, values)
                return function(*args, **kwargs)

        self.mode: Any = Mode()

    def __enter__(self) -> None:
        self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """For operations that are none of the model's."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Inside a part: nothing is followed there."""
        from torch.overrides import _pop_mode_temporarily

        with self.unseen(), _pop_mode_temporarily():
            yield

    def values_in(self, tree: Any) -> list[Value]:
        """The marked values among the tensors of `tree`."""
        return [self.marks[leaf] for leaf in tensors_of(tree) if leaf in self.marks]

    def clear(self) -> None:
        """Forget all marks."""
        from torch.utils.weak import WeakTensorKeyDictionary

        self.marks = WeakTensorKeyDictionary()

    def mark(self, number: int, output: Any) -> None:
        for place, tensor in enumerate(tensors_of(output)):
            self.marks[tensor] = (number, place)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested arguments, in PyTorch's order; the usual containers without its slower general walk."""
    import torch
    from torch.utils._pytree import tree_leaves

    if isinstance(tree, torch.Tensor):
        return [tree]
    kind = type(tree)
    if kind is tuple or kind is list:
        return [tensor for item in tree for tensor in tensors_of(item)]
    if kind is dict:
        return [tensor for item in tree.values() for tensor in tensors_of(item)]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] if kind not in _PLAIN else []


_PLAIN = (type(None), bool, int, float, str)


def replaced(tree: Any, new_of: Callable[[Tensor], Tensor]) -> Any:
    """`tree` with `new_of` each tensor in it; itself where that changes none."""
    import torch
    from torch.utils._pytree import tree_map_only

    tensors = tensors_of(tree)
    new = {id(tensor): new_of(tensor) for tensor in tensors}
    if all(new[id(tensor)] is tensor for tensor in tensors):
        return tree
    return tree_map_only(torch.Tensor, lambda tensor: new[id(tensor)], tree)


def answer_calls(module: nn.Module, answer: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Have `answer(original)` take the calls of a module, with its hooks inside, and of its forward; returns how to undo it.

    Hooks must not see blanks, and FSDP's are such; `_call_impl` is where `nn.Module.__call__` begins with them.
    """
    called = "_call_impl" in vars(module), module._call_impl
    forward = "forward" in vars(module), module.forward
    module.__dict__["_call_impl"] = answer(called[1])
    module.__dict__["forward"] = answer(forward[1])

    def undo() -> None:
        for name, (own, original) in {"_call_impl": called, "forward": forward}.items():
            if own:
                module.__dict__[name] = original
            else:
                del module.__dict__[name]

    return undo


def asks_for_shape(function: Any) -> bool:
    """Whether an operation asks for what a blank knows too; those do not count, and models ask more or less often."""
    return function in _shape_askers()


@functools.cache
def _shape_askers() -> frozenset[Any]:
    from torch import Tensor, is_complex, is_floating_point, numel

    makers = {"T", "mT", "H", "mH", "data", "grad", "real", "imag"}
    getters = [
        value.__get__
        for kind in Tensor.__mro__[:2]
        for name, value in vars(kind).items()
        if type(value).__name__ in ("getset_descriptor", "property") and name not in makers
    ]
    names = (
        "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "__len__",
        "is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "dim_order",
    )  # fmt: skip
    return frozenset([*getters, *(getattr(Tensor, name) for name in names), is_complex, is_floating_point, numel])


def changes_first(function: Any, output: Any, args: Any) -> bool:
    """Whether an operation was one in place."""
    import torch

    return bool(args) and (function is torch.Tensor.__setitem__ or output is args[0])
