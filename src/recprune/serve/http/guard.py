"""What stands before every route: who may ask, how much at a time, and what is noted of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from recprune.serve.http.schemas import ErrorAnswer, ErrorDetail
from recprune.serve.logs import log, log_problem
from recprune.serve.service import Service
from recprune.types import needs_extra

with needs_extra("serve"):
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY_AFTER = "1"  # seconds

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/openapi.json"})  # for everybody, and `/page/`
_KNOWN = OPEN_PATHS | {
    "/recommend",
    "/search",
    "/events",
}  # by name even if refused before it is found
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_SECURITY_HEADERS = [
    (b"content-security-policy",
     b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
     b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]  # fmt: skip


class Refusal(Exception):  # noqa: N818 # an answer, not a fault of ours
    """An answer that ends a request before its route is reached."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status = status
        self.code = code
        self.message = message


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        limits = service.settings.limits
        # A request has its place from its last byte to its answer: reading a question takes longer
        # than searching, and those who will be turned away must not be read at all.
        self._places = limits.running + limits.waiting
        self._taken = dict.fromkeys(("/recommend", "/search", "/events"), 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *_SECURITY_HEADERS]
            await send(message)

        try:
            self._check(scope)
            body = await self._body(receive)
            if body is not None:
                with self._place(scope["path"]):
                    await self._app(scope, _replaying(body, receive), noted)
        except Refusal as refusal:
            if refusal.status == 503:
                self._service.metrics.count_turned_away()
            await _refuse(refusal, noted)
        except Exception as error:  # whatever it is, the client gets a clear answer
            log_problem("unexpected error", {"route": _route(scope)}, error)
            if not status:
                await _refuse(Refusal(500, "internal", "something went wrong here"), noted)
        finally:
            self._note(_route(scope), status, time.perf_counter() - begun)

    def _check(self, scope: Scope) -> None:
        """Refuse who may not ask, and whom there is no room for, before anything is read."""
        headers = {
            name: value.decode("latin-1") for name, value in scope["headers"]
        }  # of a repeated header, the last
        self._check_origin(headers.get(b"host", ""), headers.get(b"origin"))
        path = scope["path"]
        if path not in OPEN_PATHS and not path.startswith("/page/"):
            self._check_key(path, headers.get(b"authorization", ""))
        length = headers.get(b"content-length", "0")
        if not length.isdecimal() or int(length) > self._service.settings.limits.body_bytes:
            raise self._too_large()
        self._check_room(path)

    def _check_room(self, path: str) -> None:
        if self._taken.get(path, 0) >= self._places:
            raise Refusal(503, "overloaded", "the service is busy: try again in a moment")

    @contextmanager
    def _place(self, path: str) -> Iterator[None]:
        """Take one of the places of a route; others have as many as come."""
        if path not in self._taken:
            yield
            return
        self._check_room(path)
        self._taken[path] += 1
        try:
            yield
        finally:
            self._taken[path] -= 1

    def _check_origin(self, host: str, origin: str | None) -> None:
        """Refuse other people's web pages, which a browser on this machine may have open."""
        settings = self._service.settings
        try:
            name = urlsplit(f"//{host}").hostname if host else None
        except ValueError:
            raise Refusal(400, "bad_request", "the host header is not a host") from None
        # A page can make its own name point at this machine; a name that is not ours tells.
        if self._service.loaded.keys is None and name not in {*_LOOPBACK_NAMES, settings.host}:
            raise Refusal(403, "forbidden", "without API keys, the host must be this machine")
        if origin is None or origin in settings.cors_origins:
            return
        if not host or origin.partition("://")[2] != host:
            raise Refusal(403, "forbidden", "pages of this origin may not ask")

    def _check_key(self, path: str, authorization: str) -> None:
        keys = self._service.loaded.keys
        if keys is None:
            return
        kind, _, key = authorization.partition(" ")
        scope = keys.scope(key.strip()) if kind.casefold() == "bearer" else None
        if scope is None:
            raise Refusal(401, "unauthorized", "send an API key: Authorization: Bearer KEY")
        if path.startswith("/admin/") and scope != "admin":
            raise Refusal(403, "forbidden", "this needs an API key of scope admin")

    async def _body(self, receive: Receive) -> bytes | None:
        """Read the whole body, as far as it may go; None if the client went away.

        Nobody takes up a thread before all of the request is here. A client that is too slow is
        the protocol's concern, see `protocol`.
        """
        most = self._service.settings.limits.body_bytes
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> Refusal:
        most = self._service.settings.limits.body_bytes
        return Refusal(413, "too_large", f"the body has more than {most} bytes")

    def _note(self, route: str, status: int, seconds: float) -> None:
        self._service.metrics.count_request(route, status, seconds)
        if self._service.settings.access_log:
            milliseconds = round(1000.0 * seconds, 3)
            log("request", {"route": route, "status": status, "milliseconds": milliseconds})


def _route(scope: Scope) -> str:
    """Return the template of the route that was taken: no id is in it."""
    route = scope.get("route")
    if route is not None:
        return str(route.path)
    path = str(scope["path"])
    return path if path in _KNOWN else "none"


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole body at once."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(refusal: Refusal, send: Send) -> None:
    answer = ErrorAnswer(error=ErrorDetail(code=refusal.code, message=refusal.message))
    body = answer.model_dump_json().encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if refusal.status == 503:
        headers.append((b"retry-after", RETRY_AFTER.encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
