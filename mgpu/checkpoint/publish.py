"""Rank 0's half of a save: out of the parts of all ranks makes a checkpoint, or nothing at all."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from mgpu.checkpoint.folder import CheckpointFolder
from mgpu.checkpoint.layout import Layout
from mgpu.checkpoint.manifest import DATA, MANIFEST, METADATA, FileRecord, Manifest, write_evaluation
from mgpu.checkpoint.retention import Retention
from mgpu.checkpoint.shard import HashedFile, Part, explain, first_error
from mgpu.errors import CheckpointError
from mgpu.files import json_text

Record = Callable[..., None]


@dataclass(frozen=True)
class Order:
    """One save, as the ranks ask their writers for it. `number` counts the saves of an attempt.

    `error` is why this rank has no snapshot to write. `stall` and `waited` are the seconds that training stood still for
    the snapshot, and for the save before; `asked` is the monotonic time of the order.
    """

    number: int
    step: int
    token: str
    data: Mapping[str, Any] = field(default_factory=dict)
    position: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    stall: float = 0.0
    waited: float = 0.0
    asked: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Measured:
    """What an evaluation at `step` has found, after the order to save that step."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Outcome:
    """How a save ended, alike on all ranks; `error` is empty if the checkpoint is published. Sizes in bytes."""

    step: int
    error: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class Publisher:
    """Publishes for one attempt. `plan` and `versions` go into manifests.

    `record` appends an event to the run, and never raises: it must not end the writer.
    """

    folder: CheckpointFolder
    retention: Retention
    record: Record
    plan: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def publish(self, order: Order, layout: Layout, parts: Sequence[Part]) -> Outcome:
        """Parts → data.json, .metadata → manifest.json → rename → event → retention; on any error, nothing is left."""
        partial = self.folder.partial_of(order.step, order.token)
        try:
            manifest = self._complete(partial, order, layout, parts)
            final = self.folder.publish(partial, order.step)
        except (OSError, CheckpointError) as error:
            told = error.message if isinstance(error, CheckpointError) else explain(error, partial, layout.bytes)
            shutil.rmtree(partial, ignore_errors=True)
            return self.failed(order, told)
        self.record(
            "saved",
            step=order.step,
            path=final.name,
            bytes=manifest.bytes,
            seconds=round(order.stall, 3),
            waited=round(order.waited, 3),
            written_after=round(time.monotonic() - order.asked, 3),
        )
        self._prune(order.step)
        return Outcome(order.step, bytes=manifest.bytes)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add an evaluation to the checkpoint of `step`, if there is one; then another may be the best."""
        folder = self.folder.path_of(step)
        try:
            write_evaluation(folder, metrics)
        except FileNotFoundError:  # it was not saved
            return
        except OSError as error:
            text = f"the evaluation of step {step} is not with its checkpoint: {explain(error, folder)}"
            self.record("note", text=text)
            return
        self._prune(step)

    def _prune(self, newest: int) -> None:
        try:
            removed = self.folder.prune(self.retention, newest)
        except OSError as error:
            self.record("note", text=f"old checkpoints were not removed: {explain(error, self.folder.path)}")
        else:
            if removed:
                self.record("checkpoints_removed", steps=removed)

    def failed(self, order: Order, error: str) -> Outcome:
        """Tell of a save that came to nothing."""
        self.record("save_failed", step=order.step, error=error)
        text = f"the checkpoint of step {order.step} was not saved: {error}; earlier ones are untouched"
        self.record("note", text=text)
        return Outcome(order.step, error)

    def _complete(self, partial: Path, order: Order, layout: Layout, parts: Sequence[Part]) -> Manifest:
        if error := first_error(parts):
            raise CheckpointError(error)
        if any(part.step != order.step for part in parts):
            raise CheckpointError(f"ranks disagree on the step: {[part.step for part in parts]}")
        for part in parts:
            if part.file and (partial / part.file).stat().st_size != part.size:
                raise CheckpointError(f"{part.file} of rank {part.rank} is not what that rank has written")
        files = {part.file: FileRecord(part.size, part.sha256) for part in parts if part.file}
        plain = merged([order.data, *(part.plain for part in parts if part.plain)])
        data = json_text({"step": order.step, **plain}, indent=2) + "\n"
        files[DATA] = _write(partial / DATA, data.encode())
        metadata = with_places(layout, parts, self.folder.path_of(order.step))
        files[METADATA] = _write(partial / METADATA, pickle.dumps(metadata))
        manifest = Manifest(
            step=order.step,
            files=files,
            position=order.position,
            metrics=order.metrics,
            plan=self.plan,
            versions=self.versions,
        )
        _write(partial / MANIFEST, manifest.to_text().encode())
        return manifest


def with_places(layout: Layout, parts: Sequence[Part], final: Path) -> Metadata:
    """torch's metadata, with the place of every piece. Tied names share the place of their tensor."""
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for part, indices in zip(parts, layout.indices, strict=True):
        for index, (start, length) in zip(indices, part.places, strict=True):
            storage[index] = _StorageInfo(part.file, start, length)
    kinds = dict(layout.metadata.state_dict_metadata)
    for name, other in layout.tied.items():
        kinds[name] = kinds[other]
        for index, place in list(storage.items()):
            if index.fqn == other:
                storage[MetadataIndex(name, index.offset, index.index)] = place
    return Metadata(
        state_dict_metadata=kinds,
        planner_data=layout.metadata.planner_data,
        storage_data=storage,
        storage_meta=StorageMeta(checkpoint_id=os.fspath(final)),
        version=CURRENT_DCP_VERSION,
    )


def merged(plains: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The plain values of all ranks: mappings are joined, the groups of the optimizer have the parameters of all."""
    whole = dict(plains[0])
    for plain in plains[1:]:
        for key, value in plain.items():
            if key == "groups":
                whole["groups"] = _joined(whole["groups"], value)
            elif isinstance(value, dict) and isinstance(whole.get(key), dict):
                whole[key] = merged([whole[key], value])
            else:
                whole.setdefault(key, value)
    return whole


def _joined(groups: Sequence[Mapping[str, Any]], more: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of the same settings have the parameters of both: a rank without parameters of a kind lacks its group."""
    joined = [dict(group) for group in groups]
    for group in more:
        alike = [one for one in joined if {**one, "parameters": []} == {**group, "parameters": []}]
        shared = [one for one in alike if set(one["parameters"]) & set(group["parameters"])]
        if not alike:
            joined.append(dict(group))
        else:
            like = (shared or alike)[0]
            like["parameters"] = list(dict.fromkeys([*like["parameters"], *group["parameters"]]))
    return joined


def _write(path: Path, content: bytes) -> FileRecord:
    file = HashedFile(path)
    file.write(content)
    return FileRecord(file.size, file.finish())
