"""Where metrics go. One file a logger."""

from mgpu.loggers.base import Logger
from mgpu.plugins import find_plugin

__all__ = ["Logger", "logger_class"]


def logger_class(name: str) -> type[Logger]:
    """The logger that the spec calls `name`: a file of this folder, `package.module:Class`, or an installed one.

    Raises UnknownName with the nearest name.
    """
    return find_plugin("logger", name, __name__, Logger)  # type: ignore[type-abstract]
