"""Clients that are in no hurry: they say nothing, drip bytes, or do not take their answer."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.siege.diary import Diary
from benchmarks.siege.places import Service

_HEAD = b"POST /recommend HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
_LATE_S = 10.0  # beyond what the service allows, until it counts as held: the machine is busy


@dataclass
class _Slow:
    connection: socket.socket
    kind: str
    begun: float


class SlowClients:
    """So many at a time, which the service has to get rid of: others take their places."""

    name = "slow clients"

    def __init__(
        self, service: Service, diary: Diary, items: Sequence[int], *, most: int, allowed_s: float
    ) -> None:
        """`allowed_s` is what the service gives a client for each thing it has to do."""
        self._service = service
        self._diary = diary
        self._most = most
        # To be quick with the request is one thing, to take the answer another.
        self._late = 2 * allowed_s + _LATE_S
        self._slow: list[_Slow] = []
        batch = [{"history": [item]} for item in items[:16]]
        self._question = json.dumps({"batch": batch, "k": 1000}).encode()
        self.ended: Counter[str] = Counter()  # by kind, those that the service has ended
        self.held: Counter[str] = Counter()  # those that it should have ended long ago

    def pause(self, rng: random.Random) -> float:
        del rng
        return 1.0

    def strike(self, rng: random.Random) -> None:
        """One second in the life of all of them."""
        with self._diary.noting(self.name, "drip") as entry:
            now = time.monotonic()
            self._slow = [slow for slow in self._slow if self._stays(slow, now)]
            for _ in range(min(20, self._most - len(self._slow))):
                with suppress(OSError):
                    self._slow.append(self._open(rng.choice(("silent", "head", "body", "answer"))))
            entry.figures["clients"] = len(self._slow)

    def _open(self, kind: str) -> _Slow:
        connection = socket.socket()
        if kind == "answer":  # what does not fit here stays with the service
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(5.0)
        connection.connect(("127.0.0.1", self._service.port))
        length = b"content-length: %d\r\n\r\n" % len(self._question)
        sent = {
            "silent": b"",
            "head": b"POST /reco",
            "body": _HEAD + length + self._question[:10],
            "answer": _HEAD + length + self._question,
        }
        connection.sendall(sent[kind])
        connection.setblocking(False)
        return _Slow(connection, kind, time.monotonic())

    def _stays(self, slow: _Slow, now: float) -> bool:
        """Drip a byte; return whether the connection is still there."""
        is_late = now - slow.begun > self._late
        try:
            if slow.kind in ("head", "body"):
                slow.connection.send(b"x")
            # An answer stays where it is until it is time to see whether the service has let go of it.
            is_over = is_late and self._has_end(slow) if slow.kind == "answer" else _is_told(slow)
        except OSError:
            is_over = True
        if is_over:
            self.ended[slow.kind] += 1
        elif is_late:
            self.held[slow.kind] += 1
        if is_over or is_late:
            slow.connection.close()
            return False
        return True

    def _has_end(self, slow: _Slow) -> bool:
        """Take all that is there; whether there is an end to it, which the service made long ago."""
        slow.connection.settimeout(1.0)
        try:
            while slow.connection.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        for slow in self._slow:
            slow.connection.close()


def _is_told(slow: _Slow) -> bool:
    """Whether the service has said that it was too slow, or nothing and has gone."""
    try:
        slow.connection.recv(1 << 16)
    except BlockingIOError:
        return False
    return True
