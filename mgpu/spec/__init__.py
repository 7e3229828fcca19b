"""What the user asks for."""

from mgpu.spec.loading import LoadedSpec, json_schema, load_spec, parse_value, resolve_secrets
from mgpu.spec.models import RunSpec, Target
from mgpu.spec.values import DeviceRequest, Span

__all__ = [
    "DeviceRequest",
    "LoadedSpec",
    "RunSpec",
    "Span",
    "Target",
    "json_schema",
    "load_spec",
    "parse_value",
    "resolve_secrets",
]
