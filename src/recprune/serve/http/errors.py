"""Errors: which answer a fault is, and its one form."""

from __future__ import annotations

import re
from typing import Any

from recprune.serve.admission import OverloadedError
from recprune.serve.engine.engine import NoEncoderError
from recprune.serve.engine.item_changes import (
    CatalogueUnavailableError,
    ItemExistsError,
    NoLiveError,
    NoSuchItemError,
)
from recprune.serve.histories.histories import HistoriesUnavailableError
from recprune.serve.http.schemas import ErrorAnswer, ErrorDetail
from recprune.serve.logs import log_problem
from recprune.serve.service import ReloadError
from recprune.shards.folder import ShardBusyError, ShardLostError
from recprune.types import InputError, RecpruneError, needs_extra

with needs_extra("serve"):
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

_RETRY_AFTER = "1"  # seconds
_TYPE_NAME = re.compile(r"(constrained-)?(int|str)|list\[.*\]")  # as pydantic calls them
_CODES = {400: "bad_request", 404: "not_found", 405: "not_allowed"}


class LimitError(InputError):
    """A request asks for more than the service allows."""


class HttpError(Exception):
    """An answer that is not 2xx: its status, its body and the headers that belong to it."""

    def __init__(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        answer = ErrorAnswer(error=ErrorDetail(code=code, message=message))
        self.body = answer.model_dump_json().encode()
        self.headers = {
            "content-type": "application/json",
            "content-length": str(len(self.body)),
            **({"retry-after": _RETRY_AFTER} if status == 503 else {}),
            **({"www-authenticate": "Bearer"} if status == 401 else {}),
            **(headers or {}),
        }


# Which answer a fault is; the first that fits.
_FAULTS: list[tuple[type[RecpruneError], int, str]] = [
    (OverloadedError, 503, "overloaded"),
    (ShardBusyError, 503, "overloaded"),
    (NoEncoderError, 409, "no_encoder"),
    (ReloadError, 409, "reload_failed"),
    (NoLiveError, 409, "no_live_index"),
    (ItemExistsError, 409, "item_exists"),
    (NoSuchItemError, 404, "not_found"),
    (LimitError, 422, "limit"),
    (InputError, 422, "invalid"),
]


def as_http_error(error: Exception, route: str | None = None) -> HttpError:
    """Return the answer to a fault. What its message may tell of this machine goes to the log."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HistoriesUnavailableError):
        log_problem("histories unavailable", {"reason": str(error)})  # it names a path or a host
        message = "histories cannot be read or written just now: try again in a moment"
        return HttpError(503, "histories_unavailable", message)
    if isinstance(error, ShardLostError):
        log_problem("shard lost", {"reason": str(error)})  # it may name a path
        message = "a part of the catalogue cannot be searched just now: try again in a moment"
        return HttpError(503, "shard_lost", message)
    if isinstance(error, CatalogueUnavailableError):
        log_problem("catalogue unavailable", {"reason": str(error)})  # it names a path
        message = "the catalogue cannot be changed just now: try again in a moment"
        return HttpError(503, "catalogue_unavailable", message)
    for kind, status, code in _FAULTS:
        if isinstance(error, kind):
            return HttpError(status, code, str(error))
    log_problem("unexpected error", {"route": route} if route is not None else {}, error)
    return HttpError(500, "internal", "something went wrong here")


def add_errors(app: FastAPI) -> None:
    """Answer every fault in the one form that is described."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _response(as_http_error(error))

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        code = _CODES.get(error.status_code, "refused")
        message, headers = str(error.detail).lower(), dict(error.headers or {})
        return _response(HttpError(error.status_code, code, message, headers))

    @app.exception_handler(RecpruneError)
    async def fault(_: Request, error: RecpruneError) -> Response:
        return _response(as_http_error(error))


def _invalid(error: RequestValidationError) -> HttpError:
    errors = error.errors()  # what was sent is not repeated: it may be anything
    if errors[0]["type"] == "json_invalid":
        reason = errors[0]["ctx"]["error"]
        return HttpError(400, "invalid_json", f"not readable as JSON: {reason}")
    where = _place(errors[0])
    reasons = dict.fromkeys(str(one["msg"]) for one in errors if _place(one) == where)
    return HttpError(422, "invalid", f"{where}: {', or '.join(reasons)}")


def _place(error: Any) -> str:
    """Return where in a request a fault is, leaving out which of several types it fails to be."""
    parts = [str(part) for part in error["loc"][1:]]
    return ".".join(part for part in parts if not _TYPE_NAME.fullmatch(part)) or "the request"


def _response(error: HttpError) -> Response:
    return Response(error.body, error.status, error.headers)
