"""Clients that do not speak HTTP, or stop in the middle of it."""

from __future__ import annotations

import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from benchmarks.siege.diary import Diary
from benchmarks.siege.places import Service

_HEAD = b"POST /recommend HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
_ASKED = b'{"history":[1],"k":10}'
_WHOLE = _HEAD + b"content-length: %d\r\n\r\n" % len(_ASKED) + _ASKED
_HEALTH = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"

_SENT: dict[str, Callable[[random.Random], bytes]] = {
    "garbage": lambda rng: rng.randbytes(rng.randint(1, 5000)),
    "line breaks": lambda rng: b"\r\n" * rng.randint(1, 20_000),
    "a huge head": lambda _: b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"y" * 100_000,
    "many headers": lambda _: b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
    "half a body": lambda rng: _WHOLE[: -rng.randint(1, len(_ASKED))],
    "broken JSON": lambda _: _HEAD + b"content-length: 5\r\n\r\n{{{{{",
    "broken chunks": lambda _: _HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "two lengths": lambda _: _HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
    "no number as length": lambda _: _HEAD + b"content-length: -5\r\n\r\n{}",
    "TLS": lambda _: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "HTTP/2": lambda _: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "a reset": lambda _: _WHOLE,
    "a hundred at once": lambda _: _HEALTH * 100,
}
# These are gone before they can be answered.
_GONE = ("half a body", "a reset")


class BrokenClients:
    """A handful of all kinds at a time."""

    name = "broken clients"

    def __init__(self, service: Service, diary: Diary) -> None:
        self._service = service
        self._diary = diary
        self.answers: Counter[str] = Counter()  # status, or "none"
        self.faults: list[str] = []  # 5xx that is not 503

    def pause(self, rng: random.Random) -> float:
        return rng.uniform(0.2, 0.6)

    def strike(self, rng: random.Random) -> None:
        with self._diary.noting(self.name, "broken") as entry:
            for kind in rng.sample(sorted(_SENT), 4):
                status = self._break(kind, rng)
                self.answers[status] += 1
                entry.figures["clients"] = entry.figures.get("clients", 0) + 1
                if status.startswith("5") and status != "503":
                    self.faults.append(f"{kind}: {status}")

    def _break(self, kind: str, rng: random.Random) -> str:
        """Be such a client; return the status of the answer."""
        answer = b""
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self._service.port), 2) as one,
        ):
            if kind in _GONE:  # then closing resets the connection
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.sendall(_SENT[kind](rng))
            if kind not in _GONE:
                one.settimeout(1.0)
                answer = one.recv(1000)
        return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "none"

    def close(self) -> None:
        pass
