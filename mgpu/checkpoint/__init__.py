"""Saving a training, finding it again, and taking its weights elsewhere.

How a save goes, and which module knows that part of it::

    state      what is saved, by the model's own names            all ranks
    layout     which rank writes which part of it                 agreed once
    snapshot   one copy into shared memory: all that training waits for
    writer     a process beside each rank takes it from there:
    shard        its rank's part → file, hash, fsync
    publish      rank 0: data.json, .metadata, manifest.json last → rename → fsync → event → retention

Reading never imports anything that a file names: `reading` lets a fixed list of torch's own classes through. Modules that
need torch are imported by name; what this package itself offers works without it.
"""

from mgpu.checkpoint.folder import CheckpointFolder, Found
from mgpu.checkpoint.manifest import Manifest
from mgpu.checkpoint.retention import Best, Retention

__all__ = ["Best", "CheckpointFolder", "Found", "Manifest", "Retention"]
