"""Routes that take a JSON body and nothing else: one pass reads and checks it.

FastAPI would read JSON into Python objects first, and look in every request for all that a route
may depend on, which takes longer than reading the body does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

from recprune.serve.http.errors import HttpError
from recprune.types import needs_extra

with needs_extra("serve"):
    from fastapi import Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.routing import APIRoute
    from pydantic import BaseModel, ValidationError

Asked = TypeVar("Asked", bound=BaseModel)


class JsonRoute(APIRoute):
    """A route whose function has the body as its only argument."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = cast(Callable[[BaseModel], Awaitable[Response]], self.endpoint)
        [body] = self.dependant.body_params
        kind = cast(type[BaseModel], body.field_info.annotation)

        async def handle(request: Request) -> Response:
            given = request.headers.get("content-type", "")
            return await answer(parsed(kind, given, await request.body()))

        return handle


def parsed(kind: type[Asked], content_type: str, body: bytes) -> Asked:
    """Return what a body asks for."""
    if not content_type.partition(";")[0].strip().casefold().endswith("json"):
        raise HttpError(422, "invalid", "send the header content-type: application/json")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        # A place begins with the part of the request, as FastAPI has it.
        placed = [{**one, "loc": ("body", *one["loc"])} for one in found]
        raise RequestValidationError(placed) from None
