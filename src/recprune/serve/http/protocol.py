"""HTTP/1.1 with a clock: clients that send too slowly or too much, or take no answer, are closed.

uvicorn waits for a client as long as the client likes. Here all of a request must arrive within
some seconds, and its head be of a sensible size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from recprune.serve.configuration import Limits
from recprune.serve.http.errors import HttpError
from recprune.types import needs_extra

with needs_extra("serve"):
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_BYTES = 64 << 10


def protocol_for(limits: Limits, turned_away: Callable[[], None]) -> type[HttpToolsProtocol]:
    """Return a protocol with these limits; `turned_away` is called for every refused connection."""

    class ImpatientProtocol(HttpToolsProtocol):
        """One connection."""

        _sending: asyncio.TimerHandle | None = None  # until the request must be here
        _taking: asyncio.TimerHandle | None = None  # until the answer must be taken
        _in_head = True
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                turned_away()
                self._refuse(503, "overloaded", "too many connections")
            else:
                self._expect_request()

        def connection_lost(self, exc: Exception | None) -> None:
            _cancel(self._sending)
            _cancel(self._taking)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
                    self._refuse(431, "too_large", "the headers are too large")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head, self._head_bytes = True, 0
            self._expect_request()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            _cancel(self._sending)
            super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            _cancel(self._taking)
            self._taking = self.loop.call_later(limits.client_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            _cancel(self._taking)
            super().resume_writing()

        def _expect_request(self) -> None:
            _cancel(self._sending)
            self._sending = self.loop.call_later(limits.client_seconds, self._too_slow)

        def _too_slow(self) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is not None and self.cycle.response_started:
                self.transport.abort()  # answered before it was whole; it still is not
            else:
                self._refuse(408, "too_slow", "the request came too slowly")

        def _refuse(self, status: int, code: str, message: str) -> None:
            """Answer without the application, and close the connection."""
            error = HttpError(status, code, message, {"connection": "close"})
            lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
            lines += [f"{name}: {value}" for name, value in error.headers.items()]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + error.body)
            self.transport.close()

    return ImpatientProtocol


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
