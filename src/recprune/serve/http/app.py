"""The application: routes, errors and guard put together, and described in openapi.json."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from recprune.serve.configuration import ServeSettings
from recprune.serve.http.errors import add_errors
from recprune.serve.http.guard import OPEN_PATHS, Guard
from recprune.serve.http.json_route import json_routes
from recprune.serve.http.routes import add_routes
from recprune.serve.http.schemas import ErrorAnswer
from recprune.serve.service import Service, open_service
from recprune.types import VERSION, needs_extra

with needs_extra("serve"):
    from fastapi import FastAPI
    from starlette.middleware.cors import CORSMiddleware

_DESCRIPTION = (
    "Exact top-K recommendation. Where the service has API keys, send one with every request: "
    "`Authorization: Bearer KEY`. Every answer that is not 2xx has an `error` with a `code` and a "
    "`message`; one of 503 says in `Retry-After` when to come back."
)


def create_app(settings: ServeSettings, service: Service | None = None) -> FastAPI:
    """Return the application; without a service, it opens one of its own."""
    served = service or open_service(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(served.close)

    app = FastAPI(
        title="recprune",
        version=VERSION,
        description=_DESCRIPTION,
        docs_url=None,  # theirs load scripts from elsewhere; our own page works offline
        redoc_url=None,
        lifespan=lifespan,
        responses={
            "4XX": {"model": ErrorAnswer, "description": "The request cannot be answered."},
            "5XX": {"model": ErrorAnswer, "description": "Not now, or a fault of ours."},
            422: {"model": ErrorAnswer, "description": "The request is not what is expected."},
        },
    )
    add_routes(app, served)
    add_errors(app)
    _describe_keys(app, needed=settings.keys_file is not None)
    app.openapi()  # made now, not while the first who asks for it and all others wait
    app.add_middleware(Guard, service=served, direct=json_routes(app))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


def _describe_keys(app: FastAPI, *, needed: bool) -> None:
    """Say in openapi.json how a key is sent, and, where there are keys, which routes need one."""
    described = app.openapi

    def with_keys() -> dict[str, Any]:
        schema = described()
        scheme = {"type": "http", "scheme": "bearer", "description": "Made by `recprune keys add`."}
        schema["components"]["securitySchemes"] = {"key": scheme}
        for path, operations in schema["paths"].items():
            if needed and path not in OPEN_PATHS:
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
        return schema

    app.openapi = with_keys  # type: ignore[method-assign]
