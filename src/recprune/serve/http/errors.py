"""Errors: which answer a fault is, always in the same form."""

from __future__ import annotations

import re
from typing import Any

from recprune.serve.engine.engine import NoEncoderError
from recprune.serve.histories.histories import HistoriesUnavailableError
from recprune.serve.http.gate import OverloadedError
from recprune.serve.http.guard import RETRY_AFTER
from recprune.serve.http.schemas import ErrorAnswer, ErrorDetail
from recprune.serve.logs import log_problem
from recprune.serve.metrics import Metrics
from recprune.serve.service import ReloadError
from recprune.shards.folder import ShardLostError
from recprune.types import InputError, RecpruneError, needs_extra

with needs_extra("serve"):
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

_TYPE_NAME = re.compile(r"int|str|constrained-str|list\[.*\]")  # as pydantic calls them
_CODES = {400: "bad_request", 404: "not_found", 405: "not_allowed"}


class LimitError(InputError):
    """A request asks for more than the service allows."""


class NotFoundError(RecpruneError):
    """There is no such item."""


# Which answer a fault is; the first that fits.
_FAULTS: list[tuple[type[RecpruneError], int, str]] = [
    (NoEncoderError, 409, "no_encoder"),
    (ReloadError, 409, "reload_failed"),
    (NotFoundError, 404, "not_found"),
    (LimitError, 422, "limit"),
    (InputError, 422, "invalid"),
]


def add_errors(app: FastAPI, metrics: Metrics) -> None:
    """Answer every fault in the one way that is described."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        errors = error.errors()  # what was sent is not repeated: it may be anything
        kind = request.headers.get("content-type", "").partition(";")[0].strip().casefold()
        if request.method == "POST" and not kind.endswith("json"):
            return _error(422, "invalid", "send the header content-type: application/json")
        if errors[0]["type"] == "json_invalid":
            reason = errors[0]["ctx"]["error"]
            return _error(400, "invalid_json", f"not readable as JSON: {reason}")
        where = _place(errors[0])
        reasons = dict.fromkeys(str(one["msg"]) for one in errors if _place(one) == where)
        return _error(422, "invalid", f"{where}: {', or '.join(reasons)}")

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        code = _CODES.get(error.status_code, "refused")
        return _error(error.status_code, code, str(error.detail).lower(), error.headers)

    @app.exception_handler(HistoriesUnavailableError)
    async def unavailable(_: Request, error: HistoriesUnavailableError) -> Response:
        log_problem("histories unavailable", {"reason": str(error)})  # it names a path or a host
        message = "histories cannot be read or written just now: try again in a moment"
        return _error(503, "histories_unavailable", message)

    @app.exception_handler(ShardLostError)
    async def lost(_: Request, error: ShardLostError) -> Response:
        log_problem("shard lost", {"reason": str(error)})  # it may name a path
        message = "a part of the catalogue cannot be searched just now: try again in a moment"
        return _error(503, "shard_lost", message)

    @app.exception_handler(OverloadedError)
    async def overloaded(_: Request, error: OverloadedError) -> Response:
        metrics.count_turned_away()
        return _error(503, "overloaded", str(error))

    @app.exception_handler(RecpruneError)
    async def fault(_: Request, error: RecpruneError) -> Response:
        for kind, status, code in _FAULTS:
            if isinstance(error, kind):
                return _error(status, code, str(error))
        log_problem("unexpected fault", {}, error)
        return _error(500, "internal", "something went wrong here")


def _place(error: Any) -> str:
    """Return where in a request a fault is, leaving out which of several types it fails to be."""
    parts = [str(part) for part in error["loc"][1:]]
    return ".".join(part for part in parts if not _TYPE_NAME.fullmatch(part)) or "the request"


def _error(status: int, code: str, message: str, headers: Any = None) -> Response:
    answer = ErrorAnswer(error=ErrorDetail(code=code, message=message))
    given = dict(headers or {}) | ({"retry-after": RETRY_AFTER} if status == 503 else {})
    return JSONResponse(answer.model_dump(), status, headers=given)
