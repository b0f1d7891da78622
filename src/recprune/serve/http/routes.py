"""The routes: check, ask, answer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np

from recprune.attributes.grammar import MOST_CHARACTERS
from recprune.serve.admission import WorkPool
from recprune.serve.configuration import Limits
from recprune.serve.engine.catalogue import Catalogue
from recprune.serve.engine.engine import DatedHistory, Engine, Found
from recprune.serve.engine.item_changes import (
    NoSuchItemError,
    amend_item,
    put_items,
    remove_item,
)
from recprune.serve.histories.histories import Event, HistoriesUnavailableError
from recprune.serve.http.errors import LimitError
from recprune.serve.http.json_route import JsonRoute
from recprune.serve.http.schemas import (
    ANSWERS,
    AddedItems,
    AddItemsRequest,
    AmendItemRequest,
    Answer,
    Answers,
    Asker,
    EventsAnswer,
    EventsRequest,
    FoundItem,
    FoundItems,
    Health,
    ItemAnswer,
    Readiness,
    RecommendRequest,
    Reloaded,
    RemovedItem,
    ScoredItem,
    SearchRequest,
    SimilarAnswer,
)
from recprune.serve.service import Service
from recprune.types import InputError, needs_extra

with needs_extra("serve"):
    from fastapi import FastAPI, Query, Response
    from fastapi.responses import FileResponse
    from fastapi.staticfiles import StaticFiles
    from pydantic import BaseModel

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])

_PAGE = Path(__file__).parents[1] / "page"


def add_routes(app: FastAPI, service: Service) -> None:
    """Add everything that the service answers."""
    _add_questions(app, service)
    _add_items(app, service)
    _add_operations(app, service)
    _add_page(app)


# Questions ---------------------------------------------------------------------------------------


def _add_questions(app: FastAPI, service: Service) -> None:
    limits = service.settings.limits

    @_question(app, "/recommend", Answers)
    async def recommend(asked: RecommendRequest) -> Response:
        """Recommend the next items to histories, or to users whose events were posted."""
        begun = time.monotonic()
        served = service.engine
        engine = served.now()
        engine.check_recommends()
        askers = asked.askers()
        _check_choice(asked, len(askers), limits)
        for asker in askers:
            _check_limit("history", len(asker.history or []), limits.history)
        users = [asker.user for asker in askers if asker.user is not None]
        kept: dict[str, list[tuple[str, float]]] = {}
        looked_up = 0.0
        choice = asked.choice(begun)
        if users:
            kept = await _looked_up(service, list(map(str, users)), choice.deadline)
            looked_up = time.monotonic() - begun
            service.metrics.count_stage("histories", looked_up)
        histories = [_dated_history(asker, kept) for asker in askers]
        before = {"histories": 1000.0 * looked_up} if users else {}

        def answered(moment: Engine) -> bytes:
            found = moment.recommend(
                histories,
                choice,
                exclude_seen=asked.exclude_seen,
                now=asked.time,
                states=service.states,
            )
            return _answers(service, moment, found, before)

        pool = _pool_for(service, asked)
        return _written(await pool.run(lambda: served.ask(engine, answered)))

    @_question(app, "/search", Answers)
    async def search(asked: SearchRequest) -> Response:
        """Find the best items for sequence embeddings from an encoder of your own."""
        begun = time.monotonic()
        served = service.engine
        engine = served.now()
        rows = asked.sequence_embeddings()
        _check_choice(asked, len(rows), limits)
        _check_limit("rerank", asked.rerank, limits.rerank)
        _check_limit("rerank times batch", asked.rerank * len(rows), limits.batch_items)
        if asked.explain:
            engine.check_explains()
        for row in rows:
            if len(row) != engine.width:
                raise InputError(
                    f"a sequence embedding has {len(row)} numbers, expected {engine.width}"
                )
        embeddings = _float32(rows)
        choice = asked.choice(begun)

        def answered(moment: Engine) -> bytes:
            return _answers(service, moment, moment.search(embeddings, choice), {})

        pool = _pool_for(service, asked)
        return _written(await pool.run(lambda: served.ask(engine, answered)))

    @_question(app, "/events", EventsAnswer)
    async def events(asked: EventsRequest) -> Response:
        """Append interactions. What is answered with 2xx survives; the next question sees it."""
        _check_limit("events", len(asked.events), limits.events)
        now = time.time()
        kept = [
            Event(
                str(event.user),
                str(event.item),
                now if event.timestamp is None else event.timestamp,
                event.key,
                comes_last=event.timestamp is None,
            )
            for event in asked.events
        ]
        new = await service.lookups.run(lambda: service.histories.append(kept))
        service.metrics.count_events(new)
        if service.folding is not None:
            service.folding.note(kept)
        return _json(EventsAnswer(received=len(kept), new=new))


def _question(
    app: FastAPI, path: str, answer: type[Any], *, method: str = "POST"
) -> Callable[[Handler], Handler]:
    """Have a function answer what is posted to a path."""

    def add(handler: Handler) -> Handler:
        app.router.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=answer,
            route_class_override=JsonRoute,
        )
        return handler

    return add


def _pool_for(service: Service, asked: RecommendRequest | SearchRequest) -> WorkPool:
    return service.visits if asked.explain else service.searches


async def _looked_up(
    service: Service, users: list[str], deadline: float | None
) -> dict[str, list[tuple[str, float]]]:
    """Return the histories of users, or say that they cannot be had in time."""
    left = None if deadline is None else deadline - time.monotonic()
    try:
        return await service.lookups.run(
            lambda: {user: service.histories.dated_history(user) for user in users}, left
        )
    except TimeoutError:
        raise HistoriesUnavailableError("not read within timeout_ms") from None


def _dated_history(asker: Asker, kept: dict[str, list[tuple[str, float]]]) -> DatedHistory:
    if asker.history is not None:
        return DatedHistory([*asker.history], asker.times)
    user = str(asker.user)
    events = kept[user]
    return DatedHistory([item for item, _ in events], [timestamp for _, timestamp in events], user)


def _check_choice(asked: RecommendRequest | SearchRequest, count: int, limits: Limits) -> None:
    _check_limit("k", asked.k, limits.k)
    _check_limit("batch", count, limits.batch)
    _check_limit("exclude", len(asked.exclude), limits.item_ids)
    if isinstance(asked.allow, list):
        _check_limit("allow", len(asked.allow), limits.item_ids)
    _check_limit("boosts", len(asked.boosts), limits.item_ids)
    _check_limit("k times batch", asked.k * count, limits.batch_items)
    if asked.explain and count > 1:
        raise LimitError("explain: one question at a time can be explained")


def _check_limit(name: str, value: int, most: int) -> None:
    if value > most:
        raise LimitError(f"{name} is {value}, the service allows {most}")


def _float32(rows: list[list[float]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    with np.errstate(over="ignore"):
        embeddings = np.array(rows, np.float32)
    if not np.isfinite(embeddings).all():
        raise InputError("a sequence embedding has a number beyond the range of float32")
    return embeddings


def _answers(
    service: Service, engine: Engine, found: list[Found], before: dict[str, float]
) -> bytes:
    """Return the answers as JSON.

    Called in the thread that found them: there may be thousands of items, and the event loop has
    others to attend to.
    """
    service.metrics.count_found(found)
    catalogue = engine.catalogue
    answers: list[Answer] = [
        {
            "items": _scored_items(catalogue, one.items, one.scores),
            "unknown": one.unknown,
            "by_popularity": one.by_popularity,
            "method": one.method,
            "exact": one.exact,
            "items_scored": one.items_scored,
            "gap": one.gap,
            "missing_share": one.missing_share,
            "reranked": one.reranked,
            "milliseconds": before | one.milliseconds,
            "explanation": one.explanation,
        }
        for one in found
    ]
    return ANSWERS.dump_json({"answers": answers, "version": engine.version})


def _scored_items(catalogue: Catalogue, items: list[int], scores: list[float]) -> list[ScoredItem]:
    return [
        {"item": item, "name": name, "score": score}
        for item, name, score in zip(
            catalogue.external_ids(items), map(catalogue.name, items), scores, strict=True
        )
    ]


# Items -------------------------------------------------------------------------------------------


def _add_items(app: FastAPI, service: Service) -> None:
    @app.get("/items", response_model=FoundItems)
    async def find_items(
        query: Annotated[str, Query(min_length=1, max_length=200, examples=["tea"])],
        limit: Annotated[int, Query(ge=1, le=100)] = 10,
    ) -> Response:
        """Find items whose name or id contains some words, popular ones first."""
        catalogue = service.engine.now().catalogue
        found = await service.items.run(lambda: catalogue.search(query, limit))
        return _json(
            FoundItems(
                items=[
                    FoundItem(item=catalogue.external_id(item), name=catalogue.name(item))
                    for item in found
                ]
            )
        )

    # Before what takes any path for an item.
    @app.get("/items/{item:path}/similar", response_model=SimilarAnswer)
    async def similar(
        item: str,
        k: Annotated[int, Query(ge=1)] = 10,
        where: Annotated[str | None, Query(max_length=MOST_CHARACTERS)] = None,
    ) -> Response:
        """Find the items most like one."""
        _check_limit("k", k, service.settings.limits.k)
        engine = service.engine.now()
        catalogue = engine.catalogue

        def answered() -> SimilarAnswer:
            asked = _found_item(catalogue, item)
            best, cosines = engine.similar(asked, k, where)
            return SimilarAnswer(
                item=catalogue.external_id(asked),
                name=catalogue.name(asked),
                items=_scored_items(catalogue, best, cosines),
                version=engine.version,
            )

        return _json(await service.searches.run(answered))

    @app.get("/items/{item:path}", response_model=ItemAnswer)
    async def item(item: str) -> Response:
        """Say what is known of an item."""
        engine = service.engine.now()
        return _json(await service.items.run(lambda: _known_of(engine, item)))

    @_question(app, "/items", AddedItems)
    async def add_items(asked: AddItemsRequest) -> Response:
        """Add items, all of them or none. What is answered with 2xx survives."""
        engine = service.engine
        live = engine.changing()
        given = asked.new_items()
        numbers = await service.changes.run(
            lambda: put_items(
                live, engine.catalogue, engine.attributes, given, replace=asked.replace
            )
        )
        return _json(AddedItems(numbers=numbers, items=live.num_present))

    @_question(app, "/items/{item:path}", ItemAnswer, method="PATCH")
    async def amend(asked: AmendItemRequest, item: str) -> Response:
        """Change the name of an item, or some attributes. What is answered with 2xx survives."""
        engine = service.engine
        live = engine.changing()
        said = asked.said()

        def changed() -> ItemAnswer:
            amend_item(live, engine.catalogue, engine.attributes, item, said)
            return _known_of(engine.now(), item)

        return _json(await service.changes.run(changed))

    @app.delete("/items/{item:path}", response_model=RemovedItem)
    async def remove(item: str) -> Response:
        """Remove an item: it is not recommended any more. What is answered with 2xx survives."""
        engine = service.engine
        live = engine.changing()
        await service.changes.run(lambda: remove_item(live, engine.catalogue, item))
        return _json(RemovedItem(items=live.num_present))


def _known_of(engine: Engine, item: str) -> ItemAnswer:
    catalogue = engine.catalogue
    found = _found_item(catalogue, item)
    return ItemAnswer(
        item=catalogue.external_id(found),
        name=catalogue.name(found),
        popularity=catalogue.popularity_of(found),
        code=engine.code_of(found),
        attributes=engine.attributes_of(found),
    )


def _found_item(catalogue: Catalogue, item: str) -> int:
    found = catalogue.find(item)
    if found < 0:
        raise NoSuchItemError("no such item in the catalogue")
    return found


# Operations --------------------------------------------------------------------------------------


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", response_model=Health)
    async def healthz() -> Response:
        """Say that the process is there."""
        return _json(Health(alive=True))

    @app.get("/readyz", response_model=Readiness)
    async def readyz() -> Response:
        """Say whether the service can answer and keep events."""
        engine = service.engine.now()
        await service.check_ready()
        return _json(
            Readiness(
                ready=True,
                kind=engine.kind,
                version=engine.version,
                items=engine.num_present,
                live=engine.live is not None,
                item_sets=sorted(engine.item_sets),
                attributes={} if engine.attributes is None else engine.attributes.kinds,
                has_names=engine.catalogue.has_names,
                reranks=engine.reranks,
                repeats=engine.recommender is not None and engine.recommender.repeats,
            )
        )

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        """Return the figures of all workers, for Prometheus."""
        text = await service.figures()
        return Response(text, media_type="text/plain; version=1.0.0; charset=utf-8")

    @app.post("/admin/reload", response_model=Reloaded)
    async def reload() -> Response:
        """Load the folder anew in all workers, and swap it in if all of them find it good."""
        return _json(Reloaded(**asdict(await service.reload_everywhere())))


# The page ----------------------------------------------------------------------------------------


def _add_page(app: FastAPI) -> None:
    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return FileResponse(_PAGE / "index.html", media_type="text/html")

    @app.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    async def docs() -> Response:
        return FileResponse(_PAGE / "docs.html", media_type="text/html")

    app.mount("/page", StaticFiles(directory=_PAGE), name="page")


def _json(model: BaseModel) -> Response:
    return _written(model.model_dump_json())


def _written(text: str | bytes) -> Response:
    return Response(text, media_type="application/json")
