"""The small values a spec is made of: spans of training or time, whole numbers, device requests."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

Unit = Literal["steps", "epochs", "seconds", "minutes", "hours"]
_SECONDS: dict[str, int] = {"seconds": 1, "minutes": 60, "hours": 3600}
_SPAN = re.compile(r"([-+]?[\d_]+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([A-Za-z]+)")


@dataclass(frozen=True)
class Span:
    """A stretch of training (`200 steps`, `2 epochs`) or of time (`10 minutes`). `count` is at least 1."""

    count: int
    unit: Unit

    @classmethod
    def parse(cls, text: object, allowed: tuple[Unit, ...]) -> Span:
        """Read `N unit`; ValueError says what is written there and what may be."""
        wanted = " or ".join(f"`N {unit}`" for unit in allowed)
        match = _SPAN.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"{text!r} is not a span: write {wanted}")
        number, word = float(match[1].replace("_", "")), match[2].lower()
        unit = word if word.endswith("s") else f"{word}s"
        if unit not in allowed:
            raise ValueError(f"{text!r}: the unit here is {' or '.join(allowed)}")
        if not math.isfinite(number) or number != int(number) or number < 1:
            raise ValueError(f"{text!r}: must be a whole number of {unit}, at least 1")
        return cls(int(number), unit)

    @property
    def seconds(self) -> int:
        """The span in seconds; ValueError for steps and epochs, which have no fixed length."""
        if self.unit not in _SECONDS:
            raise ValueError(f"{self} has no length in seconds")
        return self.count * _SECONDS[self.unit]

    def __str__(self) -> str:
        return f"{self.count} {self.unit}"


class _SpanOf:
    """Makes pydantic read a `Span` in the given units from its text, and write it back as text."""

    def __init__(self, *units: Unit) -> None:
        self.units: tuple[Unit, ...] = units

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: object) -> Span:
            if isinstance(value, Span):
                value = str(value)
            return Span.parse(value, self.units)

        return core_schema.no_info_plain_validator_function(
            read, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        units = "|".join(f"{unit}?" for unit in self.units)
        return {
            "type": "string",
            "pattern": rf"^\s*[0-9][0-9_.eE+]*\s*({units})\s*$",
            "examples": [f"2 {self.units[0]}"],
        }


TrainingSpan = Annotated[Span, _SpanOf("epochs", "steps")]
WarmupSpan = Annotated[Span, _SpanOf("steps", "epochs")]
CheckpointSpan = Annotated[Span, _SpanOf("steps", "epochs", "minutes")]
TimeSpan = Annotated[Span, _SpanOf("seconds", "minutes", "hours")]


def _whole(value: object) -> object:
    """`1e3` is 1000 where a whole number is asked for; anything else is left to pydantic's strict check."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


WholeNumber = Annotated[int, BeforeValidator(_whole)]


@dataclass(frozen=True)
class DeviceRequest:
    """What `devices:` asks for.

    kind `auto`: GPUs where there are any, else CPU processes; `cuda`; `cpu`. `count` None means as many as fit.
    `indices` are positions in the list of visible GPUs (the allowed set), empty unless a list was written.
    """

    kind: Literal["auto", "cuda", "cpu"]
    count: int | None = None
    indices: tuple[int, ...] = ()

    @classmethod
    def parse(cls, value: object) -> DeviceRequest:
        """`auto`, `auto:N`, `N`, `cuda`, `cuda:N`, `cpu`, `cpu:N`, `[i, j]` (or their text, as `--devices` gives it)."""
        if isinstance(value, DeviceRequest):
            return value
        if isinstance(value, str) and (match := re.fullmatch(r"\[?\s*(\d+(?:\s*,\s*\d+)*)\s*\]?", value)):
            numbers = [int(part) for part in match[1].split(",")]
            value = numbers if "," in value or "[" in value else numbers[0]
        if isinstance(value, bool):
            raise ValueError(_DEVICES_HELP.format(value))
        if isinstance(value, int):
            return cls._counted("cuda", value)
        if isinstance(value, list | tuple):
            return cls._listed(value)
        match = re.fullmatch(r"(auto|cuda|gpu|cpu)(?::(\d+))?", value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(_DEVICES_HELP.format(value))
        kind = "cuda" if match[1] == "gpu" else match[1]
        if match[2] is None:
            return cls(kind)  # type: ignore[arg-type]
        return cls._counted(kind, int(match[2]))

    @classmethod
    def _counted(cls, kind: str, count: int) -> DeviceRequest:
        if not 1 <= count <= 65536:
            raise ValueError(f"{count} devices: must be at least 1")
        return cls(kind, count)  # type: ignore[arg-type]

    @classmethod
    def _listed(cls, value: list[Any] | tuple[Any, ...]) -> DeviceRequest:
        if not value or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
            raise ValueError(f"{list(value)}: a device list holds GPU indices, like [0, 3]")
        if len(set(value)) != len(value):
            raise ValueError(f"{list(value)}: names a GPU twice")
        return cls("cuda", len(value), tuple(value))

    def to_spec(self) -> str | int | list[int]:
        """The request as it is written in a spec."""
        if self.indices:
            return list(self.indices)
        return self.kind if self.count is None else f"{self.kind}:{self.count}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(cls.to_spec)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {
            "anyOf": [
                {"type": "string", "pattern": r"^(auto|cuda|gpu|cpu)(:[1-9]\d*)?$"},
                {"type": "integer", "minimum": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "uniqueItems": True},
            ]
        }


_DEVICES_HELP = "{!r}: write auto, a number of GPUs, a list of GPU indices like [0, 3], or cpu:N"
