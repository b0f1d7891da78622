"""A client that knows how far an answer had come when its connection was cut."""

from __future__ import annotations

import json
import re
import select
import socket
from dataclasses import dataclass
from typing import Literal

from recprune.types import Json

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_PATIENCE_S = 60.0

Cut = Literal["", "refused", "unanswered", "halfway", "late"]


@dataclass(frozen=True)
class Reply:
    """The answer, or how it came to none."""

    status: int = 0
    head: bytes = b""
    body: bytes = b""
    # "unanswered": before the first byte of an answer; "halfway": after it; "late": we gave up, and
    # what was asked for may still be done, after whatever is asked next.
    cut: Cut = ""

    def json(self) -> Json:
        parsed: Json = json.loads(self.body)
        return parsed

    @property
    def code(self) -> str:
        """The code of an error."""
        try:
            return str(self.json()["error"]["code"])
        except (ValueError, KeyError, TypeError):
            return ""

    def header(self, name: str) -> str | None:
        found = re.search(rb"\r\n" + name.encode() + rb": ([^\r]*)", self.head, re.IGNORECASE)
        return found[1].decode("latin-1") if found else None


class Client:
    """Asks over one connection, which is opened again when it is needed. For one thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: socket.socket | None = None

    def ask(self, method: str, path: str, body: Json | None = None) -> Reply:
        """Send a request and return what came back."""
        given = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(given)}\r\n"
        head += "content-type: application/json\r\n\r\n"
        self._drop_if_closed()
        try:
            if self._connection is None:
                address = ("127.0.0.1", self._port)
                self._connection = socket.create_connection(address, _PATIENCE_S)
        except OSError:
            return Reply(cut="refused")
        received = b""
        try:
            self._connection.sendall(head.encode() + given)
            while True:
                part = self._connection.recv(1 << 16)
                received += part
                whole = _whole(received)
                if whole is not None:
                    break
                if not part:
                    raise ConnectionResetError
        except TimeoutError:
            self.close()
            return Reply(cut="late")
        except OSError:
            self.close()
            return Reply(cut="halfway" if received else "unanswered")
        if (whole.header("connection") or "").lower() == "close":
            self.close()
        return whole

    def _drop_if_closed(self) -> None:
        """Let go of a connection that the service has ended while nothing was asked."""
        if self._connection is not None and select.select([self._connection], [], [], 0)[0]:
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _whole(received: bytes) -> Reply | None:
    """Return the answer once all of it is there."""
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        return None
    length = _LENGTH.search(head)
    size = int(length[1]) if length else 0
    return Reply(int(head[9:12]), head, body[:size]) if len(body) >= size else None
