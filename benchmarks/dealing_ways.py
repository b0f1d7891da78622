"""Ways in which worker processes get their connections, each as short as can be, around one app.

    python -m benchmarks.dealing_ways WAY WORKERS PORT

- dealt: the parent accepts, and passes descriptors to the workers in turn;
- reuseport: every worker listens on the address itself, and the kernel hashes connections;
- shared: the event loops of all workers accept from one listening socket, as those of uvicorn do;
- turns: a thread of every worker blocks in accept on one listening socket, and the kernel wakes
  the one that has waited longest;
- least: as shared, but a worker that has more connections than another leaves it a millisecond to
  accept first; their numbers are in memory that all have mapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from itertools import cycle
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from benchmarks.serve_peers import FOLDER, RUNNING, WAITING
from recprune.serve.configuration import Limits, ServeSettings
from recprune.serve.http.app import create_app
from recprune.serve.http.protocol import protocol_for

WAYS = ("dealt", "reuseport", "shared", "turns", "least")
COUNTS = "RECPRUNE_BENCH_COUNTS"
_BACKLOG = 2048
_LOOKS = 5  # a millisecond apart, until a worker accepts although another has fewer
_HANG_S = 60.0


def app() -> FastAPI:
    """Return the application, with a route that keeps the event loop of its worker from going on."""
    limits = Limits(running=int(os.environ[RUNNING]), waiting=WAITING)
    made = create_app(
        ServeSettings(folder=Path(os.environ[FOLDER]), access_log=False, limits=limits)
    )

    @made.get("/hang")
    async def hang() -> None:
        time.sleep(_HANG_S)

    return made


class _Server(uvicorn.Server):
    """uvicorn with connections that were accepted elsewhere."""

    def __init__(self, config: uvicorn.Config, way: str, source: socket.socket, place: int) -> None:
        super().__init__(config)
        self._way = way
        self._place = place
        if way == "least":
            with Path(os.environ[COUNTS]).open("r+b") as file:
                self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("i")
        self._source = source
        self._taken: set[asyncio.Task[object]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._way in ("reuseport", "shared"):
            await super().startup([self._source])
            return
        del sockets
        await self.lifespan.startup()
        self.servers = []
        self.started = True
        loop = asyncio.get_running_loop()
        if self._way == "dealt":
            self._source.setblocking(False)
            loop.add_reader(self._source, self._receive)
        elif self._way == "least":
            self._source.setblocking(False)
            self._publish()
            loop.add_reader(self._source, self._accept_if_least)
        else:
            threading.Thread(target=self._accept, args=(loop,), daemon=True).start()

    def _receive(self) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._source, 1, 1)
        self._take(socket.socket(fileno=descriptors[0]))

    def _publish(self) -> None:
        self._counts[self._place] = len(self.server_state.connections) + len(self._taken)

    def _accept_if_least(self, looks: int = 0) -> None:
        least = min(count for count in self._counts if count >= 0)
        loop = asyncio.get_running_loop()
        if self._counts[self._place] <= least + least // 8 or looks == _LOOKS:
            self._accept_one()
            if looks:
                loop.add_reader(self._source, self._accept_if_least)
        else:
            loop.remove_reader(self._source)
            loop.call_later(0.001, self._accept_if_least, looks + 1)

    def _accept_one(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._source.accept()
            self._take(connection)
            self._publish()

    def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        is_taken = threading.Semaphore(0)

        def take(connection: socket.socket) -> None:
            self._take(connection)
            is_taken.release()

        while True:
            connection, _ = self._source.accept()
            loop.call_soon_threadsafe(take, connection)
            is_taken.acquire()  # one that hangs holds no more than this one

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
        self._taken.add(task)
        task.add_done_callback(self._taken.discard)

    def _protocol(self) -> asyncio.Protocol:
        protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        if self._way == "least":
            lost = protocol.connection_lost

            def connection_lost(exc: Exception | None) -> None:
                lost(exc)
                self._publish()

            protocol.connection_lost = connection_lost  # type: ignore[method-assign]
        return protocol


def _listen(port: int, *, is_shared: bool) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if not is_shared:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(_BACKLOG)
    return listening


def _work(way: str, port: int, source: socket.socket | None, place: int) -> None:
    http = protocol_for(Limits(), lambda: None)
    config = uvicorn.Config(app, factory=True, http=http, ws="none", log_config=None)
    given = source or _listen(port, is_shared=False)
    _Server(config, way, given, place).run()


def main(way: str, workers: int, port: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with tempfile.NamedTemporaryFile() as counts:
        counts.write(struct.pack("i", -1) * workers)
        counts.flush()
        os.environ[COUNTS] = counts.name
        _supervise(way, workers, port)


def _supervise(way: str, workers: int, port: int) -> None:
    """Start workers, and deal connections out to them where that is the way; replace none."""
    listening = _listen(port, is_shared=True) if way != "reuseport" else None
    pairs = [socket.socketpair() for _ in range(workers)]
    context = multiprocessing.get_context("spawn")
    processes = []
    try:
        for place, (_, theirs) in enumerate(pairs):
            given = (way, port, theirs if way == "dealt" else listening, place)
            processes.append(context.Process(target=_work, args=given, daemon=True))
            processes[-1].start()
        if way == "dealt" and listening is not None:
            for ours, _ in cycle(pairs):
                connection, _ = listening.accept()
                with connection:
                    socket.send_fds(ours, [b"."], [connection.fileno()])
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
