"""The workers, as their supervisor sees them."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import TypeAlias

from recprune.serve.processes.messages import Message, from_line

BEATS = 10  # that a worker may miss, one after the other, until it counts as hung
_FEW_BEATS = 2  # so many, and connections that it has not taken go to others


@dataclass
class Worker:
    """One process, and the lines to it."""

    pid: int
    line: socket.socket  # for messages
    handover: socket.socket  # for connections
    their_handover: socket.socket  # its end, from which connections can be taken back
    ready_by: float  # by time.monotonic()
    place: int  # among the workers, 0 to n − 1
    is_ready: bool = False
    missed_beats: int = 0
    received: bytes = b""

    @property
    def takes_connections(self) -> bool:
        """Whether it is worth giving it one."""
        return self.is_ready and self.missed_beats < _FEW_BEATS

    def send(self, message: Message) -> None:
        """Tell it something. One that ends, or hangs, hears nothing; its end alone will help."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self.line.sendall(message.to_line())

    def receive(self) -> list[Message] | None:
        """Return what it has said, or None once it has closed its end."""
        try:
            received = self.line.recv(1 << 16)
        except (BlockingIOError, ConnectionError):
            return []
        if not received:
            return None
        *lines, self.received = (self.received + received).split(b"\n")
        return [from_line(line) for line in lines]

    def close(self) -> None:
        for end in (self.line, self.handover, self.their_handover):
            end.close()


Crew: TypeAlias = dict[int, Worker]  # by pid; for connections, in the order of their turns
