"""The signals that ask a run to stop, and the two by which a supervisor asks something else of a live rank.

The latter are real-time ones: no program gives them a meaning. Neither is sent to a process that has not said, by
catching it, that it knows what to do: the default is to die of it.
"""

from __future__ import annotations

import signal
from pathlib import Path

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STACKS_SIGNAL = signal.SIGRTMIN + 9
"""Write the stacks of all threads into the descriptor that the heartbeat names. Done in C, however stuck the rank is."""
REOPEN_SIGNAL = signal.SIGRTMIN + 8
"""The log was moved away: go on in a new file of the old name."""


def catches(pid: int, signum: int) -> bool:
    """Whether process `pid` has a handler for `signum`; False where that cannot be known."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    for line in text.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False
