"""JSON messages, one a line, over a socket: how the node and its spawner speak."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

Message = dict[str, Any]


class Link:
    """One end of the socket. Waiting and reading share one buffer, so no message hides in another's."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._buffer = b""

    def fileno(self) -> int:
        """For waiting together with other things; only meaningful while `has_message` is False."""
        return self._end.fileno()

    @property
    def has_message(self) -> bool:
        """Whether a whole message was read already."""
        return b"\n" in self._buffer

    def send(self, **message: Any) -> None:
        self._end.sendall((json.dumps(message) + "\n").encode())

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None when there is none within `timeout` seconds. EOFError once the other end is gone."""
        while not self.has_message:
            if not select.select([self._end], [], [], timeout)[0]:
                return None
            block = self._end.recv(1 << 16)
            if not block:
                raise EOFError("the other end is gone")
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Message = json.loads(line)
        return message
