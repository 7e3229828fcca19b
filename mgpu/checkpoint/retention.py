"""Which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mgpu.checkpoint.manifest import Manifest
from mgpu.spec.models import Checkpoint
from mgpu.spec.values import Span


@dataclass(frozen=True)
class Best:
    """The checkpoint with the lowest or highest value of an evaluation metric."""

    metric: str
    mode: Literal["min", "max"]

    def of(self, manifests: Iterable[Manifest]) -> Manifest | None:
        """The best one; the earliest of equals. One that was not evaluated, or to NaN, is none."""
        sign = 1 if self.mode == "min" else -1
        known = [m for m in manifests if not math.isnan(m.metrics.get(self.metric, math.nan))]
        return min(known, key=lambda m: (sign * m.metrics[self.metric], m.step), default=None)


@dataclass(frozen=True)
class Retention:
    """Keep the `keep` newest, the best, and every one at a multiple of `every` (steps or epochs)."""

    keep: int = 3
    best: Best | None = None
    every: Span | None = None

    @classmethod
    def of(cls, spec: Checkpoint) -> Retention:
        best = Best(spec.keep_best.metric, spec.keep_best.mode) if spec.keep_best else None
        return cls(spec.keep, best, spec.keep_every)

    def kept(self, manifests: Iterable[Manifest]) -> set[int]:
        """The steps that stay, out of checkpoints whose files are there."""
        known = sorted(manifests, key=lambda manifest: manifest.step, reverse=True)
        best = self.best.of(known) if self.best else None
        steps = {manifest.step for manifest in known[: max(1, self.keep)]}
        return steps | {m.step for m in known if m is best or self._is_milestone(m)}

    def _is_milestone(self, manifest: Manifest) -> bool:
        if self.every is None:
            return False
        if self.every.unit == "steps":
            return manifest.step % self.every.count == 0
        epoch, offset = manifest.position.get("epoch", 0), manifest.position.get("offset", 0)
        return offset == 0 and epoch > 0 and epoch % self.every.count == 0
