"""Memory that a rank and its writer share: training stops for one copy into it, and for nothing else.

The memory has no name anywhere, so nothing is left of it when its processes are killed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from mgpu.checkpoint.layout import Layout, Piece, local_tensor

_MADV_POPULATE_WRITE = 23


class SharedMemory:
    """`size` bytes behind the file descriptor `handle`, which another process may be given."""

    def __init__(self, size: int, handle: int | None = None) -> None:
        """New memory; or that of `handle`, which was made by another process."""
        self.size = size
        self.handle = os.memfd_create("mgpu-snapshot", os.MFD_CLOEXEC) if handle is None else handle
        if handle is None:
            os.ftruncate(self.handle, size)
            # Taken now, so that too little memory is an error here and not a SIGBUS in the copy.
            os.posix_fallocate(self.handle, 0, size)
        self._map = mmap.mmap(self.handle, size)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._pinned = False

    def view(self, piece: Piece) -> Tensor:
        """`piece` as a tensor whose storage is just its part of the memory."""
        if not piece.bytes:
            return torch.empty(piece.shape, dtype=piece.dtype)
        count = piece.bytes // piece.dtype.itemsize
        return torch.frombuffer(self._map, dtype=piece.dtype, count=count, offset=piece.start).view(piece.shape)

    def populate(self) -> None:
        """Map every page, so that the first copy does not stop at each; a kernel that cannot does it then."""
        ctypes.CDLL(None).madvise(ctypes.c_void_p(self._address), self.size, _MADV_POPULATE_WRITE)

    def pin(self, device: torch.device) -> None:
        """Register the memory with CUDA, for copies at full speed. Where CUDA refuses, copies work but are slower."""
        with torch.cuda.device(device):
            self._pinned = not int(torch.cuda.cudart().cudaHostRegister(self._address, self.size, 0))

    def close(self) -> None:
        """Give up the descriptor; the memory itself goes with the last tensor that looks into it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address)
        os.close(self.handle)


class Snapshot:
    """The memory that a layout is copied into, got ready beside training."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self._memory: SharedMemory | None = None
        self._error: OSError | MemoryError | None = None
        self._views: list[Tensor] = []
        self._thread = threading.Thread(target=self._reserve, name="snapshot-memory", daemon=True)
        self._thread.start()

    def _reserve(self) -> None:
        try:
            memory = SharedMemory(max(1, self.layout.bytes))
            memory.populate()
            if self.device.type == "cuda":
                memory.pin(self.device)
            self._views = [memory.view(piece) for piece in self.layout.pieces]
            self._memory = memory
        except (OSError, MemoryError) as error:
            self._error = error

    @property
    def memory(self) -> SharedMemory:
        """The memory, once it is there; OSError or MemoryError where it cannot be had."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._memory is not None
        return self._memory

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy every piece as it is now; returns once the copies are complete."""
        _ = self.memory
        with torch.no_grad():
            for piece, view in zip(self.layout.pieces, self._views, strict=True):
                view.copy_(local_tensor(tensors, piece), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self._thread.join()
        self._views = []
        if self._memory is not None:
            self._memory.close()
