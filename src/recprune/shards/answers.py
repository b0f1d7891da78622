"""A question cut for the shards, and their answers put together: those of one index.

Nothing here knows where the shards are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune.live.snapshot import LiveSnapshot
from recprune.search.index import Index
from recprune.search.question import Question, boosts_of
from recprune.search.top_k import RECORD, TopK
from recprune.shards.wire import method_from_json, method_to_json, pack, unpack
from recprune.types import Float32Array, Int64Array

_NO_ITEM = np.uint32(0xFFFFFFFF)  # the id −1 of a shard
_MAX_QUERIES = 1024  # of one call: so that a healthy shard answers well within its timeout


class ItemRange(Protocol):
    """What a shard is asked about: its items, or all numbers of a catalogue that changes."""

    @property
    def first(self) -> int: ...
    @property
    def stop(self) -> int: ...


# What a shard answers: ids counted from its first item, scores, and the native records.
Answer: TypeAlias = tuple[NDArray[np.uint32], Float32Array, Int64Array]


@dataclass(slots=True, eq=False)
class ShardedTopK(TopK):
    """The best items, of all shards or of those that answered.

    Where a shard is missing, the statistics say of the query that it is not exact, and the upper
    bound holds for the missing items too.
    """

    missing_share: float = 0.0  # of the items: those of shards that left a query unanswered
    network_bytes: int = 0  # of the messages to shards and from them


# A question for one shard ------------------------------------------------------------------------


def is_the_same_for_all(question: Question) -> bool:
    """Say whether every shard gets the same message."""
    return question.exclude is None and question.allow is None and question.boosts is None


def message_for(
    question: Question, rows: slice, shard: ItemRange, found: Float32Array | None
) -> bytes:
    """Return what a shard is told about some of the queries, in its own item ids.

    `found` are scores that need not be looked for below, one for each of these queries.
    """
    offsets, items, exclude, boosts = None, None, question.exclude, question.boosts
    if exclude is not None:
        offsets, items, _ = cut(exclude.offsets, exclude.items, rows, shard)
    boosted: tuple[Any, Any, Any] = (None, None, None)
    if boosts is not None:
        boosted = cut(boosts.offsets, boosts.items, rows, shard, boosts.values)
    allow = question.allow
    if allow is not None:
        words = slice(shard.first // 64, -(-shard.stop // 64))
        allow = allow[rows, words] if len(allow) > 1 else allow[0, words]
    floors = question.floors[rows] if question.floors is not None else None
    if floors is None or found is None:
        floors = found if floors is None else floors
    else:
        floors = np.maximum(floors, found)
    settings = [question.are_scores, question.k, method_to_json(question.method), question.threads]
    return pack(settings, [question.queries[rows], offsets, items, allow, floors, *boosted])


def cut(
    offsets: Int64Array,
    items: NDArray[Any],
    rows: slice,
    shard: ItemRange,
    values: Float32Array | None = None,
) -> tuple[Int64Array | None, NDArray[np.uint32] | None, Float32Array | None]:
    """Return which excluded or boosted items concern some queries and a shard, in its own ids.

    With the items, their values are cut.
    """
    bounds = offsets[rows.start : rows.stop + 1]
    items = items[bounds[0] : bounds[-1]]
    inside = (items >= shard.first) & (items < shard.stop)
    counts = np.concatenate([[0], np.cumsum(inside)])
    if not counts[-1]:
        return None, None, None
    kept = values[bounds[0] : bounds[-1]][inside] if values is not None else None
    return counts[bounds - bounds[0]], (items[inside] - shard.first).astype(np.uint32), kept


def answer(index: Index | LiveSnapshot, message: bytes) -> bytes:
    """Answer a message as the shard that has this index."""
    (are_scores, k, method, threads), arrays = unpack(message)
    queries, offsets, items, allow, floor, boost_offsets, boosted, values = arrays
    exclude = None if items is None else np.split(items, offsets[1:-1])
    boosts = None
    if boosted is not None:
        cuts = boost_offsets[1:-1]
        boosts = list(zip(np.split(boosted, cuts), np.split(values, cuts), strict=True))
    if are_scores:
        queries = queries.reshape(-1, index.num_splits, index.num_sub_items)
    search = index.search_scores if are_scores else index.search
    top = search(
        queries,
        min(k, index.num_items + 1),  # one more than there are: then none of them is the k-th
        method=method_from_json(*method),
        exclude=exclude,
        allow=allow,
        floor=floor,
        boosts=boosts,
        threads=threads,
    )
    # Padding is not sent: below the floor, there may be little else.
    found = int((top.ids >= 0).sum(axis=1).max(initial=0))
    ids, scores = top.ids[:, :found].astype(np.uint32), top.scores[:, :found]
    return pack([], [ids, scores, top.stats.raw])


def read_answer(message: bytes) -> Answer:
    """Return the answer that a message holds."""
    ids, scores, raw = unpack(message)[1]
    return ids, scores, raw


# In which order shards are asked -----------------------------------------------------------------


def plan_rounds(
    num_queries: int, num_shards: int, rounds: int, start: int
) -> list[tuple[slice, list[list[int]]]]:
    """Return groups of a batch, and for each the shards to be asked, one round after the other.

    A group asks one shard in every round but the last, and all others in the last: each round knows
    the scores that the earlier ones found, and need not look for less. Every group begins with
    another shard, so that all are busy all the time.
    """
    rounds = max(1, min(rounds, num_shards))
    count = -(-num_queries // _MAX_QUERIES)
    if rounds > 1 and num_queries >= num_shards:
        count = num_shards * -(-num_queries // (num_shards * _MAX_QUERIES))
    cuts = [num_queries * cut // max(count, 1) for cut in range(count + 1)]
    parts = []
    for part in range(count):
        order = [(start + part + place) % num_shards for place in range(num_shards)]
        steps = [[shard] for shard in order[: rounds - 1]] + [sorted(order[rounds - 1 :])]
        parts.append((slice(cuts[part], cuts[part + 1]), steps))
    return parts


# Putting together --------------------------------------------------------------------------------


def kth_scores(answers: list[Answer], k: int) -> Float32Array | None:
    """Return the k-th best score so far of every query, −∞ where there are fewer; None: all −∞."""
    scores = [found for _, found, _ in answers]
    width = sum(found.shape[1] for found in scores)
    if width < k:
        return None
    together = np.concatenate(scores, axis=1)
    kth: Float32Array = np.partition(together, width - k, axis=1)[:, width - k]
    return kth


def merge(
    answers: Iterable[tuple[ItemRange, Answer]], num_queries: int, k: int
) -> tuple[Int64Array, Float32Array]:
    """Return the best k of all answers."""
    ids = np.full((num_queries, k), -1, np.int64)
    scores = np.full((num_queries, k), -np.inf, np.float32)
    parts = [
        np.where(local == _NO_ITEM, -1, local.astype(np.int64) + shard.first)
        for shard, (local, _, _) in answers
    ]
    if not parts:
        return ids, scores
    all_ids = np.concatenate(parts, axis=1)
    all_scores = np.concatenate([found for _, (_, found, _) in answers], axis=1)
    order = np.lexsort((all_ids, -all_scores))[:, :k]  # padding has −∞ and ends up last
    ids[:, : order.shape[1]] = np.take_along_axis(all_ids, order, axis=1)
    scores[:, : order.shape[1]] = np.take_along_axis(all_scores, order, axis=1)
    return ids, scores


def merge_records(
    answers: list[Answer], scores: Float32Array, floors: Float32Array | None = None
) -> NDArray[Any]:
    """Return one record a query for what all shards did; `scores` are those of the merged top k."""
    # Stacked as numbers: numpy takes its time to find out that two kinds of record are the same.
    records = np.stack([raw for _, _, raw in answers]).view(RECORD)[:, :, 0]  # [shards, queries]
    merged = np.zeros(len(scores), RECORD)
    busiest = records["bytes_touched"].argmax(axis=0)
    merged["method"] = np.take_along_axis(records["method"], busiest[None], axis=0)[0]
    merged["exact"] = records["exact"].all(axis=0)
    for name in ("steps", "items_scored", "items_touched", "bytes_touched"):
        merged[name] = records[name].sum(axis=0)
    # Shards compute S side by side.
    merged["sub_item_score_nanoseconds"] = records["sub_item_score_nanoseconds"].max(axis=0)
    merged["together"] = records["together"].max(axis=0)
    # Where more are wanted than there are, none of them is the k-th.
    threshold = scores[:, -1]
    if floors is not None:
        threshold = np.maximum(threshold, floors)
    merged["threshold"] = threshold
    # What an exact shard kept back is below the threshold; so is what was merged away.
    inexact = np.where(records["exact"] == 0, records["upper_bound"], -np.inf)
    merged["upper_bound"] = np.maximum(inexact.max(axis=0), threshold)
    return merged


def best_possible_scores(sub_item_scores: Float32Array, highest_bias: float) -> Float32Array:
    """Return what no item can exceed, whatever its code: added in split order, as scores are."""
    best: Float32Array = sub_item_scores.max(axis=2)
    total: Float32Array = best[:, 0]
    for split in range(1, best.shape[1]):
        total = total + best[:, split]
    return total + np.float32(highest_bias)


def highest_boosts(question: Question, rows: slice, shards: Sequence[ItemRange]) -> Float32Array:
    """Return the highest boost of an item of these shards for some queries; 0 for all others."""
    highest = np.zeros(rows.stop - rows.start, np.float32)
    for place, number in enumerate(range(rows.start, rows.stop)):
        items, values = boosts_of(question, number)
        for shard in shards:
            inside = (items >= shard.first) & (items < shard.stop)
            highest[place] = values[inside].max(initial=highest[place])
    return highest
