"""Load for a service, from a process of its own: many connections, few instructions each.

    python -m benchmarks.serve_load URL REQUESTS --connections 8 --seconds 3
    python -m benchmarks.serve_load URL REQUESTS --rate 500 --seconds 3

REQUESTS is a file with a JSON body a line. With connections, each of them asks again as soon as it
is answered; with a rate, requests come at that rate whatever becomes of the earlier ones. Prints one
JSON object. Latencies are those of requests that were answered with 200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import uvloop

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_MOST_CONNECTIONS = 512


class Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("closed by the service"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or self._answer is None:
            return
        length = _LENGTH.search(self._received, 0, end)
        whole = end + 4 + (int(length[1]) if length else 0)
        if len(self._received) >= whole:
            status, body = int(self._received[9:12]), self._received[end + 4 : whole]
            self._received = self._received[whole:]
            if not self._answer.done():
                self._answer.set_result((status, body))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and return status and body of the answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        self._transport.close()


class Figures:
    """Times and statuses of the answers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.statuses: dict[int, int] = {}
        self.search_ms: list[float] = []  # what the service says its search took

    async def ask(self, connection: Connection, request: bytes) -> None:
        """Send a request, and count its answer."""
        begun = time.perf_counter()
        status, body = await connection.ask(request)
        spent = time.perf_counter() - begun
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status == 200:
            self.seconds.append(spent)
            if len(self.seconds) % 16 == 1 and body.startswith(b'{"answers"'):
                self.search_ms.append(json.loads(body)["answers"][0]["milliseconds"]["search"])

    def summary(self, seconds: float) -> dict[str, object]:
        milliseconds = 1000.0 * np.array(self.seconds or [np.nan])
        p50, p95, p99 = (float(np.percentile(milliseconds, at)) for at in (50, 95, 99))
        return {
            "per_second": len(self.seconds) / seconds,
            "p50_ms": p50,
            "p95_ms": p95,
            "p99_ms": p99,
            "statuses": self.statuses,
            "search_ms": float(np.median(self.search_ms)) if self.search_ms else None,
        }


async def closed_loop(
    host: str, port: int, requests: Iterator[bytes], connections: int, seconds: float
) -> dict[str, object]:
    """Send the next request over each connection as soon as it is answered."""
    loop = asyncio.get_running_loop()
    opened = [(await loop.create_connection(Connection, host, port))[1] for _ in range(connections)]
    for connection in opened:
        await connection.ask(next(requests))
    figures = Figures()
    end = time.perf_counter() + seconds

    async def go_on(connection: Connection) -> None:
        while time.perf_counter() < end:
            await figures.ask(connection, next(requests))

    await asyncio.gather(*(go_on(connection) for connection in opened))
    for connection in opened:
        connection.close()
    return figures.summary(seconds)


async def open_loop(
    host: str, port: int, requests: Iterator[bytes], rate: float, seconds: float
) -> dict[str, object]:
    """Send requests at a rate, at random moments, whether or not earlier ones are answered."""
    loop = asyncio.get_running_loop()
    idle: list[Connection] = []
    tasks: set[asyncio.Task[None]] = set()
    figures = Figures()

    async def ask(request: bytes) -> None:
        connection = (
            idle.pop() if idle else (await loop.create_connection(Connection, host, port))[1]
        )
        await figures.ask(connection, request)
        idle.append(connection)

    rng = np.random.default_rng(0)
    begun = time.perf_counter()
    moment = 0.0
    while moment < seconds:
        moment += float(rng.exponential(1.0 / rate))
        await asyncio.sleep(max(0.0, begun + moment - time.perf_counter()))
        if len(tasks) < _MOST_CONNECTIONS:
            task = asyncio.create_task(ask(next(requests)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    spent = time.perf_counter() - begun
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return figures.summary(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("url")
    parser.add_argument("requests", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--connections", type=int)
    how.add_argument("--rate", type=float)
    parsed = parser.parse_args()
    url = urlsplit(parsed.url)
    host, port = str(url.hostname), int(url.port or 80)
    head = f"POST {url.path} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
    bodies = parsed.requests.read_bytes().splitlines()
    requests = cycle(
        [f"{head}content-length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
    )
    if parsed.rate is None:
        work = closed_loop(host, port, requests, parsed.connections, parsed.seconds)
    else:
        work = open_loop(host, port, requests, parsed.rate, parsed.seconds)
    print(json.dumps(uvloop.run(work)))


if __name__ == "__main__":
    main()
