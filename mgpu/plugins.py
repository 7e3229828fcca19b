"""Finding what a spec names: the file name is the plugin name, so adding a plugin is adding one file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import TypeVar

from mgpu.errors import Refusal, UnknownName

T = TypeVar("T")


def plugin_names(package: str) -> list[str]:
    """The built-in names, sorted: the modules of `package` but `base` and those with a leading underscore.

    Lists files and imports none of them.
    """
    folder = importlib.import_module(package)
    found = (module.name for module in pkgutil.iter_modules(folder.__path__))
    return sorted(name for name in found if name != "base" and not name.startswith("_"))


def find_plugin(kind: str, name: str, package: str, base: type[T]) -> type[T]:
    """The subclass of `base` that `name` stands for.

    `package.module:Class` is imported as written; another name is a file of `package`, or else an entry point of the
    group called `package`. Raises UnknownName, or Refusal for a plugin that is there but cannot be used; `kind`
    (`strategy`, `logger`, ...) is the word the error uses.
    """
    if ":" in name:
        return _load(kind, name, base)
    built_in = plugin_names(package)
    if name in built_in:
        return _only_public_subclass(importlib.import_module(f"{package}.{name}"), base)
    # Reading the metadata of every installed distribution takes 0.1 s and more: only once the built-in names missed.
    from importlib.metadata import entry_points

    installed = {point.name: point.value for point in entry_points(group=package)}
    if name in installed:
        return _load(kind, installed[name], base)
    raise UnknownName(kind, name, [*built_in, *installed])


def _load(kind: str, target: str, base: type[T]) -> type[T]:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise Refusal(f"{kind} {target!r}: write package.module:Class")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        raise Refusal(f"{kind} {target!r} cannot be imported: {error}") from error
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise Refusal(f"{kind} {target!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise Refusal(f"{kind} {target!r} is not a subclass of {base.__module__}.{base.__qualname__}")
    return found


def _only_public_subclass(module: ModuleType, base: type[T]) -> type[T]:
    found = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, base)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__name__} defines {len(found)} public subclasses of {base.__name__}: must be one")
    return found[0]
