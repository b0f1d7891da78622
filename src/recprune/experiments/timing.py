"""Methods take turns: all meet the same moods of the machine, so their ratios can be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune.index import Index
from recprune.methods import Method
from recprune.peers.peer import Peer
from recprune.results import RECORD
from recprune.types import (
    Float32Array,
    Float64Array,
    Int64Array,
    Json,
    Progress,
    needs_extra,
    no_progress,
)

# A sequence embedding [d] and k → the ids [k], and what the search says about itself, if it does.
Search: TypeAlias = Callable[[Float32Array, int], tuple[Int64Array, NDArray[Any] | None]]


@dataclass(frozen=True, eq=False)
class Timed:
    """What the searches of one method took and found, query by query."""

    microseconds: Float64Array
    numbers: Int64Array  # of the queries that it met
    ids: Int64Array  # [queries, k]
    records: NDArray[Any] | None  # of the native core, one for each query

    def summary(self) -> Json:
        """Return the figures that go into a table."""
        p50, p95, p99 = (float(np.percentile(self.microseconds, at)) for at in (50, 95, 99))
        figures: Json = {
            "queries": len(self.microseconds),
            "p50_us": p50,
            "p95_us": p95,
            "p99_us": p99,
        }
        if self.records is not None:
            for name in ("steps", "items_scored", "items_touched", "bytes_touched"):
                figures[name] = float(np.median(self.records[name]))
                figures[f"{name}_p95"] = float(np.percentile(self.records[name], 95))
        return figures


def index_search(index: Index, method: str | Method) -> Search:
    """Return the search of an index by one method, as it is timed: a whole call from Python."""

    def search(query: Float32Array, k: int) -> tuple[Int64Array, NDArray[Any]]:
        found = index.search(query, k, method=method)
        return found.ids, found.stats.raw

    return search


def peer_search(peer: Peer) -> Search:
    """Return the search of a peer."""
    return lambda query, k: (peer.search(query, k), None)


def interleaved(
    searches: Mapping[str, Search],
    queries: Float32Array,
    k: int,
    *,
    seed: int,
    block: int = 50,
    limits: Mapping[str, int] | None = None,
    progress: Progress = no_progress,
) -> dict[str, Timed]:
    """Time every search on every query, in blocks, in an order that changes with every block.

    A block is long enough that each method finds the caches as a service that runs only this
    method would, and begins with one that is not timed. `limits` are how many queries the slow ones
    get; they meet them in equal shares of all blocks. All stay on one thread.
    """
    with needs_extra("data"):
        from threadpoolctl import threadpool_limits
    rng = np.random.default_rng(seed)
    names = list(searches)
    numbers: dict[str, list[int]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    ids: dict[str, list[Int64Array]] = {name: [] for name in names}
    raw: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    blocks = range(0, len(queries), block)
    with threadpool_limits(1):
        for block_number, start in enumerate(blocks):
            progress(f"{block_number + 1} of {len(blocks)} blocks of queries")
            for name in rng.permutation(names).tolist():
                search = searches[name]
                share = block
                if limits and name in limits:
                    share = min(block, -(-limits[name] // len(blocks)))
                search(queries[start - 1], k)  # caches, and what is built on first use
                for number in range(start, min(start + share, len(queries))):
                    begun = time.perf_counter()
                    found, record = search(queries[number], k)
                    seconds[name].append(time.perf_counter() - begun)
                    numbers[name].append(number)
                    ids[name].append(found)
                    if record is not None:
                        raw[name].append(record)
    return {
        name: Timed(
            1e6 * np.array(seconds[name]),
            np.array(numbers[name]),
            np.array(ids[name]),
            np.concatenate(raw[name]).view(RECORD)[:, 0] if raw[name] else None,
        )
        for name in names
    }
