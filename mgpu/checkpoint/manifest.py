"""What a checkpoint says of itself: its files with sizes and hashes, where training stood, what it was made with.

Written last, so its presence is the sign that all else is there. It also holds a hash of its own text. An evaluation comes
after the save, so that no fault of it can cost the checkpoint: its metrics are put beside the manifest, in a file of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgpu.errors import DamagedCheckpoint
from mgpu.files import json_text, write_atomic

MANIFEST = "manifest.json"
DATA = "data.json"
METADATA = ".metadata"
EVALUATION = "evaluation.json"

_OWN_HASH = re.compile(rb'"sha256": "([0-9a-f]{64})"')
_UNHASHED = b'"sha256": "' + b"0" * 64 + b'"'
_BLOCK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written: `size` in bytes."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json. `created` is in seconds since 1970; `position` is that of the data."""

    step: int
    files: Mapping[str, FileRecord]
    position: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    created: float = field(default_factory=time.time)

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(record.size for record in self.files.values())

    def to_text(self) -> str:
        """The file's text, with the hash of that text (its own digits taken as zeros) in it."""
        return _hashed_text(dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the checkpoint in `folder`; DamagedCheckpoint where it is not what was written."""
        if (text := _hashed_bytes(folder, MANIFEST)) is None:
            raise DamagedCheckpoint(f"{MANIFEST} is missing")
        later = _hashed_bytes(folder, EVALUATION)
        try:
            manifest = cls._from_json(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{MANIFEST} cannot be understood ({type(error).__name__})") from error
        if later is None:
            return manifest
        try:
            return dataclasses.replace(manifest, metrics=_metrics(json.loads(later)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{EVALUATION} cannot be understood ({type(error).__name__})") from error

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Manifest:
        files = {str(name): FileRecord(**record) for name, record in value["files"].items()}
        for name in (DATA, METADATA):
            if name not in files:
                raise DamagedCheckpoint(f"{MANIFEST} does not list {name}")
        for name in files:
            if Path(name).name != name:
                raise DamagedCheckpoint(f"{MANIFEST} lists {name!r}, which is no plain file name")
        return cls(
            step=int(value["step"]),
            files=files,
            position=dict(value["position"]),
            metrics=_metrics(value),
            plan=dict(value["plan"]),
            versions=dict(value["versions"]),
            created=float(value["created"]),
        )

    def verify(self, folder: Path, *, contents: bool = True) -> None:
        """Compare the files with their records; DamagedCheckpoint names the first that differs.

        Without `contents` only presence and size are looked at, which takes no time at any size.
        """
        for name, record in self.files.items():
            try:
                size = (folder / name).stat().st_size
            except FileNotFoundError:
                raise DamagedCheckpoint(f"{name} is missing") from None
            except OSError as error:
                raise DamagedCheckpoint(f"{name} cannot be read ({error.strerror})") from error
            if size != record.size:
                raise DamagedCheckpoint(f"{name} has {size} bytes in place of {record.size}")
        if contents:
            with ThreadPoolExecutor(max_workers=4) as pool:
                hashes = list(pool.map(lambda name: _hash(folder / name), self.files))
            for (name, record), found in zip(self.files.items(), hashes, strict=True):
                if found != record.sha256:
                    raise DamagedCheckpoint(f"{name} has another checksum than when it was written")


def write_evaluation(folder: Path, metrics: Mapping[str, float]) -> None:
    """Add what an evaluation has found to the checkpoint in `folder`, which is there already. Raises OSError."""
    write_atomic(folder / EVALUATION, _hashed_text({"metrics": dict(metrics)}))


def _metrics(value: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(metric) for name, metric in value["metrics"].items()}


def _hashed_text(value: Mapping[str, Any]) -> str:
    unhashed = json_text({"sha256": "0" * 64, **value}, indent=2).encode() + b"\n"
    return _with_hash(unhashed, hashlib.sha256(unhashed).hexdigest()).decode()


def _hashed_bytes(folder: Path, name: str) -> bytes | None:
    """A file that holds the hash of its own text; None where it is missing, DamagedCheckpoint where the hash is another."""
    try:
        text = (folder / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedCheckpoint(f"{name} cannot be read ({error.strerror})") from error
    own = _OWN_HASH.search(text)
    if own is None or hashlib.sha256(_with_hash(text, "0" * 64)).hexdigest() != own[1].decode():
        raise DamagedCheckpoint(f"{name} has another checksum than when it was written")
    return text


def _with_hash(text: bytes, digest: str) -> bytes:
    return _OWN_HASH.sub(_UNHASHED.replace(b"0" * 64, digest.encode()), text, count=1)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read ({error.strerror})") from error
    return digest.hexdigest()
