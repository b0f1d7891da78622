"""HTTP/1.1 with clocks and limits: what a client does not do in time, or does too much of, ends.

uvicorn waits for a client as long as the client likes, and keeps of a request whatever is sent.
Here every state of a connection has a clock, and received bytes wind none of them up again:

- waiting for the first request, and for all of a request once it has begun: `client_seconds`;
- answering: none while the service works; `client_seconds` while the answer is not taken;
- idle after an answer: uvicorn's keep-alive;
- closed, and the last bytes not taken yet, of an answer that was not finished too:
  `client_seconds`.

A request that was sent before the answer to an earlier one has its time when its turn comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal, cast

from recprune.serve.configuration import Limits
from recprune.serve.http.errors import HttpError
from recprune.types import needs_extra

with needs_extra("serve"):
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_BYTES = 64 << 10  # of a head and of what may follow a chunked body, together
_HEADER_EXTRA = 4  # bytes around a header's name and value: ": " and the end of the line
_CONTINUE = b"HTTP/1.1 100 "  # which is no answer yet
_PIPELINED = 64  # requests that may wait for the answers to earlier ones


class _RefusedError(Exception):
    """Stops the parser; the protocol knows the answer."""


def protocol_for(limits: Limits, turned_away: Callable[[], None]) -> type[HttpToolsProtocol]:
    """Return a protocol with these limits; `turned_away` is called for every refused connection."""

    class ImpatientProtocol(HttpToolsProtocol):
        """One connection."""

        _clock: asyncio.TimerHandle | None = None  # of the state that the connection is in
        _taking: asyncio.TimerHandle | None = None  # until a long answer must be taken
        _part: Literal["none", "head", "body"] = "none"  # of a request, that is arriving
        _head_bytes = 0  # of its url and headers, as far as they were parsed
        _kept_bytes = 0  # received since the parser last gave something away
        _is_too_large = False

        # The transport -------------------------------------------------------------------------

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(cast(asyncio.Transport, _WholeAnswers(transport)))
            self._application, self.app = self.app, self._answer
            if len(self.connections) > limits.connections:
                turned_away()
                self._refuse(503, "overloaded", "too many connections")
            else:
                self._start(limits.client_seconds, self._too_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            _cancel(self._taking)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._kept_bytes += len(data)
            super().data_received(data)
            # A header without an end: the parser keeps it, and says nothing of it yet.
            if self._kept_bytes > _HEAD_BYTES and not self.transport.is_closing():
                self._is_too_large = True
                self.send_400_response("")

        def pause_writing(self) -> None:
            super().pause_writing()
            _cancel(self._taking)
            self._taking = self.loop.call_later(limits.client_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            _cancel(self._taking)
            super().resume_writing()

        # The parser ----------------------------------------------------------------------------

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._part, self._head_bytes = "head", 0
            self._stop()
            self._start_if_its_turn()

        def on_url(self, url: bytes) -> None:
            self._count_head(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count_head(len(name) + len(value) + _HEADER_EXTRA)
            if self._part == "head":  # what follows a chunked body is of no use here
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if len(self.pipeline) >= _PIPELINED:
                raise _RefusedError
            self._part, self._kept_bytes = "body", 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._kept_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._part, self._kept_bytes = "none", 0
            self._stop()
            super().on_message_complete()
            if self.cycle.response_complete:  # refused before it was whole
                self._start_keep_alive()

        def send_400_response(self, msg: str) -> None:
            """Refuse what cannot be parsed; uvicorn's words for it are not ours."""
            del msg
            if self._is_too_large:
                self._refuse(431, "too_large", f"the headers have more than {_HEAD_BYTES} bytes")
            else:
                self._refuse(400, "bad_request", "this is not HTTP/1.1")

        def _count_head(self, size: int) -> None:
            self._head_bytes += size
            if self._head_bytes > _HEAD_BYTES:
                self._is_too_large = True
                raise _RefusedError

        # Answers -------------------------------------------------------------------------------

        async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
            """Run the application; an answer that it does not finish ends the connection."""
            try:
                await self._application(scope, receive, send)
            finally:  # uvicorn closes it next, and says so to none of the methods here
                self.loop.call_soon(self._start_if_closing)

        def on_response_complete(self) -> None:
            cast(_WholeAnswers, self.transport).flush()  # one without a body
            super().on_response_complete()
            if self.transport.is_closing():
                self._start(limits.client_seconds, self.transport.abort)
            elif self._part != "none":
                self._start_if_its_turn()
            elif self.cycle.response_complete:
                self._start_keep_alive()

        def _refuse(self, status: int, code: str, message: str) -> None:
            """Answer without the application, if an answer is due now, and close the connection."""
            begun = self._part == "body" and self.cycle.response_started
            if begun or not self._is_its_turn():
                self.transport.abort()
                return
            error = HttpError(status, code, message, {"connection": "close"})
            lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
            lines += [f"{name}: {value}" for name, value in error.headers.items()]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + error.body)
            self.transport.close()
            self._start(limits.client_seconds, self.transport.abort)

        # Clocks --------------------------------------------------------------------------------

        def _start(self, seconds: float, action: Callable[[], None]) -> None:
            self._stop()
            self._clock = self.loop.call_later(seconds, action)

        def _stop(self) -> None:
            _cancel(self._clock)
            self._clock = None

        def _is_its_turn(self) -> bool:
            """Whether no earlier request has to be answered before the one that is arriving."""
            if self._part == "body":
                return not self.pipeline
            return self.cycle is None or bool(self.cycle.response_complete)

        def _start_if_its_turn(self) -> None:
            if self._clock is None and self._is_its_turn():
                self._start(limits.client_seconds, self._too_slow)

        def _start_if_closing(self) -> None:
            is_open = self in self.connections
            if is_open and self._clock is None and self.transport.is_closing():
                self._start(limits.client_seconds, self.transport.abort)

        def _start_keep_alive(self) -> None:
            self._start(self.timeout_keep_alive, self._end_idle)

        def _too_slow(self) -> None:
            self._refuse(408, "too_slow", "the request came too slowly")

        def _end_idle(self) -> None:
            if self.transport.get_write_buffer_size():
                self.transport.abort()  # closing would wait for the client to take it
            else:
                self.transport.close()

    return ImpatientProtocol


class _WholeAnswers:
    """A transport that writes the head of an answer together with the beginning of its body.

    uvicorn writes them one after the other: a process that is killed in between would leave a
    client with half an answer, who, unlike one without any, may not ask again.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""  # that waits for a body

    def write(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(_CONTINUE) and not self._head:
            self._head = data
        else:
            self._transport.write(self._head + data if self._head else data)
            self._head = b""

    def flush(self) -> None:
        """Write a head that no body follows."""
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
