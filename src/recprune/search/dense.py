"""Transformer Default: the dense product with all item vectors, made exact.

A dense product rounds otherwise than sums of sub-item scores do. So it only ranks: whoever it puts
so close to the K-th place that rounding could decide is scored again in the one order that counts.
"""

from __future__ import annotations

import numpy as np

from recprune.search.reference import best, score_items
from recprune.types import CodeArray, Float32Array, Int64Array


def dense_top_k(
    query: Float32Array,
    sub_item_scores: Float32Array,
    dense_items: Float32Array,
    codes: CodeArray,
    embeddings: Float32Array,
    bias: Float32Array | None,
    candidates: Int64Array,
    k: int,
) -> tuple[Int64Array, Float32Array]:
    """Return the best k of the candidates; `dense_items` are their catalogue's vectors, [n, d]."""
    dense = dense_items @ query
    largest = 0.0
    if bias is not None:
        dense = dense + bias
        largest = float(np.abs(bias).max(initial=0))
    num_splits = len(embeddings)
    sizes = np.abs(embeddings * query.reshape(num_splits, 1, -1)).sum(axis=2).max(axis=1)
    largest += float(sizes.sum())
    # However the two ways round, they differ by less than this.
    margin = 2 * (len(query) + num_splits + 2) * 2.0**-23 * largest + 1e-40
    found = min(k, len(candidates))
    if 0 < found < len(candidates):
        kth = np.partition(dense[candidates], -found)[-found]
        candidates = candidates[dense[candidates] >= kth - margin]
    chosen_bias = bias[candidates] if bias is not None else None
    return best(score_items(sub_item_scores, codes[candidates], chosen_bias), candidates, k)
