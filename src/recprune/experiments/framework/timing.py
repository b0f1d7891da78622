"""Methods take turns: what slows the machine down slows all of them, and ratios can be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune import _native
from recprune.experiments.peers.peer import Peer
from recprune.search.index import Index
from recprune.search.methods import Method
from recprune.search.top_k import RECORD
from recprune.types import (
    Float32Array,
    Float64Array,
    InputError,
    Int64Array,
    Json,
    Progress,
    RecpruneError,
    needs_extra,
    no_progress,
    random_generator,
)

# The ids [k], their scores [k] and the native record: peers return the ids alone.
Answer: TypeAlias = tuple[Int64Array, Float32Array | None, NDArray[Any] | None]
Search: TypeAlias = Callable[[Float32Array, int], Answer]  # of a sequence embedding [d], and k
COMPARED = "ids and score bits"  # by `agreement`; part of the settings where it is used
NEARLY = 1.05  # times this far apart count as the same
# Queries from which on a percentile means something: five must lie beyond it.
_LEAST = {"p50_us": 1, "p95_us": 100, "p99_us": 500}


@dataclass(frozen=True, eq=False)
class Timed:
    """What the searches of one method took and found, query by query."""

    microseconds: Float64Array
    numbers: Int64Array  # of the queries that it met
    ids: Int64Array  # [queries, k]
    scores: Float32Array | None  # [queries, k], of our own methods
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

    def share_by(self, method: str) -> float:
        """Return the share of the queries that this method answered, chosen by `auto` or not."""
        if self.records is None:
            raise AssertionError("a search of an index leaves records")
        return float((self.records["method"] == _native.Method[method].value).mean())


def milliseconds(entry: Json, name: str, digits: int = 3) -> str:
    """Write a percentile of a summary for a table; empty where it rests on too few queries."""
    if entry["queries"] < _LEAST[name]:
        return ""
    return f"{entry[name] / 1000:,.{digits}f}"


def agreement(timed: Mapping[str, Timed]) -> Json:
    """Return on how many queries each of our methods gave the ids and score bits of the first.

    The first must have met all queries. A difference is a bug, and ends the experiment.
    """
    (first, reference), *_ = timed.items()
    for name, found in timed.items():
        if found.scores is None or reference.scores is None:
            raise AssertionError("searches of an index have scores")
        same_ids = np.array_equal(found.ids, reference.ids[found.numbers])
        bits, expected = (array.view(np.uint32) for array in (found.scores, reference.scores))
        if not same_ids or not np.array_equal(bits, expected[found.numbers]):
            raise RecpruneError(f"{name} and {first} differ in their answers: this is a bug")
    return {name: len(found.numbers) for name, found in timed.items()}


def agreement_in_words(agreed: Json | None) -> str:
    """Say on how many queries methods agreed; nothing for records without that figure."""
    if not agreed:
        return ""
    most = max(agreed.values())
    fewer = [f"`{name}` answered {count:,}" for name, count in agreed.items() if count < most]
    return (
        f"All {len(agreed)} ways to search gave the same items and the same bits of their scores, "
        f"on every one of {most:,} queries" + (f" ({', '.join(fewer)} of them)." if fewer else ".")
    )


def recall(found: Int64Array, exact: Int64Array) -> float:
    """Return the share of the exact items [queries, k] that was found; −1 stands for none."""
    hit = (exact[:, :, None] == found[:, None, :]).any(2) & (exact >= 0)
    return float(hit.sum() / max(1, (exact >= 0).sum()))


def unsuited(index: Index, method: str | Method) -> str | None:
    """Say why an index cannot be searched by a method, or return None."""
    try:
        index.search(np.ones(index.width, np.float32), 1, method=method)
    except InputError as error:
        return str(error)
    return None


def index_search(index: Index, method: str | Method, cutoff: int | None = None) -> Search:
    """Return the search of an index by one method, as it is timed: a whole call from Python.

    With a `cutoff`, it has a K of its own.
    """

    def search(query: Float32Array, k: int) -> Answer:
        found = index.search(query, k if cutoff is None else cutoff, method=method)
        return found.ids, found.scores, found.stats.raw

    return search


def peer_search(peer: Peer) -> Search:
    return lambda query, k: (peer.search(query, k), None, None)


def side_by_side(
    models: Sequence[Mapping[str, Search]],
    queries: Sequence[Float32Array],
    k: int,
    *,
    seed: int,
    limits: Mapping[str, int] | None = None,
    progress: Progress = no_progress,
) -> list[dict[str, Timed]]:
    """Time the searches of several models as `interleaved` does; return them by model.

    Every model has its own sequence embeddings: side by side in one row, each search takes its own,
    so that all meet the same users at about the same time. `limits` go by the name of a search.
    """
    searches: dict[str, Search] = {}
    start = 0
    for at, (own, embeddings) in enumerate(zip(models, queries, strict=True)):
        end = start + embeddings.shape[1]
        for name, search in own.items():
            searches[f"{at} {name}"] = _of_columns(search, start, end)
        start = end
    fewer = {
        f"{at} {name}": limit
        for at, own in enumerate(models)
        for name, limit in (limits or {}).items()
        if name in own
    }
    rows = np.concatenate(queries, 1)
    timed = interleaved(searches, rows, k, seed=seed, limits=fewer, progress=progress)
    return [{name: timed[f"{at} {name}"] for name in own} for at, own in enumerate(models)]


def _of_columns(search: Search, start: int, end: int) -> Search:
    return lambda row, k: search(row[start:end], k)


def interleaved(
    searches: Mapping[str, Search],
    queries: Float32Array,
    k: int,
    *,
    seed: int,
    block: int = 50,
    warm: int = 1,
    limits: Mapping[str, int] | None = None,
    progress: Progress = no_progress,
) -> dict[str, Timed]:
    """Time every search on every query, in blocks, in an order that changes with every block.

    A block is long enough that each method finds the caches as a service that runs only this
    method would, and begins with `warm` queries that are not timed. `limits` are how many queries
    the slow ones get; they meet them in equal shares of all blocks, after one that is not timed.
    All stay on one thread.
    """
    with needs_extra("data"):
        from threadpoolctl import threadpool_limits
    rng = random_generator(seed)
    names = list(searches)
    numbers: dict[str, list[int]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    ids: dict[str, list[Int64Array]] = {name: [] for name in names}
    scores: dict[str, list[Float32Array]] = {name: [] for name in names}
    raw: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    blocks = range(0, len(queries), block)
    with threadpool_limits(1):
        for block_number, start in enumerate(blocks):
            progress(f"{block_number + 1} of {len(blocks)} blocks of queries")
            for name in rng.permutation(names).tolist():
                search = searches[name]
                share, untimed = block, warm
                if limits and name in limits:
                    share, untimed = min(block, -(-limits[name] // len(blocks))), 1
                for number in range(start - untimed, start):  # caches, what is built on first use
                    search(queries[number % len(queries)], k)
                for number in range(start, min(start + share, len(queries))):
                    begun = time.perf_counter()
                    found, scored, record = search(queries[number], k)
                    seconds[name].append(time.perf_counter() - begun)
                    numbers[name].append(number)
                    ids[name].append(found)
                    if scored is not None:
                        scores[name].append(scored)
                    if record is not None:
                        raw[name].append(record)
    return {
        name: Timed(
            1e6 * np.array(seconds[name]),
            np.array(numbers[name]),
            np.array(ids[name]),
            np.array(scores[name]) if scores[name] else None,
            np.concatenate(raw[name]).view(RECORD)[:, 0] if raw[name] else None,
        )
        for name in names
    }
