"""From a spec's file to a `RunSpec`: extends, substitution, --set, validation, and every problem at once."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from mgpu.errors import Problem, SpecError, suggest
from mgpu.spec import reader
from mgpu.spec.models import RunSpec
from mgpu.spec.reader import Document, Key, Mark

_REFERENCE = re.compile(r"\$(?:(\$)|\{(?:(\w+):(?!-))?([A-Za-z_]\w*)(?::-([^}]*))?\})")
_TOLD_KEY = re.compile(r"([a-z_]+(?:\.[a-z_]+)*): (.*)", re.DOTALL)
_SECRET = re.compile(r"\$\{secret:([A-Za-z_]\w*)\}")
_ELSEWHERE = {
    "optimiser": "write optimizer",
    "lr": "write optimizer.args.lr",
    "learning_rate": "write optimizer.args.lr",
    "epochs": "write duration: N epochs",
    "max_epochs": "write duration: N epochs",
    "max_steps": "write duration: N steps",
    "steps": "write duration: N steps",
    "batch_size": "write batch.size",
    "num_workers": "write data.workers",
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_acumulation_steps", "accumulate_grad_batches", "grad_accum"),
        "accumulation is derived: write batch.micro",
    ),
}


@dataclass(frozen=True)
class LoadedSpec:
    """A valid spec, the plain data it was read from, and where each key of it was written."""

    spec: RunSpec
    document: dict[str, Any]
    marks: Mapping[Key, Mark] = field(default_factory=dict)
    file: str = ""
    root: Path = Path()

    def problem(self, key: Key, message: str, hint: str = "") -> Problem:
        """A problem at the place of `key`, or of its nearest parent that was written."""
        return _problem(self.marks, self.file, key, message, hint)

    def dump(self) -> str:
        """The document as YAML that reads back to the same document."""
        return json.dumps(_escape(self.document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def load_spec(path: Path | str, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> LoadedSpec:
    """Read and check a spec; SpecError with all problems at once."""
    shown, path = str(path), Path(path)
    document = _read_with_bases(path, shown, environ, ())
    if not isinstance(document.data, dict):
        at = document.marks.get((), Mark(shown, 1, 1))
        raise SpecError(
            [
                *document.problems,
                Problem((), "a spec is a mapping of keys", file=at.file, line=at.line, column=at.column),
            ][:1]
        )
    for text in overrides:
        _override(document, text, environ)
    data = {key: value for key, value in document.data.items() if not key.startswith("x-") and value is not None}
    data.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "run")
    known = {problem.key for problem in document.problems}
    found = _model_problems(data, document.marks, shown)
    problems = [*document.problems, *(problem for problem in found if problem.key not in known)]
    if not problems:
        spec = RunSpec.model_validate(data)
        loaded = LoadedSpec(spec, data, document.marks, shown, path.parent)
        problems = _optimizer_problems(loaded)
        if not problems:
            return loaded
    raise SpecError(sorted(dict.fromkeys(problems), key=lambda p: (p.file, p.line, p.column)))


def parse_value(text: str) -> Any:
    """One value as `--set` reads it."""
    document = reader.parse(text, "--set", lambda value, plain, _key, _mark: reader.scalar(value) if plain else value)
    return document.data


def resolve_secrets(value: Any, environ: Mapping[str, str]) -> Any:
    """Replace `${secret:NAME}` in nested plain data by the variable's value."""
    if isinstance(value, str):
        return _SECRET.sub(lambda match: environ[match[1]], value)
    if isinstance(value, list):
        return [resolve_secrets(item, environ) for item in value]
    if isinstance(value, dict):
        return {key: resolve_secrets(item, environ) for key, item in value.items()}
    return value


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a spec, for editors."""
    schema = RunSpec.model_json_schema()
    properties = schema["properties"]
    properties["extends"] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    target = {"anyOf": [{"$ref": "#/$defs/Target"}, {"type": "string"}]}
    for holder in (properties, schema["$defs"]["Data"]["properties"]):
        for name, value in holder.items():
            if value.get("$ref") == "#/$defs/Target" or {"$ref": "#/$defs/Target"} in value.get("anyOf", ()):
                holder[name] = {**{k: v for k, v in value.items() if k == "description"}, **target}
    properties["metrics"]["additionalProperties"] = target
    for name in ("loggers",):
        properties[name] = {
            "type": "array",
            "items": {"type": "string"},
            "description": properties[name].get("description", ""),
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "mgpu spec",
        "patternProperties": {"^x-": {}},
    }


def _read_with_bases(path: Path, shown: str, environ: Mapping[str, str], above: tuple[Path, ...]) -> Document:
    if path.resolve() in above:
        raise SpecError([Problem(("extends",), "the files extend each other in a circle", file=shown)])
    problems: list[Problem] = []

    def substitute(text: str, plain: bool, key: Key, mark: Mark) -> Any:
        value, fault = _substituted(text, plain, environ)
        if fault:
            problems.append(Problem(key, fault, file=mark.file, line=mark.line, column=mark.column))
        return _absolute(value, key, path.parent)

    document = reader.read(path, shown, substitute)
    document.problems += problems
    if not isinstance(document.data, dict) or "extends" not in document.data:
        return document
    bases = document.data.pop("extends")
    merged = Document()
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            document.problems.append(_problem(document.marks, shown, ("extends",), f"{base!r} is not a path"))
            continue
        base_path = path.parent / base
        _merge(merged, _read_with_bases(base_path, os.path.relpath(base_path), environ, (*above, path.resolve())))
    _merge(merged, document)
    return merged


def _merge(below: Document, above: Document) -> None:
    below.problems += above.problems
    below.marks.update(above.marks)
    below.data = above.data if below.data is None else _merged(below.data, above.data)


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if "target" in above and above["target"] != below.get("target"):
        return above
    result = dict(below)
    for key, value in above.items():
        result[key] = _merged(below[key], value) if key in below else value
    return {key: value for key, value in result.items() if value is not None or key not in below}


def _absolute(value: Any, key: Key, folder: Path) -> Any:
    """`file.py:attribute`, script.path and an init_from that is a path count from the folder of the file that wrote them."""
    if not isinstance(value, str):
        return value
    place, colon, attribute = value.rpartition(":")
    if colon and place.endswith(".py") and attribute.isidentifier():
        return f"{(folder / place).resolve()}:{attribute}"
    if key == ("init_from",):
        return str((folder / value).resolve()) if (folder / value).exists() else value
    return str((folder / value).resolve()) if key == ("script", "path") else value


def _substituted(text: str, plain: bool, environ: Mapping[str, str]) -> tuple[Any, str]:
    """The value of a scalar's text, and what is wrong with it."""
    faults: list[str] = []

    def replace(match: re.Match[str]) -> str:
        dollar, kind, name, default = match.groups()
        if dollar:
            return "$"
        if kind not in (None, "env", "secret"):
            faults.append(f"${{{kind}:…}}: only env and secret are known")
        elif name not in environ and (default is None or kind == "secret"):
            faults.append(f"the environment variable {name} is not set; write $${{… for a plain dollar")
        elif kind == "secret":
            return match[0]
        else:
            return environ.get(name, default or "")
        return match[0]

    value = _REFERENCE.sub(replace, text)
    return (reader.scalar(value) if plain else value), "; ".join(faults)


def _escape(value: Any) -> Any:
    """A literal `$` doubled where it would be read as a reference; secrets stay references."""
    if isinstance(value, str):
        return "".join(
            part if _SECRET.fullmatch(part) else part.replace("$", "$$")
            for part in re.split(r"(\$\{secret:\w+\})", value)
        )
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return {key: _escape(item) for key, item in value.items()} if isinstance(value, dict) else value


def _override(document: Document, text: str, environ: Mapping[str, str]) -> None:
    path, equals, written = text.partition("=")
    where = f"--set {path}"
    if not equals or not path:
        document.problems.append(Problem((), f"{text!r}: write --set key.path=value", file="--set"))
        return
    key: Key = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    inner = reader.parse(
        written, where, lambda t, plain, _k, _m: _absolute(_substituted(t, plain, environ)[0], key, Path())
    )
    holder: Any = document.data
    for part, following in zip(key, [*key[1:], None], strict=True):
        last = following is None
        if isinstance(holder, list) and isinstance(part, int) and part < len(holder):
            pass
        elif not isinstance(holder, dict) or not isinstance(part, str):
            document.problems.append(Problem(key, "no such place in the spec", file=where))
            return
        elif isinstance(holder.get(part), str) and following in ("args", "target"):
            holder[part] = {"target": holder[part]}
        elif not last and not isinstance(holder.get(part), dict | list):
            holder[part] = {}
        if last:
            holder[part] = inner.data
        else:
            holder = holder[part]
    document.marks[key] = Mark(where, 1, 1)


def _problem(marks: Mapping[Key, Mark], file: str, key: Key, message: str, hint: str = "") -> Problem:
    for length in range(len(key), -1, -1):
        if key[:length] in marks:
            at = marks[key[:length]]
            return Problem(key, message, hint, at.file, at.line, at.column)
    return Problem(key, message, hint, file)


def _model_problems(data: dict[str, Any], marks: Mapping[Key, Mark], shown: str) -> list[Problem]:
    try:
        RunSpec.model_validate(data)
    except ValidationError as error:
        return [_of_fault(fault, marks, shown) for fault in error.errors()]
    return []


def _of_fault(fault: Any, marks: Mapping[Key, Mark], shown: str) -> Problem:
    key: Key = tuple(fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        name = str(key[-1])
        known = _fields(key[:-1])
        hint = (_ELSEWHERE.get(name, "") or _section_of(name)) if len(key) == 1 else ""
        return _problem(marks, shown, key, "unknown key", hint or suggest(name, known) or "")
    if fault["type"] == "missing":
        return _problem(marks, shown, key, "is missing")
    if fault["type"] == "string_pattern_mismatch" and key[-1] == "target":
        return _problem(
            marks, shown, key, f"{_shown(fault['input'])}: write package.module:attribute or file.py:attribute"
        )
    if fault["type"] == "value_error" and (told := _TOLD_KEY.fullmatch(message)):
        return _problem(marks, shown, (*key, *told[1].split(".")), told[2])
    if fault["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, is {_shown(fault['input'])}"
    return _problem(marks, shown, key, message)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _section_of(name: str) -> str:
    homes = [section for section in RunSpec.model_fields if name in _fields((section,))]
    return f"it belongs in {homes[0]}: write {homes[0]}.{name}" if homes else ""


def _fields(key: Key) -> list[str]:
    model: type[BaseModel] = RunSpec
    for part in key:
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        found = [kind for kind in (annotation, *getattr(annotation, "__args__", ())) if isinstance(kind, type)]
        models = [kind for kind in found if issubclass(kind, BaseModel)]
        if not models:
            return []
        model = models[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _optimizer_problems(loaded: LoadedSpec) -> list[Problem]:
    """What the models cannot tell: numbers without sense in the optimizer's arguments."""
    problems = []
    arguments = loaded.spec.optimizer.args if loaded.spec.optimizer else {}
    for name, value in arguments.items():
        key: Key = ("optimizer", "args", name)
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(loaded.problem(key, f"must be a finite number, is {value}"))
        elif name in ("lr", "eps", "weight_decay"):
            if isinstance(value, bool) or not isinstance(value, int | float):
                problems.append(loaded.problem(key, f"must be a number, is {_shown(value)}"))
            elif value < 0 or (name == "lr" and value == 0):
                problems.append(
                    loaded.problem(key, f"must be {'above 0' if name == 'lr' else 'at least 0'}, is {value}")
                )
    return problems
