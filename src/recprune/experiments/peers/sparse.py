"""Items and queries as sparse vectors, for engines of learned sparse retrieval.

Sub-item b of split m is a term; an item has M of them, each with a weight of 1, and a query has a
weight for every term: S[m, b], less the lowest of its split, as these engines take no weights below
zero. That takes the same from every item, which has one sub-item of each split: their order stays.
"""

from __future__ import annotations

import numpy as np

from recprune.types import CodeArray, Float32Array, Int64Array

TERMS = 65_536  # that two bytes can number, as both engines do


def terms_of(codes: CodeArray, num_sub_items: int) -> Int64Array:
    """Return the terms of items, [items, M], rising in each row: split m's begin at m·B."""
    return codes + np.arange(codes.shape[1], dtype=np.int64) * num_sub_items


def term_weights(query: Float32Array, sub_item_embeddings: Float32Array) -> Float32Array:
    """Return the weights of all terms, [M·B], for a query [1, d]: from 0 on in every split."""
    num_splits, _, split_width = sub_item_embeddings.shape
    parts = query.reshape(num_splits, split_width, 1)
    scores = np.matmul(sub_item_embeddings, parts)[:, :, 0]
    weights: Float32Array = (scores - scores.min(axis=1, keepdims=True)).ravel()
    return weights


def too_many_terms(key: str, terms: int) -> str | None:
    """Say that terms cannot be numbered, or return None."""
    if terms > TERMS:
        return f"{key} numbers terms by two bytes, and {terms:,} are too many"
    return None
