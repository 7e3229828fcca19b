"""Saving a training and finding it again."""

from mgpu.checkpoint.store import Checkpointer, Found, damage, gather_state, restore_state

__all__ = ["Checkpointer", "Found", "damage", "gather_state", "restore_state"]
