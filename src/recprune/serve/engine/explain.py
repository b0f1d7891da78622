"""What happened in one query: which items won and why, and what the engines visited.

Everything is asked of the real engines, or follows from the sub-item scores alone. Plain numbers
and lists throughout, so that an answer can be written as JSON; −∞ and "none" are null there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recprune.models.boost_heads import add_boosts
from recprune.search.index import Index
from recprune.search.methods import METHODS, Default, Method, RecJPQPrune, Scan
from recprune.search.question import IndexShape, boosts_of, checked_question, eligible
from recprune.search.reference import best, score_items
from recprune.search.top_k import TopK
from recprune.serve.configuration import METHOD_BYTES
from recprune.types import Boosts, Float32Array, InputError, Int64Array

_REPEATS = 5  # of every method; the median is shown, for a single search is at the system's mercy
_MOST_COLUMNS = 512  # of the heat map: more than a screen shows
_MOST_POINTS = 64  # of the trace
_FEWEST_POINTS = 8
_TRACED_ITEMS = 8_000_000  # scored for the trace, about: a fraction of a second

Stop = Literal["upper_bound_below_threshold", "lists_used_up"]


@dataclass(frozen=True)
class ExplainedItem:
    """One item of the ranking, taken apart: its score is the sum of its parts, in their order."""

    item_id: int  # internal
    rank: int  # 1 is the best of all items that may be returned
    score: float
    sub_item_ids: list[int]  # [splits]: its code
    sub_item_ranks: list[int]  # [splits]: 0 is the best sub-item id of its split
    contributions: list[float]  # [splits]: the scores of its sub-item ids
    bias: float | None  # added after the last split
    repeat: float | None  # what the model gives to what was there before; null where it gives none
    transition: float | None  # and to what often followed the last items
    boost: float | None  # what the query asks for, likewise; they are added up, then added last


@dataclass(frozen=True)
class SortedScores:
    """Sub-item scores, the best first in every split; runs of ranks where there are very many."""

    first_ranks: list[int]  # [columns]: the ranks from this one to the next one's
    scores: list[list[float]]  # [splits][columns]: the score at the column's first rank


@dataclass(frozen=True)
class MethodRun:
    """One method's answer to the query, and what it cost."""

    method: str
    unavailable: str | None  # why this index cannot be searched that way; then all else is empty
    ran: str | None = None  # what `auto` chose
    exact: bool = False  # by the method's own account
    identical: bool = False  # ids and score bits are those of scoring every item
    nanoseconds: int = 0  # the median of a few runs
    steps: int = 0
    items_scored: int = 0
    items_touched: int = 0
    # [splits]: how many of its best sub-item ids it visited; null if it does not go by them
    visited: list[int] | None = None


@dataclass(frozen=True)
class TracePoint:
    """Where a search stood after so many steps."""

    step: int
    threshold: float | None  # null while fewer than K items are known
    upper_bound: float | None  # null once nothing is left
    items_scored: int
    visited: list[int]  # [splits]: how many of the best sub-item ids


@dataclass(frozen=True)
class Trace:
    """A search stopped at rising steps by the engine itself."""

    method: str  # recjpqprune, one sub-item id a step; scan where its posting lists are too much
    points: list[TracePoint]  # the first is before the first step, the last is the end
    steps: int
    stop: Stop
    sub_items_visited: int  # of splits × sub-items
    items_seen: int  # different items with a sub-item id that was visited; all others never


@dataclass(frozen=True)
class Explanation:
    """Everything that the explorer page shows of one query."""

    num_items: int
    num_eligible: int  # after exclude and allow
    num_splits: int
    num_sub_items: int
    top: list[ExplainedItem]
    middle: ExplainedItem | None  # of the ranking of all eligible items
    bottom: ExplainedItem | None
    heat_map: SortedScores
    methods: list[MethodRun]
    trace: Trace


@dataclass(frozen=True)
class _Query:
    """One query, and what is right about it by exhaustive scoring."""

    index: Index
    sequence_embedding: Float32Array
    k: int
    exclude: Any
    allow: Any
    boosts: Any
    repeated: dict[int, float]  # what is added to the scores of items by the model,
    followed: dict[int, float]  # for both of its reasons,
    boosted: dict[int, float]  # and by the query
    codes: NDArray[Any]
    table: Float32Array  # S, [splits, sub-items]
    order: Int64Array  # [splits, sub-items]: sub-item ids, the best first
    bias: Float32Array | None
    items: Int64Array  # the eligible ones
    scores: Float32Array  # theirs

    @property
    def sorted_table(self) -> Float32Array:
        return np.take_along_axis(self.table, self.order, axis=1)

    def search(self, method: Method) -> tuple[TopK, Int64Array]:
        """Return the answer and how many sub-item ids of each split were visited, the best ones."""
        top, visited = self.index.search_visibly(
            self.sequence_embedding,
            self.k,
            method=method,
            exclude=self.exclude,
            allow=self.allow,
            boosts=self.boosts,
        )
        return top, visited.sum(axis=1)


def explain(
    index: Index,
    sequence_embedding: Float32Array,
    k: int = 10,
    *,
    exclude: Any = None,
    allow: Any = None,
    boosts: Boosts | None = None,
    repeats: Boosts | None = None,
    transitions: Boosts | None = None,
    max_bytes: int = METHOD_BYTES,
) -> Explanation:
    """Answer one query (float32 [d]) by every method and say how; arguments as of `search`.

    `repeats` and `transitions` are boosts as well, of a model's heads, and told from the others.
    Methods that would make this process grow by more than `max_bytes` are left out.

    Scores the whole catalogue and searches many times over: for looking inside, not for serving.
    """
    query = _query(index, sequence_embedding, k, exclude, allow, boosts, repeats, transitions)
    right = _top(query)
    ranked = len(query.items)
    places = np.argsort(query.order, axis=1)  # the rank of every sub-item id

    def explained(item: int, rank: int) -> ExplainedItem:
        code = query.codes[item]
        splits = np.arange(index.num_splits)
        return ExplainedItem(
            item_id=item,
            rank=rank,
            score=float(query.scores[np.searchsorted(query.items, item)]),
            sub_item_ids=code.tolist(),
            sub_item_ranks=places[splits, code].tolist(),
            contributions=query.table[splits, code].tolist(),
            bias=None if query.bias is None else float(query.bias[item]),
            repeat=query.repeated.get(item),
            transition=query.followed.get(item),
            boost=query.boosted.get(item),
        )

    return Explanation(
        num_items=index.num_items,
        num_eligible=ranked,
        num_splits=index.num_splits,
        num_sub_items=index.num_sub_items,
        top=[explained(int(item), rank) for rank, item in enumerate(right[0], 1)],
        middle=explained(_at_rank(query, ranked // 2), ranked // 2 + 1) if ranked else None,
        bottom=explained(_at_rank(query, ranked - 1), ranked) if ranked else None,
        heat_map=_heat_map(query.sorted_table),
        methods=[_run(query, name, method, right, max_bytes) for name, method in METHODS.items()],
        trace=_trace(query, max_bytes),
    )


# The right answer --------------------------------------------------------------------------------


def _query(
    index: Index,
    sequence_embedding: Float32Array,
    k: int,
    exclude: Any,
    allow: Any,
    boosts: Boosts | None,
    repeats: Boosts | None,
    transitions: Boosts | None,
) -> _Query:
    if np.shape(sequence_embedding) != (index.width,):
        raise InputError(
            f"sequence_embedding has shape {list(np.shape(sequence_embedding))}, "
            f"expected [{index.width}]: one query is explained at a time"
        )
    total = add_boosts(add_boosts(repeats, transitions), boosts)
    question = checked_question(
        index,
        sequence_embedding,
        k,
        exclude=exclude,
        allow=allow,
        boosts=total,
        name="sequence_embedding",
    )
    table = index.sub_item_scores(sequence_embedding)
    codes, bias = index.item_codes(), index.item_bias
    items = np.flatnonzero(eligible(question, 0, index.num_items))
    scores = score_items(table, codes, bias)
    changed, values = boosts_of(question, 0)
    scores[changed] += values
    return _Query(
        index=index,
        sequence_embedding=sequence_embedding,
        k=k,
        exclude=exclude,
        allow=allow,
        boosts=total,
        repeated=_by_item(repeats),
        followed=_by_item(transitions),
        boosted=_by_item(boosts),
        codes=codes,
        table=table,
        order=np.argsort(-table, axis=1, kind="stable"),  # ties fall to the lower id, as always
        bias=bias,
        items=items,
        scores=scores[items],
    )


def _by_item(boosts: Boosts | None) -> dict[int, float]:
    if boosts is None:
        return {}
    items, values = boosts
    return dict(zip(items.tolist(), values.tolist(), strict=True))


def _top(query: _Query) -> tuple[Int64Array, Float32Array]:
    """Return the best K by exhaustive scoring: sorting only those that can be among them."""
    scores, k = query.scores, query.k
    if not 0 < k < len(scores):
        return best(scores, query.items, k)
    close = scores >= np.partition(scores, -k)[-k]
    return best(scores[close], query.items[close], k)


def _at_rank(query: _Query, rank: int) -> int:
    """Return the item at a place of the whole ranking, 0 the best; ties by item id."""
    score = -np.partition(-query.scores, rank)[rank]
    better = int((query.scores > score).sum())
    return int(query.items[np.flatnonzero(query.scores == score)[rank - better]])


def _heat_map(sorted_table: Float32Array) -> SortedScores:
    num_sub_items = sorted_table.shape[1]
    columns = min(num_sub_items, _MOST_COLUMNS)
    first_ranks = np.arange(columns) * num_sub_items // columns
    return SortedScores(first_ranks.tolist(), sorted_table[:, first_ranks].tolist())


# Every method ------------------------------------------------------------------------------------


def affordable(method: Method, index: IndexShape, max_bytes: int) -> Method:
    """Return a method that a service can afford; InputError where it would take too much memory.

    That is for what a method needs beside the index: it is made when first asked for, in every
    worker, and stays.
    """
    if isinstance(method, Default):
        needed = 4 * index.num_items * index.width  # all item vectors
        method = Default(max_bytes=max_bytes)
    elif isinstance(method, RecJPQPrune):
        needed = 4 * index.num_items * index.num_splits  # posting lists
    else:
        return method
    if needed > max_bytes:
        name = "default" if isinstance(method, Default) else "recjpqprune"
        raise InputError(
            f"method {name} needs {needed:,} bytes in each worker, and the service allows "
            f"{max_bytes:,}: --max-method-bytes"
        )
    return method


def _run(
    query: _Query,
    name: str,
    method: Method,
    right: tuple[Int64Array, Float32Array],
    max_bytes: int,
) -> MethodRun:
    index = query.index
    try:
        method = affordable(method, index, max_bytes)
        runs, visits = zip(*(query.search(method) for _ in range(_REPEATS)), strict=True)
    except InputError as error:
        return MethodRun(name, str(error).removeprefix(f"method {name} "))
    record = runs[-1].stats
    return MethodRun(
        method=name,
        unavailable=None,
        ran=record.method[0],
        exact=bool(record.exact[0]),
        identical=all(_identical(run, right) for run in runs),
        nanoseconds=int(np.median([run.stats.nanoseconds[0] for run in runs])),
        steps=int(record.steps[0]),
        items_scored=int(record.items_scored[0]),
        items_touched=int(record.items_touched[0]),
        visited=visits[-1].tolist() if visits[-1].any() else None,
    )


def _identical(found: TopK, right: tuple[Int64Array, Float32Array]) -> bool:
    """Say whether ids and score bits agree, padding included."""
    missing = len(found.ids) - len(right[0])
    ids = np.concatenate([right[0], np.full(missing, -1)])
    scores = np.concatenate([right[1], np.full(missing, -np.inf, np.float32)])
    bits = np.array_equal(found.scores.view(np.int32), scores.view(np.int32))
    return bits and np.array_equal(found.ids, ids)


# The trace ---------------------------------------------------------------------------------------


def _upper_bound(query: _Query, visited: Int64Array) -> float | None:
    """Return σ, the best possible score of an item without a visited sub-item id or a boost."""
    if (visited == query.index.num_sub_items).any():
        return None
    ahead = query.sorted_table[np.arange(len(visited)), visited]
    bound = score_items(ahead[:, None], np.zeros((1, len(ahead)), np.uint8), None)[0]
    return float(bound if query.bias is None else bound + query.bias.max(initial=-np.inf))


def _begin(query: _Query) -> TracePoint:
    """Return where a search stands before the first step: boosted items are scored by then."""
    boosted = query.boosted | query.repeated | query.followed
    scored = query.scores[np.isin(query.items, list(boosted))]
    threshold = float(np.sort(scored)[-query.k]) if 0 < query.k <= len(scored) else None
    visited = np.zeros(query.index.num_splits, np.int64)
    bound = _upper_bound(query, visited)
    return TracePoint(0, threshold, bound, len(scored), visited.tolist())


def _trace(query: _Query, max_bytes: int) -> Trace:
    index = query.index
    # The smallest steps there are: more to see than in the default ones.
    traced: RecJPQPrune | Scan = RecJPQPrune(sub_items_per_step=1)
    pruning = index.layout != "compact"
    if pruning:
        try:
            affordable(traced, index, max_bytes)
        except InputError:
            if not index.has_lists:  # then nothing else could be traced
                raise
            pruning = False
    if not pruning:
        traced = Scan()
    whole, visited = query.search(traced)
    steps, scored = int(whole.stats.steps[0]), int(whole.stats.items_scored[0])
    points = [_begin(query)]
    # Every point is a search of its own, stopped there.
    searches = 2 * _TRACED_ITEMS // max(scored, 1)
    num_points = min(max(searches, _FEWEST_POINTS), _MOST_POINTS, steps)
    for step in np.linspace(1, steps, num_points).round().astype(int).tolist() if steps else []:
        top, visited_by_then = query.search(replace(traced, max_steps=step))
        threshold = float(top.stats.threshold[0])
        points.append(
            TracePoint(
                step=step,
                threshold=threshold if np.isfinite(threshold) else None,
                upper_bound=_upper_bound(query, visited_by_then),
                items_scored=int(top.stats.items_scored[0]),
                visited=visited_by_then.tolist(),
            )
        )
    places = np.argsort(query.order, axis=1)
    seen = np.zeros(index.num_items, np.bool_)
    for split, count in enumerate(visited):
        seen |= places[split][query.codes[:, split]] < count
    used_up = bool((visited == index.num_sub_items).any())
    return Trace(
        method="recjpqprune" if pruning else "scan",
        points=points,
        steps=steps,
        stop="lists_used_up" if used_up else "upper_bound_below_threshold",
        sub_items_visited=int(visited.sum()),
        items_seen=int(seen.sum()),
    )
