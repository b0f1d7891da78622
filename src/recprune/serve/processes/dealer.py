"""Connections: accepted by the supervisor, and dealt out to the workers in turn.

Nothing is accepted that no worker can take: until one can, clients wait in the system's backlog.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time

from recprune.serve.logs import log_problem
from recprune.serve.processes.crew import Crew

_AT_ONCE = 64  # connections, before messages and signals have their turn
_FULL_PAUSE_S = 0.02  # until the workers are tried again when none could take one
_FAILED_PAUSE_S = 0.5  # until a connection is accepted again when the system would not


class Dealer:
    """Takes connections from a listening socket and gives them away."""

    def __init__(
        self, listening: socket.socket, selector: selectors.BaseSelector, crew: Crew
    ) -> None:
        self._listening = listening
        self._selector = selector
        self._crew = crew
        self._held: socket.socket | None = None  # accepted, but no worker could take it
        self._again_at = 0.0

    @property
    def again_at(self) -> float | None:
        """When to try again even if nothing happens before; by time.monotonic()."""
        return self._again_at if self._again_at > time.monotonic() else None

    def turn(self) -> None:
        """Deal what is held, and watch for connections while there is a worker to deal to."""
        is_time = time.monotonic() >= self._again_at
        if self._held is not None and is_time:
            held, self._held = self._held, None
            self._deal(held)
            is_time = self._held is None
        self._watch(is_time and any(worker.takes_connections for worker in self._crew.values()))

    def accept(self) -> None:
        """Accept what is there, and deal it out."""
        for _ in range(_AT_ONCE):
            if self._held is not None:
                return
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # no descriptors left, say: it passes, but not at once
                log_problem("cannot accept", {"reason": error.strerror})
                self._again_at = time.monotonic() + _FAILED_PAUSE_S
                return
            self._deal(connection)

    def end(self) -> None:
        """Deal out what is waiting, and accept no more."""
        self.accept()
        self._watch(False)
        self.close()

    def close(self) -> None:
        """Close what is open in this process."""
        self._listening.close()
        if self._held is not None:
            self._held.close()
            self._held = None

    def _watch(self, wanted: bool) -> None:
        watched = self._listening.fileno() in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(self._listening, selectors.EVENT_READ)
        elif watched and not wanted:
            self._selector.unregister(self._listening)

    def _deal(self, connection: socket.socket) -> None:
        """Give a connection to the worker whose turn it is, or to the next that takes it."""
        for worker in list(self._crew.values()):
            if worker.takes_connections:
                # Last in line from now on, whether it takes it or not.
                self._crew[worker.pid] = self._crew.pop(worker.pid)
                # Its buffer may be full, it may be gone, too many may be on their way to it.
                with contextlib.suppress(OSError):
                    socket.send_fds(worker.handover, [b"."], [connection.fileno()])
                    connection.close()
                    return
        self._held = connection
        self._again_at = time.monotonic() + _FULL_PAUSE_S
