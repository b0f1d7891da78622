"""Connections: accepted by the supervisor, and dealt out to the workers in turn.

Nothing is accepted that no worker can take: until one can, clients wait in the system's backlog.
What was given to a worker and not taken by it, because it hangs or was killed, is taken back and
given to another: the receiving end of each handover is open here too, and a message in it has one
receiver.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import deque

from recprune.serve.logs import log_problem
from recprune.serve.processes.crew import Crew, Worker

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
        self._held: deque[socket.socket] = deque()  # accepted, but no worker could take them
        self._again_at = 0.0

    @property
    def again_at(self) -> float | None:
        """When to try again even if nothing happens before; by time.monotonic()."""
        return self._again_at if self._again_at > time.monotonic() else None

    def turn(self) -> None:
        """Deal what is held, and watch for connections while there is a worker to deal to."""
        is_time = time.monotonic() >= self._again_at
        while is_time and self._held:
            is_time = self._deal(self._held.popleft())
        self._watch(is_time and any(worker.takes_connections for worker in self._crew.values()))

    def accept(self) -> None:
        """Accept what is there, and deal it out."""
        for _ in range(_AT_ONCE):
            if self._held:
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

    def take_back(self, worker: Worker) -> None:
        """Hold what a worker has not taken, for others to be given."""
        with contextlib.suppress(OSError):  # nothing is left
            while True:
                _, descriptors, _, _ = socket.recv_fds(worker.their_handover, 1, 1)
                if descriptors:
                    self._held.append(socket.socket(fileno=descriptors[0]))
                else:  # none are left for it, and the system has closed it
                    log_problem("connection lost", {"reason": "too many open files"})

    def end(self) -> None:
        """Deal out what is waiting, and accept no more."""
        while self._held and self._deal(self._held.popleft()):
            pass
        self.accept()
        self._watch(False)
        self.close()

    def close(self) -> None:
        """Close what is open in this process."""
        self._listening.close()
        while self._held:
            self._held.pop().close()

    def _watch(self, wanted: bool) -> None:
        watched = self._listening.fileno() in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(self._listening, selectors.EVENT_READ)
        elif watched and not wanted:
            self._selector.unregister(self._listening)

    def _deal(self, connection: socket.socket) -> bool:
        """Give a connection to the worker whose turn it is, or to the next that has room for it."""
        for worker in list(self._crew.values()):
            if worker.takes_connections:
                # Last in line from now on, whether it takes it or not.
                self._crew[worker.pid] = self._crew.pop(worker.pid)
                # Its buffer may be full, it may be gone, too many may be on their way to it.
                with contextlib.suppress(OSError):
                    socket.send_fds(worker.handover, [b"."], [connection.fileno()])
                    connection.close()
                    return True
        self._held.appendleft(connection)
        self._again_at = time.monotonic() + _FULL_PAUSE_S
        return False
