"""What the service is compared with: a route that returns a constant, and FAISS behind our routes.

uvicorn --factory benchmarks.serve_peers:floor
RECPRUNE_BENCH_FOLDER=out/serve-index uvicorn --factory benchmarks.serve_peers:with_faiss
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from fastapi import FastAPI

from recprune.search.index import Index
from recprune.search.methods import Method
from recprune.search.top_k import RECORD, RECORD_WORDS, SearchStats, TopK
from recprune.serve.configuration import Limits, ServeSettings
from recprune.serve.http.app import create_app
from recprune.serve.service import open_service
from recprune.types import Float32Array

FOLDER = "RECPRUNE_BENCH_FOLDER"
RUNNING = "RECPRUNE_BENCH_RUNNING"
WAITING = 64  # requests; enough that none is refused, whatever the number of connections


def floor() -> FastAPI:
    """Return the least that FastAPI can do for a request."""
    app = FastAPI()

    @app.post("/search")
    async def constant() -> dict[str, int]:
        return {"answer": 42}

    return app


class FaissIndex:
    """FAISS IndexPQ with the same codes and vectors, in the place of an index."""

    def __init__(self, index: Index) -> None:
        import faiss

        faiss.omp_set_num_threads(1)
        self._peer = index.to_faiss()
        self.num_items = index.num_items
        self.width = index.width

    def search(
        self, embeddings: Float32Array, k: int, *, method: Method, exclude: Any, allow: Any
    ) -> TopK:
        """Score every item; what an index can do beside that is not asked for here."""
        del method, exclude, allow
        begun = time.perf_counter_ns()
        scores, ids = self._peer.search(embeddings, k)
        records = np.zeros(len(embeddings), RECORD)
        records["exact"] = records["steps"] = 1
        records["items_scored"] = records["items_touched"] = self.num_items
        records["threshold"] = scores[:, -1]
        records["upper_bound"] = -np.inf
        records["nanoseconds"] = time.perf_counter_ns() - begun
        return TopK(ids, scores, SearchStats(records.view(np.int64).reshape(-1, RECORD_WORDS)))


def with_faiss() -> FastAPI:
    """Return the service with FAISS in the place of our search."""
    limits = Limits(running=int(os.environ.get(RUNNING, "1")), waiting=WAITING)
    settings = ServeSettings(folder=Path(os.environ[FOLDER]), access_log=False, limits=limits)
    service = open_service(settings)
    own = service.engine.own_index
    if own is None:
        raise SystemExit("FAISS takes over a whole index, not one in shards")
    engine = replace(service.engine, index=cast(Index, FaissIndex(own)))
    service.engine = engine
    return create_app(settings, service)
