"""YAML 1.2 core schema on PyYAML's composer, with the place of every key kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mgpu.errors import Problem, SpecError

Key = tuple[str | int, ...]
NODE_LIMIT = 100_000

_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULL = {"", "~", "null", "Null", "NULL"}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Mark:
    """Where something was written; line and column count from 1."""

    file: str
    line: int
    column: int


@dataclass
class Document:
    """Plain data, where each key of it stands, and the problems found on the way."""

    data: Any = None
    marks: dict[Key, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def scalar(text: str) -> Any:
    """A plain scalar by YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema).

    >>> [scalar(t) for t in ("1e-4", "12:30", "yes", "0x1F", "~")]
    [0.0001, '12:30', 'yes', 31, None]
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _SPECIAL.fullmatch(text):
        return float(f"{match[1] or ''}inf") if match[2] else float("nan")
    return text


class _Loader(yaml.SafeLoader):
    """Resolves nothing: plain scalars are read by `scalar`."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the base class wants this name and kind


Substitute = Callable[[str, bool, Key, Mark], Any]


def read(path: Path, shown: str, substitute: Substitute) -> Document:
    """The document in `path`. `substitute(text, plain, key, mark)` turns a scalar's text into its value."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError([Problem((), "no such file", file=shown)]) from None
    except IsADirectoryError:
        raise SpecError([Problem((), "is a folder, not a spec", file=shown)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem((), f"cannot be read: {error}", file=shown)]) from None
    return parse(text, shown, substitute)


def parse(text: str, shown: str, substitute: Substitute) -> Document:
    """The one document in `text`; problems carry the name `shown`."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in message:
            message = "a tab: indent with blanks"
        line, column = (at.line + 1, at.column + 1) if at else (1, 1)
        raise SpecError([Problem((), message, file=shown, line=line, column=column)]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError([Problem((), f"not YAML: {error}", file=shown, line=1, column=1)]) from None
    document = Document()
    if root is None:
        document.problems.append(Problem((), "is empty", file=shown))
        return document
    document.data = _Construction(document, shown, substitute).value(root, ())
    return document


class _Construction:
    """Walks the nodes of one document."""

    def __init__(self, document: Document, shown: str, substitute: Substitute) -> None:
        self.document = document
        self.shown = shown
        self.substitute = substitute
        self.open: list[int] = []
        self.count = 0

    def mark(self, node: yaml.Node) -> Mark:
        return Mark(self.shown, node.start_mark.line + 1, node.start_mark.column + 1)

    def fault(self, key: Key, node: yaml.Node, message: str) -> None:
        at = self.mark(node)
        self.document.problems.append(Problem(key, message, file=at.file, line=at.line, column=at.column))

    def value(self, node: yaml.Node, key: Key) -> Any:
        self.count += 1
        if self.count > NODE_LIMIT:
            raise SpecError(
                [Problem(key, f"more than {NODE_LIMIT} values after aliases are followed", file=self.shown)]
            )
        if id(node) in self.open:
            self.fault(key, node, "an alias that holds itself")
            return None
        self.document.marks.setdefault(key, self.mark(node))
        self.open.append(id(node))
        try:
            if not isinstance(node, yaml.ScalarNode) and node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
                self.fault(key, node, f"the tag {node.tag} is not allowed")
                return None
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, key)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*key, index)) for index, item in enumerate(node.value)]
            return self.scalar(node, key)
        finally:
            self.open.pop()

    def scalar(self, node: yaml.Node, key: Key) -> Any:
        name = node.tag.removeprefix(_TAG)
        if node.tag.startswith(_TAG) and name in ("str", "int", "float", "bool", "null"):
            plain = node.style is None and name == "str" and node.start_mark.buffer is not None  # type: ignore[attr-defined]
            explicit = node.start_mark.buffer[node.start_mark.pointer] == "!" if node.start_mark.buffer else False
            return self.substitute(node.value, plain and not explicit, key, self.mark(node))
        self.fault(key, node, f"the tag {node.tag} is not allowed")
        return None

    def mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for name_node, value_node in node.value:
            name = name_node.value
            if isinstance(name_node, yaml.ScalarNode) and name == "<<" and name_node.style is None:
                parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for part in reversed(parts):
                    value = self.value(part, key)
                    merged.update(value if isinstance(value, dict) else {})
                continue
            if not isinstance(name_node, yaml.ScalarNode) or (
                name_node.style is None and not isinstance(scalar(name), str)
            ):
                self.fault(key, name_node, "keys are texts")
                continue
            at = self.mark(name_node)
            if name in lines:
                self.fault((*key, name), name_node, f"is there twice, on lines {lines[name]} and {at.line}")
            lines[name] = at.line
            self.document.marks[(*key, name)] = at
            own[name] = self.value(value_node, (*key, name))
        return {**merged, **own}
