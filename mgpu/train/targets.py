"""Building the objects that a spec names."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from mgpu.errors import MgpuError, Refusal, suggest
from mgpu.spec import Target, resolve_secrets


class TargetError(Refusal):
    """A target that cannot be found, imported or called; `key` is its place in the spec."""

    def __init__(self, key: tuple[str | int, ...], message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


def find(target: str, key: tuple[str | int, ...] = ()) -> Any:
    """The object that `module:attribute` or `file.py:attribute` names; TargetError where there is none."""
    place, _, attribute = target.rpartition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError as error:
        raise TargetError(key, f"{target}: no file {place}", "paths are relative to the spec") from error
    except ModuleNotFoundError as error:
        raise TargetError(key, f"{target}: no module named {error.name!r}", "check the name, or install it") from error
    except MgpuError:
        raise
    except Exception as error:  # user code may raise anything while it is imported
        raise TargetError(key, f"{target}: importing it raised {type(error).__name__}: {error}") from error
    found = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            public = [word for word in dir(found) if not word.startswith("_")]
            near = suggest(name, public)
            raise TargetError(key, f"{target}: {place} has no {name!r}", near if near.startswith("did") else "")
        found = getattr(found, name)
    return found


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(path)
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(path.stem)
    if Path(str(module.__file__)).resolve() != path.resolve():
        raise ImportError(f"{path.name} has the name of another module, {module.__file__}: rename it")
    return module


def check(target: Target, key: tuple[str | int, ...], given: int = 0) -> None:
    """Find `target` and see that it takes its arguments, without calling it. `given` are positional ones we add."""
    found = find(target.target, (*key, "target"))
    for name, value in target.args.items():
        if _is_target(value):
            check(Target(**value), (*key, "args", name))
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some built-in callables do not tell theirs
        return
    takes = [p.name for p in signature.parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    extra: list[str] = []
    for name in target.args:
        if name in takes or takes_any:
            continue
        if _keeps_more(found) and not difflib.get_close_matches(name, takes, 1, _A_SLIP):
            extra.append(name)
            continue
        raise TargetError((*key, "args", name), f"{target.target} takes no argument {name!r}", suggest(name, takes))
    try:
        signature.bind(*(object(),) * given, **{name: None for name in target.args if name not in extra})
    except TypeError as error:
        raise TargetError((*key, "args"), f"{target.target}: {error}", f"it takes {signature}") from error


_A_SLIP = 0.85
"""How near to a known name an unknown one is taken for a slip of the pen, where others are allowed."""


def _keeps_more(found: Any) -> bool:
    """Whether a dataclass keeps what it has no field for, as the configs of transformers do: its constructor is wrapped
    in one that takes any name, which its signature does not show."""
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        return False
    wrapped = inspect.signature(found.__init__, follow_wrapped=False)
    return any(p.kind is p.VAR_KEYWORD for p in wrapped.parameters.values())


def build(target: Target, *given: Any, key: tuple[str | int, ...] = ()) -> Any:
    """Call what `target` names with its args (nested targets are built first); `given` come before them."""
    arguments = {name: _value(value, (*key, "args", name)) for name, value in target.args.items()}
    return find(target.target, (*key, "target"))(*given, **arguments)


def _value(value: Any, key: tuple[str | int, ...]) -> Any:
    if _is_target(value):
        return build(Target(**value), key=key)
    if isinstance(value, list):
        return [_value(item, (*key, index)) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: _value(item, (*key, name)) for name, item in value.items()}
    return resolve_secrets(value, os.environ)


def _is_target(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("target"), str) and set(value) <= {"target", "args"}
