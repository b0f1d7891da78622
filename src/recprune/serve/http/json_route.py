"""Routes that take a JSON body and nothing else: one pass reads and checks it.

FastAPI would read JSON into Python objects first, and look in every request for all that a route
may depend on, which takes longer than reading the body does. What it describes stays as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from recprune.serve.http.errors import HttpError
from recprune.types import needs_extra

with needs_extra("serve"):
    from fastapi import FastAPI, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.routing import APIRoute
    from pydantic import BaseModel, ValidationError
    from starlette.types import ASGIApp, Receive, Scope, Send

_LONGEST_NAME = 100  # characters of a field's name that others are held against
Asked = TypeVar("Asked", bound=BaseModel)


class JsonRoute(APIRoute):
    """A route whose function has the body as its only argument."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        [body] = self.dependant.body_params
        kind = cast(type[BaseModel], body.field_info.annotation)
        answer = cast(Callable[..., Awaitable[Response]], self.endpoint)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            content_type = dict(scope["headers"]).get(b"content-type", b"")
            message = await receive()  # the guard has read the body, and gives all of it
            asked = parsed(kind, content_type, message["body"])
            response = await answer(asked, **scope.get("path_params", {}))
            await response(scope, receive, send)

        self.app = app


def json_routes(app: FastAPI) -> dict[str, ASGIApp]:
    """Return what answers where a JSON body is posted to, by path."""
    return {
        route.path: route.app
        for route in app.routes
        if isinstance(route, JsonRoute) and "POST" in (route.methods or ())
    }


def parsed(kind: type[Asked], content_type: bytes, body: bytes) -> Asked:
    """Return what a body asks for."""
    if not content_type.partition(b";")[0].strip().lower().endswith(b"json"):
        raise HttpError(422, "invalid", "send the header content-type: application/json")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        # A place begins with the part of the request, as FastAPI has it.
        placed = [
            {**one, "loc": ("body", *one["loc"]), "msg": _message(one, kind)} for one in found
        ]
        raise RequestValidationError(placed) from None


def _message(error: Any, kind: type[BaseModel]) -> str:
    """Say what is wrong as the rest of the service does."""
    if error["type"] != "extra_forbidden":
        return str(error["msg"]).removeprefix("Value error, ")
    *parents, name = error["loc"]
    fields = [] if parents else [*kind.model_fields]
    close = difflib.get_close_matches(str(name)[:_LONGEST_NAME], fields, 1)
    return "no such field" + (f", did you mean {close[0]}?" if close else "")
