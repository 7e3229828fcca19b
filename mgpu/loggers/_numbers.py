"""Numbers as a person reads them at a glance: three or four digits, never more columns than they need."""

from __future__ import annotations

import math

from mgpu.loggers.base import Value


def loss_text(value: Value) -> str:
    """Four decimals, or an exponent where those would show nothing: `2.4310`, `3.100e-05`."""
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3e}"


def learning_rate_text(value: Value) -> str:
    """`3.0e-04`."""
    return f"{value:.1e}" if isinstance(value, int | float) else str(value)


def norm_text(value: Value) -> str:
    """Two decimals, or an exponent: `0.71`, `4.2e-05`."""
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.2f}" if value == 0 or 1e-2 <= abs(value) < 1e4 else f"{value:.1e}"


def rate_text(value: Value) -> str:
    """How many a second: `3.2`, `512`, `32.8k`, `1.2M`."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    for suffix in ("", "k", "M", "G"):
        decimals = 0 if suffix == "" and abs(value) >= 9.95 else 1
        if abs(round(value, decimals)) < 1000:
            return f"{value:.{decimals}f}{suffix}"
        value /= 1000
    return f"{value:.1f}T"


def metric_text(value: Value) -> str:
    """Four digits, whole numbers in full: `0.981`, `2.014`, `10000`."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration_text(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2d 3h`."""
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes % 60:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
