"""What stands before every route: which requests may pass, how many at a time, and their log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from urllib.parse import urlsplit

from recprune.serve.admission import Admission, OverloadedError
from recprune.serve.http.errors import HttpError, as_http_error
from recprune.serve.keys import Scope as KeyScope
from recprune.serve.logs import log
from recprune.serve.service import Service
from recprune.types import needs_extra

with needs_extra("serve"):
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Without a key, as is `/page/`.
OPEN_PATHS = frozenset({"/", "/docs", "/healthz", "/readyz", "/openapi.json"})
_ITEMS = "/items"
# Posted to, so many at a time; they alone have a body, and what changes one item.
_LIMITED_PATHS = ("/recommend", "/search", "/events", _ITEMS)
_KNOWN = OPEN_PATHS.union(_LIMITED_PATHS)  # logged by name even if refused before a route is found
_BODIES = 64  # of the greatest size, that may be arriving at a time; megabytes, with the default
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


class Guard:
    """ASGI middleware around the whole application.

    What is posted to a path in `direct` goes straight to its route: errors end here in any case,
    and what FastAPI has between a request and its route is of no use to it.
    """

    def __init__(self, app: ASGIApp, service: Service, direct: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._direct = direct
        self._service = service
        limits = service.settings.limits
        # A request is in flight from its last byte to its answer: reading a question takes longer
        # than searching, and requests that will be refused must not be read at all.
        most, refused = limits.running + limits.waiting, service.metrics.count_turned_away
        self._arriving = 0  # bytes of bodies that are not whole yet
        self._admissions = {path: Admission(most, on_refused=refused) for path in _LIMITED_PATHS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            admission = self._admission(scope)
            # Elsewhere a body is of no use; the protocol drops it once the answer is written.
            body = await self._body(receive) if admission else b""
            if body is not None:
                app = self._app
                if scope["method"] == "POST":
                    app = self._direct.get(scope["path"], app)
                with admission.admitted() if admission else nullcontext():
                    await app(scope, _replaying(body, receive), noted)
        except Exception as error:  # whatever it is, the client gets a clear answer
            answer = as_http_error(error, _route(scope))
            if not status:
                if any(name == b"expect" for name, _ in scope["headers"]):
                    # It asked before sending a body, which it will not send: what comes next over
                    # this connection would be taken for it.
                    answer.headers["connection"] = "close"
                await _send(answer, noted)
        finally:
            self._note(_route(scope), status, time.perf_counter() - begun)

    def _check(self, scope: Scope) -> None:
        """Refuse, before anything is read, what may not be asked and what there is no room for."""
        headers = {
            name: value.decode("latin-1") for name, value in scope["headers"]
        }  # of a repeated header, the last
        self._check_origin(headers.get(b"host", ""), headers.get(b"origin"))
        path = scope["path"]
        if path not in OPEN_PATHS and not path.startswith("/page/"):
            self._check_key(scope, headers.get(b"authorization", ""))
        length = headers.get(b"content-length", "0")
        if not length.isdecimal() or int(length) > self._service.settings.limits.body_bytes:
            raise self._too_large()
        admission = self._admission(scope)
        if admission is not None:
            admission.refuse_if_full()

    def _admission(self, scope: Scope) -> Admission | None:
        """Return what counts requests with a body to a path; None where none is read."""
        path, method = scope["path"], scope["method"]
        if path == _ITEMS and method != "POST":  # found by words
            return None
        if path.startswith(f"{_ITEMS}/") and method == "PATCH":
            path = _ITEMS
        return self._admissions.get(path)

    def _check_origin(self, host: str, origin: str | None) -> None:
        """Refuse other people's web pages, which a browser on this machine may have open."""
        settings = self._service.settings
        try:
            name = urlsplit(f"//{host}").hostname if host else None
        except ValueError:
            raise HttpError(400, "bad_request", "the host header is not a host") from None
        # A page can make its own name point at this machine; a name that is not ours gives it away.
        if self._service.keys is None and name not in {*_LOOPBACK_NAMES, settings.host}:
            raise HttpError(403, "forbidden", "without API keys, the host must be this machine")
        if origin is None or origin in settings.cors_origins:
            return
        if not host or origin.partition("://")[2] != host:
            raise HttpError(403, "forbidden", "pages of this origin may not ask")

    def _check_key(self, asked: Scope, authorization: str) -> None:
        file = self._service.keys
        if file is None:
            return
        kind, _, given = authorization.partition(" ")
        key = file.current().find(given.strip()) if kind.casefold() == "bearer" else None
        if key is None:
            raise HttpError(401, "unauthorized", "send an API key: Authorization: Bearer KEY")
        needed = _needed_scope(asked["method"], asked["path"])
        if not key.allows(needed):
            raise HttpError(403, "forbidden", f"this needs an API key of scope {needed}")
        seconds = self._service.rates.take(key)
        if seconds > 0.0:
            self._service.metrics.count_rate_limited()
            raise HttpError(
                429,
                "too_many_requests",
                f"this API key is good for {key.rate:g} requests a second",
                {"retry-after": str(math.ceil(seconds))},
            )

    async def _body(self, receive: Receive) -> bytes | None:
        """Read the whole body, as far as it may go; None if the client went away.

        No thread is taken up before all of the request is here. A client that is too slow is the
        protocol's concern, see `protocol`.
        """
        most = self._service.settings.limits.body_bytes
        parts: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                size += len(part)
                self._arriving += len(part)
                if size > most:
                    raise self._too_large()
                if self._arriving > _BODIES * most:
                    self._service.metrics.count_turned_away()
                    raise OverloadedError("too much is being sent: try again in a moment")
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
        finally:
            self._arriving -= size

    def _too_large(self) -> HttpError:
        most = self._service.settings.limits.body_bytes
        return HttpError(413, "too_large", f"the body has more than {most} bytes")

    def _note(self, route: str, status: int, seconds: float) -> None:
        self._service.metrics.count_request(route, status, seconds)
        if self._service.settings.access_log:
            milliseconds = round(1000.0 * seconds, 3)
            log("request", {"route": route, "status": status, "milliseconds": milliseconds})


def _needed_scope(method: str, path: str) -> KeyScope:
    """Return which scope a key must have for a path."""
    if path.startswith("/admin/"):
        return "admin"
    if method not in ("GET", "HEAD") and (path == _ITEMS or path.startswith(f"{_ITEMS}/")):
        return "items"
    return "events" if path == "/events" else "ask"


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


async def _send(error: HttpError, send: Send) -> None:
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body})
