"""Transformer Default: the dense product with all item vectors, made exact.

A dense product rounds otherwise than sums of sub-item scores do. So it only ranks: items that it
puts so close to the K-th place that rounding could decide are scored again in the one order that
counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from recprune import _native
from recprune.search.methods import Default
from recprune.search.question import Question, boosts_of, eligible
from recprune.search.reference import best, score_items
from recprune.search.top_k import RECORD, RECORD_WORDS, SearchStats, TopK
from recprune.types import CodeArray, Float32Array, InputError, Int64Array


@dataclass(frozen=True, eq=False)
class DenseItems:
    """A catalogue as method default sees it."""

    vectors: Float32Array  # [n, d]
    codes: CodeArray  # [n, M]
    sub_item_embeddings: Float32Array  # [M, B, d/M]
    item_bias: Float32Array | None  # [n]


def dense_items(
    codes: CodeArray,
    sub_item_embeddings: Float32Array,
    item_bias: Float32Array | None,
    method: Default,
) -> DenseItems:
    """Put all item vectors together, if the method allows that much memory."""
    num_splits, _, width = sub_item_embeddings.shape
    needed = 4 * len(codes) * num_splits * width
    if needed > method.max_bytes:
        raise InputError(
            f"method default needs {needed:,} bytes for all item vectors, more than its max_bytes "
            f"of {method.max_bytes:,}: Default(max_bytes=...) allows more"
        )
    parts = [sub_item_embeddings[split][codes[:, split]] for split in range(num_splits)]
    return DenseItems(np.concatenate(parts, axis=1), codes, sub_item_embeddings, item_bias)


def answer_dense(question: Question, items: DenseItems, tables: Float32Array) -> TopK:
    """Answer one query after the other; `tables` are their sub-item scores, [queries, M, B]."""
    count, k, num_items = len(question.queries), question.k, len(items.codes)
    ids = np.full((count, k), -1, np.int64)
    scores = np.full((count, k), -np.inf, np.float32)
    records = np.zeros(count, RECORD)
    for number, query in enumerate(question.queries):
        begun = time.perf_counter_ns()
        mask = eligible(question, number, num_items)
        boosted, boosts = boosts_of(question, number)
        boosted, boosts = boosted[mask[boosted]], boosts[mask[boosted]]
        mask[boosted] = False
        top_ids, top_scores = dense_top_k(items, query, tables[number], np.flatnonzero(mask), k)
        if len(boosted):
            raised = _scores(items, tables[number], boosted) + boosts
            top_ids, top_scores = best(
                np.concatenate([top_scores, raised]), np.concatenate([top_ids, boosted]), k
            )
        floor = np.float32(-np.inf) if question.floors is None else question.floors[number]
        found = int((top_scores >= floor).sum())
        ids[number, :found] = top_ids[:found]
        scores[number, :found] = top_scores[:found]
        record = records[number]
        record["method"] = _native.Method[Default.name].value
        record["exact"] = record["steps"] = record["together"] = 1
        record["items_scored"] = record["items_touched"] = num_items
        record["bytes_touched"] = items.vectors.nbytes
        record["threshold"] = top_scores[-1] if 0 < k == found else floor
        record["upper_bound"] = -np.inf
        record["nanoseconds"] = time.perf_counter_ns() - begun
    return TopK(ids, scores, SearchStats(records.view(np.int64).reshape(count, RECORD_WORDS)))


def dense_top_k(
    items: DenseItems,
    query: Float32Array,
    sub_item_scores: Float32Array,
    candidates: Int64Array,
    k: int,
) -> tuple[Int64Array, Float32Array]:
    """Return the best k of the candidates."""
    bias = items.item_bias
    dense = items.vectors @ query
    largest = 0.0
    if bias is not None:
        dense = dense + bias
        largest = float(np.abs(bias).max(initial=0))
    num_splits = len(items.sub_item_embeddings)
    products = items.sub_item_embeddings * query.reshape(num_splits, 1, -1)
    largest += float(np.abs(products).sum(axis=2).max(axis=1).sum())
    # However the two ways round, they differ by less than this.
    margin = 2 * (len(query) + num_splits + 2) * 2.0**-23 * largest + 1e-40
    found = min(k, len(candidates))
    if 0 < found < len(candidates):
        kth = np.partition(dense[candidates], -found)[-found]
        candidates = candidates[dense[candidates] >= kth - margin]
    return best(_scores(items, sub_item_scores, candidates), candidates, k)


def _scores(items: DenseItems, sub_item_scores: Float32Array, chosen: Int64Array) -> Float32Array:
    """Return the scores of some items, in the one order that counts."""
    bias = items.item_bias[chosen] if items.item_bias is not None else None
    return score_items(sub_item_scores, items.codes[chosen], bias)
