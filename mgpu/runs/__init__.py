"""The run directory, and the registry over many: what every process of a run reads and writes."""

from mgpu.runs.reference import shell_reference
from mgpu.runs.run import Run
from mgpu.runs.states import State
from mgpu.runs.store import RunStore

__all__ = ["Run", "RunStore", "State", "shell_reference"]
