"""Seeds from positions: a draw depends on (seed, epoch, sample) or (seed, batch, micro batch) and on nothing else."""

from __future__ import annotations

import random
import sys

import numpy as np

_MASK = (1 << 64) - 1
_SAMPLE, _MICRO_BATCH, _WEIGHTS, _ORDER = 1, 2, 3, 4


def _mix(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea and Flood 2014), a bijection of 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _chain(*values: int) -> int:
    mixed = 0
    for value in values:
        mixed = _mix(mixed ^ (value & _MASK))
    return mixed


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """For reading the sample with id `index` in `epoch`; 64 bits."""
    return _chain(_SAMPLE, seed, epoch, index)


def micro_batch_seed(seed: int, batch: int, index: int) -> int:
    """For the forward pass of micro batch `index` of the run's global batch number `batch`; 64 bits."""
    return _chain(_MICRO_BATCH, seed, batch, index)


def weights_seed(seed: int) -> int:
    """For the initial weights; 64 bits."""
    return _chain(_WEIGHTS, seed)


def order_seed(seed: int, epoch: int) -> int:
    """For listing a user's sampler in `epoch`; 64 bits."""
    return _chain(_ORDER, seed, epoch)


def seed_everything(value: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (torch's if it is loaded, its GPU's if one is in use)."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is None:
        return
    # The generator's own method: torch.manual_seed walks all back ends and takes 60 times as long.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)
