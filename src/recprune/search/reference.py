"""The slow twins: what every method must return, in NumPy and in the paper's words.

`exhaustive` is the oracle. `recjpqprune` is Algorithm 1 of RecJPQPrune (Petrov, Macdonald and
Tonellotto, SIGIR 2025), line by line, and the specification of the native one.
"""

from __future__ import annotations

import numpy as np

from recprune.search.posting_lists import PostingLists
from recprune.types import CodeArray, Float32Array, Int64Array


def sub_item_scores(
    sequence_embedding: Float32Array, sub_item_embeddings: Float32Array
) -> Float32Array:
    """Return S: products added in the order of the dimensions, in float32."""
    num_splits, _, width = sub_item_embeddings.shape
    parts = sequence_embedding.reshape(num_splits, width)
    scores: Float32Array = parts[:, 0, None] * sub_item_embeddings[:, :, 0]
    for dimension in range(1, width):
        scores = scores + parts[:, dimension, None] * sub_item_embeddings[:, :, dimension]
    return scores


def score_items(scores: Float32Array, codes: CodeArray, bias: Float32Array | None) -> Float32Array:
    """Return the score of every code: sub-item scores in split order, then the bias."""
    total: Float32Array = scores[0, codes[:, 0]]
    for split in range(1, codes.shape[1]):
        total = total + scores[split, codes[:, split]]
    return total if bias is None else total + bias


def best(scores: Float32Array, items: Int64Array, k: int) -> tuple[Int64Array, Float32Array]:
    """Return the best k: score descending, item id ascending."""
    order = np.lexsort((items, -scores))[:k]
    return items[order], scores[order]


def exhaustive(
    scores: Float32Array,
    codes: CodeArray,
    k: int,
    *,
    bias: Float32Array | None = None,
    eligible: np.ndarray | None = None,
    boosts: tuple[Int64Array, Float32Array] | None = None,
) -> tuple[Int64Array, Float32Array]:
    """Score all items, boosts added last, and return the best k of the eligible ones."""
    items = np.arange(len(codes)) if eligible is None else np.flatnonzero(eligible)
    totals = score_items(scores, codes, bias)
    if boosts is not None:
        totals[boosts[0]] += boosts[1]
    return best(totals[items], items, k)


def recjpqprune(
    scores: Float32Array, codes: CodeArray, lists: PostingLists, k: int, sub_items_per_step: int = 8
) -> tuple[Int64Array, Float32Array, int]:
    """Return the top k and the number of steps that it took."""
    num_splits, num_sub_items = scores.shape
    queue = np.argsort(-scores, axis=1, kind="stable")  # Q
    position = np.zeros(num_splits, np.int64)  # P
    top_items, top_scores = np.empty(0, np.int64), np.empty(0, np.float32)
    threshold, steps = -np.inf, 0

    def next_scores() -> Float32Array:
        return scores[np.arange(num_splits), queue[np.arange(num_splits), position]]

    def upper_bound() -> np.float32:
        bound = np.float32(0)
        for split, score in enumerate(next_scores()):
            bound = score if split == 0 else bound + score
        return bound

    # Goes on at equality, so that ties fall to the lower item id.
    while upper_bound() >= threshold:
        split = int(np.argmax(next_scores()))
        batch = queue[split, position[split] : position[split] + sub_items_per_step]
        items = np.concatenate([lists.posting_list(split, int(sub_item)) for sub_item in batch])
        merged = np.union1d(top_items, items)  # an item comes once for every split
        top_items, top_scores = best(score_items(scores, codes[merged], None), merged, k)
        position[split] += len(batch)
        steps += 1
        if position[split] == num_sub_items:
            break  # every item is in some list of this split
        if len(top_scores) == k:
            threshold = float(top_scores[-1])
    return top_items, top_scores, steps
