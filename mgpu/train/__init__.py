"""The worker: what one rank does."""

from mgpu.train.heart import beat
from mgpu.train.task import Supervised

__all__ = ["Supervised", "beat"]
