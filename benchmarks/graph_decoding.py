"""Decoding by a beam over a graph of items, written from the description of RPG.

RPG (Hou et al., "Generating Long Semantic IDs in Parallel for Recommendation", KDD 2025) scores an
item by the digits of its code, as RecJPQ does, and looks for the best items by walking: every item
is linked to those that are most like it, a walk begins with random items, and in every round the
best of them lead to their neighbours. It scores few items, and has no guarantee to meet the best.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recprune import Index
from recprune.types import (
    CodeArray,
    Float32Array,
    InputError,
    Int32Array,
    Int64Array,
    Progress,
    no_progress,
    random_generator,
)

_QUERIES_AT_ONCE = 4096
_COMPARED = 16  # items whose neighbours are searched anew when a graph is loaded


@dataclass(frozen=True, eq=False)
class ItemGraph:
    """The items that are most like each item, the nearest first."""

    neighbours: Int32Array  # [items, k]
    seconds: float | None  # of making it; None where it was loaded

    def save(self, path: Path) -> None:
        """Write the neighbours as one .npy file, under a temporary name until it is whole."""
        unfinished = path.with_name(f"{path.name}.unfinished")
        with unfinished.open("wb") as file:
            np.save(file, self.neighbours)
        unfinished.replace(path)


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
    if not 0 < count < len(codes):
        raise InputError(f"{len(codes):,} items cannot have {count:,} neighbours each")
    begun = time.perf_counter()
    likeness = _Likeness(codes, sub_item_embeddings, threads)
    neighbours = np.empty((len(codes), count), np.int32)
    for first in range(0, len(codes), _QUERIES_AT_ONCE):
        items = np.arange(first, min(first + _QUERIES_AT_ONCE, len(codes)))
        neighbours[items] = likeness.nearest(items, count)
        progress(f"neighbours of {items[-1] + 1:,} of {len(codes):,} items")
    return ItemGraph(neighbours, time.perf_counter() - begun)


def load_graph(
    path: Path, codes: CodeArray, sub_item_embeddings: Float32Array, count: int
) -> ItemGraph:
    """Read a saved graph with `count` neighbours or more, and check that it is of these items."""
    try:
        neighbours = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: cannot be read as an array: {error}") from None
    if not isinstance(neighbours, np.ndarray):
        raise InputError(f"{path}: an archive of arrays, expected one array")
    if neighbours.dtype != np.int32 or neighbours.ndim != 2 or len(neighbours) != len(codes):
        raise InputError(
            f"{path}: {neighbours.dtype} {[*neighbours.shape]}, "
            f"expected the neighbours of {len(codes):,} items as int32"
        )
    if neighbours.shape[1] < count:
        raise InputError(f"{path}: {neighbours.shape[1]} neighbours, expected {count} or more")
    if neighbours.min() < 0 or neighbours.max() >= len(codes):
        raise InputError(f"{path}: links to items that are not there")
    some = np.sort(random_generator(0).permutation(len(codes))[:_COMPARED])
    nearest = _Likeness(codes, sub_item_embeddings, 1).nearest(some, count)
    differ = (nearest != neighbours[some, :count]).any(axis=1)
    if differ.any():
        raise InputError(f"{path}: other neighbours of item {some[differ][0]}: of other items?")
    return ItemGraph(neighbours, None)


class _Likeness:
    """An index over sub-items of length one, with items as queries."""

    def __init__(self, codes: CodeArray, sub_item_embeddings: Float32Array, threads: int) -> None:
        lengths = np.linalg.norm(sub_item_embeddings, axis=2, keepdims=True)
        self._unit = sub_item_embeddings / np.maximum(lengths, np.float32(1e-12))
        self._codes = codes
        self._threads = threads
        self._index = Index.build(codes, self._unit, threads=threads)

    def nearest(self, items: Int64Array, count: int) -> Int64Array:
        """Return the `count` items that are most like each of these."""
        splits = np.arange(self._codes.shape[1])
        vectors = self._unit[splits, self._codes[items]].reshape(len(items), -1)
        exclude = [items[at : at + 1] for at in range(len(items))]  # an item is not its own
        return self._index.search(vectors, count, exclude=exclude, threads=self._threads).ids


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
        self._places = np.zeros(len(codes), np.int32)
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
            fresh = self._unmet(self._neighbours.take(expanded, axis=0).ravel())
            met.append(fresh)
            fresh_scores = self._scores(table, fresh)
            better = fresh_scores > scores.min()  # the others would not stay in the beam
            num_old = len(beam)
            beam = np.concatenate([beam, fresh[better]])
            scores = np.concatenate([scores, fresh_scores[better]])
            kept = np.argpartition(scores, len(beam) - self._beam)[-self._beam :]
            beam, scores = beam[kept], scores[kept]
            expanded = beam[kept >= num_old]  # the neighbours of all others were met before
            if not len(expanded):
                break
        self.items_scored = sum(map(len, met))
        for items in met:
            self._met[items] = False
        best = np.lexsort((beam, -scores))[:k]
        return beam[best], scores[best]

    def _scores(self, table: Float32Array, items: Int64Array) -> Float32Array:
        """Return scores added in split order, as a search adds them."""
        codes = self._codes.take(items, axis=0)
        total: Float32Array = table[0].take(codes[:, 0])
        for split in range(1, codes.shape[1]):
            total += table[split].take(codes[:, split])
        return total

    def _unmet(self, neighbours: Int32Array) -> Int64Array:
        """Return which of these items were not met before, each once, and mark them as met."""
        items = neighbours.astype(np.int64)
        unmet: Int64Array = items[~self._met.take(items)]
        order = np.arange(len(unmet), dtype=np.int32)
        self._places[unmet] = order
        once: Int64Array = unmet[self._places.take(unmet) == order]
        self._met[once] = True
        return once
