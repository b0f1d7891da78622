"""Decoding by a beam over a graph of items, written from the description of RPG.

RPG (Hou et al., "Generating Long Semantic IDs in Parallel for Recommendation", KDD 2025) scores an
item by the digits of its code, as RecJPQ does, and looks for the best items by walking: every item
is linked to those that are most like it, a walk begins with random items, and in every round the
best of them lead to their neighbours. It scores few items, and has no guarantee to meet the best.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from recprune import Index
from recprune.types import CodeArray, Float32Array, Int32Array, Int64Array, Progress, no_progress

_QUERIES_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class ItemGraph:
    """The items that are most like each item, the nearest first."""

    neighbours: Int32Array  # [items, k]
    seconds: float  # of making it


def item_graph(
    codes: CodeArray,
    sub_item_embeddings: Float32Array,
    count: int,
    *,
    threads: int = 1,
    progress: Progress = no_progress,
) -> ItemGraph:
    """Link every item to its `count` nearest: two items are as like as their sub-items together.

    Likeness of sub-items is the cosine of their vectors. A sum over splits is what an index
    searches, so that the graph is exact, and no table of n × n numbers is made.
    """
    begun = time.perf_counter()
    lengths = np.linalg.norm(sub_item_embeddings, axis=2, keepdims=True)
    unit = sub_item_embeddings / np.maximum(lengths, np.float32(1e-12))
    index = Index.build(codes, unit, threads=threads)
    splits = np.arange(codes.shape[1])
    neighbours = np.empty((len(codes), count), np.int32)
    for first in range(0, len(codes), _QUERIES_AT_ONCE):
        items = np.arange(first, min(first + _QUERIES_AT_ONCE, len(codes)))
        vectors = unit[splits, codes[items]].reshape(len(items), -1)
        exclude = [items[at : at + 1] for at in range(len(items))]  # an item is not its own
        found = index.search(vectors, count, exclude=exclude, threads=threads)
        neighbours[items] = found.ids
        progress(f"neighbours of {items[-1] + 1:,} of {len(codes):,} items")
    return ItemGraph(neighbours, time.perf_counter() - begun)


class GraphDecoder:
    """Walks over a graph of items, from the same random ones every time. All in NumPy."""

    def __init__(
        self,
        codes: CodeArray,
        sub_item_embeddings: Float32Array,
        neighbours: Int32Array,
        *,
        beam: int,
        rounds: int,
        seed: int = 0,
    ) -> None:
        self._codes = codes
        self._embeddings = sub_item_embeddings
        self._neighbours = neighbours
        self._rounds = rounds
        self._beam = min(beam, len(codes))
        self._starts = np.random.default_rng(seed).permutation(len(codes))[: self._beam]
        # Which items a walk has met, and where an item stands among candidates: kept between walks,
        # as they are as long as the catalogue.
        self._met = np.zeros(len(codes), np.bool_)
        self._places = np.zeros(len(codes), np.int64)
        self.items_scored = 0  # of the last walk

    def search(self, sequence_embedding: Float32Array, k: int) -> tuple[Int64Array, Float32Array]:
        """Return the best k that a walk meets, and their scores; the beam is k or wider."""
        num_splits, _, size = self._embeddings.shape
        parts = sequence_embedding.reshape(num_splits, size, 1)
        table = np.matmul(self._embeddings, parts)[:, :, 0]  # S, [M, B]
        beam, scores = self._starts, self._scores(table, self._starts)
        self._met[beam] = True
        expanded, met = beam, [beam]
        for _ in range(self._rounds):
            fresh = self._unmet(self._neighbours[expanded].ravel())
            if not len(fresh):
                break
            met.append(fresh)
            beam = np.concatenate([beam, fresh])
            scores = np.concatenate([scores, self._scores(table, fresh)])
            is_new = np.arange(len(beam)) >= len(beam) - len(fresh)
            if len(beam) > self._beam:
                kept = np.argpartition(-scores, self._beam - 1)[: self._beam]
                beam, scores, is_new = beam[kept], scores[kept], is_new[kept]
            expanded = beam[is_new]  # the neighbours of all others were met before
        self.items_scored = sum(map(len, met))
        for items in met:
            self._met[items] = False
        best = np.lexsort((beam, -scores))[:k]
        return beam[best], scores[best]

    def _scores(self, table: Float32Array, items: Int64Array) -> Float32Array:
        """Return scores added in split order, as a search adds them."""
        codes = self._codes[items]
        total: Float32Array = table[0, codes[:, 0]]
        for split in range(1, codes.shape[1]):
            total += table[split, codes[:, split]]
        return total

    def _unmet(self, items: Int32Array) -> Int64Array:
        """Return which of these items were not met before, each once, and mark them as met."""
        unmet = items[~self._met[items]]
        order = np.arange(len(unmet))
        self._places[unmet] = order
        once: Int64Array = unmet[self._places[unmet] == order].astype(np.int64)
        self._met[once] = True
        return once
