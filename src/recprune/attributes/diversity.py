"""At most so many items of one value among the best: of one brand, say.

The answer is what a walk down the exact ranking of all items that may be returned would pick: it
takes an item unless as many as the limit of the same value were taken before it, and ends with K.
Items without a value are not limited.

The ranking is searched for a part at a time. Let P be the part that was walked so far, the best of
the ranking, and call a value full when as many items as the limit were taken of it.
- An item of P whose value is not full was taken: one is passed over only where its value is full,
  and a value that is full stays so.
- An item after P whose value is full will be passed over, for the same reason.
So the walk goes on as before if the rest of the ranking is searched for without items of full
values and without those that were taken: nothing else is left out, and what is found comes in the
order of the ranking, as neither scores nor the tie rule depend on what is left out. All of it comes
after P, which had everything that is better. Whatever the question says besides (filters,
exclusions, boosts, a floor) decides what the ranking is, and is the same in every search.

Every search asks for 2 K items or more, so one that leaves too few has made a value full, which has
taken as many items as the limit: there are never more than K ÷ limit + 1 searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.attributes.bitmaps import Words, code_words, packed
from recprune.attributes.column import NO_VALUE, AttributeColumn
from recprune.search.methods import Method
from recprune.search.question import Searchable
from recprune.search.top_k import RECORD, SearchStats, TopK
from recprune.types import Boosts, Float32Array, Int64Array

_AHEAD = 2  # times as many as are wanted are searched for at first, and in every search after it
_ADDED = (
    "steps",
    "items_scored",
    "items_touched",
    "bytes_touched",
    "nanoseconds",
    "sub_item_score_nanoseconds",
)


@dataclass(frozen=True)
class Limit:
    """At most `count` items may have the same value in a column."""

    column: AttributeColumn
    count: int


def within(limit: Limit, ranking: Int64Array) -> NDArray[np.bool_]:
    """Return which items of a ranking a walk down it takes."""
    codes = limit.column.codes[ranking]
    order = np.argsort(codes, kind="stable")
    grouped = codes[order]
    places = np.arange(len(codes))
    # How many of the same value come before an item: its place, less that of the group's first.
    begins = np.concatenate([[True], grouped[1:] != grouped[:-1]])[: len(codes)]
    before = np.empty(len(codes), np.int64)
    before[order] = places - np.maximum.accumulate(np.where(begins, places, 0))
    taken: NDArray[np.bool_] = (before < limit.count) | (codes == NO_VALUE)
    return taken


def full_values(limit: Limit, taken: Int64Array) -> Int64Array:
    """Return the codes of which as many were taken as may be."""
    codes, counts = np.unique(limit.column.codes[taken], return_counts=True)
    full: Int64Array = codes[(counts >= limit.count) & (codes != NO_VALUE)].astype(np.int64)
    return full


def without_full_values(limit: Limit, taken: Int64Array, allow: Words | None) -> Words:
    """Return which items may follow those that were taken, as bits; `allow` says so of all."""
    full = tuple((code, code + 1) for code in full_values(limit, taken).tolist())
    words = code_words(limit.column, full, inverse=True)
    return words if allow is None else words & allow


def allowed_with(limit: Limit, taken: Int64Array, allow: Words | None) -> Words:
    """Return items among which those that were taken are the best without any limit."""
    mask = np.zeros(limit.column.num_items, np.bool_)
    mask[taken] = True
    return without_full_values(limit, taken, allow) | packed(mask)


def search_at_most(
    index: Searchable,
    sequence_embeddings: Float32Array,
    k: int,
    limit: Limit | None,
    *,
    method: Callable[[], Method],
    exclude: Sequence[Int64Array] | None = None,
    allow: NDArray[Any] | None = None,
    boosts: Sequence[Boosts | None] | None = None,
    threads: int = 1,
) -> TopK:
    """Return the best k for sequence embeddings [queries, d], of which a limit holds.

    `method` is asked before every search, as the time until a deadline is less by then. Everything
    else is as in `Index.search`; without a limit, so is the answer. With one, figures are those of
    all searches together, and the upper bound is that of items which might be in the answer.
    """

    def search(queries: slice, wanted: int, left_out: Any, allowed: Any) -> TopK:
        return index.search(
            sequence_embeddings[queries],
            wanted,
            method=method(),
            exclude=left_out,
            allow=allowed,
            boosts=None if boosts is None else boosts[queries],
            threads=threads,
        )

    every = slice(0, len(sequence_embeddings))
    if limit is None or index.num_items == 0:
        return search(every, k, exclude, allow)
    words = packed(allow) if allow is not None and allow.dtype == np.bool_ else allow
    first = min(_AHEAD * k, index.num_items)
    top = search(every, first, exclude, words)
    ids = np.full((len(top.ids), k), -1, np.int64)
    scores = np.full((len(top.ids), k), -np.inf, np.float32)
    records = top.stats.raw.copy().view(RECORD)[:, 0]
    base = top
    for number in range(len(ids)):
        taken, values = top.ids[number], top.scores[number]
        wanted = first
        while True:
            is_last = taken[-1] < 0  # padding: there is nothing after it
            found = taken >= 0
            taken, values = taken[found], values[found]
            kept = np.flatnonzero(within(limit, taken))[:k]
            taken, values = taken[kept], values[kept]
            if len(taken) == k or is_last or wanted == index.num_items:
                break
            wanted = min(_AHEAD * wanted, index.num_items)
            before = exclude[number] if exclude is not None else taken[:0]
            more = search(
                slice(number, number + 1),
                wanted,
                [np.concatenate([before, taken])],
                without_full_values(limit, taken, words),
            )
            _add(records, number, more.stats.records[0])
            base = base if more.stats.exact[0] else more  # it may say how much is missing
            taken = np.concatenate([taken, more.ids[0]])
            values = np.concatenate([values, more.scores[0]])
            if not records["exact"][number]:  # what came before may not have been all there is
                order = np.lexsort((taken, -values))
                taken, values = taken[order], values[order]
        ids[number, : len(taken)], scores[number, : len(taken)] = taken, values
        records["threshold"][number] = values[-1] if len(taken) == k else -np.inf
        if records["exact"][number]:
            records["upper_bound"][number] = records["threshold"][number]
    stats = SearchStats(records.view(np.int64).reshape(len(ids), -1))
    return replace(base, ids=ids, scores=scores, stats=stats)


def _add(records: NDArray[Any], number: int, more: Any) -> None:
    """Add the figures of a further search to those of a query."""
    for name in _ADDED:
        records[name][number] += more[name]
    bounds = (float(record["upper_bound"]) for record in (records[number], more))
    records["upper_bound"][number] = max(bounds)
    records["exact"][number] = int(records["exact"][number] and more["exact"])
