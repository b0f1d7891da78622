"""The transition head: what followed the last items of a history, as an addition to their scores.

How often one item followed another is sparse knowledge that a vector of fixed width can only learn
by heart: counting knows it better. So for each of the last items, those that followed it most often
in training get a boost. Its size depends on two numbers, how likely they followed and how often,
each of which falls into a bucket; the state decides what the buckets are worth (a linear map of φ).
In training, the transition that is to be predicted is taken out of the counts: else the head would
learn to trust what it will never see again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.data.counting import counted_transitions
from recprune.models.buckets import half_powers
from recprune.preparation.prepared import Prepared
from recprune.types import Boosts, Float32Array, Int32Array, Int64Array, StorageError, frozen

SUCCESSORS = 16  # of an item, at most
PROBABILITY_BUCKETS = 16  # two for every halving
COUNT_BUCKETS = 12  # two for every doubling
BUCKETS = PROBABILITY_BUCKETS + COUNT_BUCKETS  # for each of the last items
RATIO_UNIT = 1 << 20  # of total ÷ count in integers: two int32 leave so much room in an int64


# A bucket is how many of these a number reaches.
RATIO_BOUNDS = half_powers(PROBABILITY_BUCKETS, RATIO_UNIT)
COUNT_BOUNDS = half_powers(COUNT_BUCKETS)


@dataclass(frozen=True, eq=False)
class SuccessorTable:
    """The most frequent successors of every item: a sparse matrix by rows."""

    offsets: Int64Array  # [items + 1]
    successors: Int32Array  # most frequent first; of equals, the lower id
    counts: Int32Array  # how often they followed
    totals: Int32Array  # [items]: how often anything did

    def __post_init__(self) -> None:
        for array in (self.offsets, self.successors, self.counts, self.totals):
            frozen(array)

    def to_arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the parts by name."""
        return {f"{prefix}_{part.name}": getattr(self, part.name) for part in fields(self)}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], prefix: str, num_items: int
    ) -> SuccessorTable:
        """Return the table that `to_arrays` took apart."""
        table = cls(*(arrays[f"{prefix}_{part.name}"] for part in fields(cls)))
        if not table._is_whole(num_items):
            raise StorageError("the table of successors does not fit the items")
        return table

    def _is_whole(self, num_items: int) -> bool:
        """Whether everything can be looked up: a file may say anything."""
        parts = (self.offsets, self.successors, self.counts, self.totals)
        entries = self.successors.size
        shapes = ((num_items + 1,), (entries,), (entries,), (num_items,))
        if any(part.dtype.kind != "i" for part in parts):
            return False
        if tuple(part.shape for part in parts) != shapes:
            return False
        lengths = np.diff(self.offsets)
        if self.offsets[0] != 0 or self.offsets[-1] != entries or (lengths < 0).any():
            return False
        counted = np.bincount(np.repeat(np.arange(num_items), lengths), self.counts, num_items)
        return bool(
            (lengths <= SUCCESSORS).all()
            and ((self.successors >= 0) & (self.successors < num_items)).all()
            and (self.counts >= 1).all()
            and (counted <= self.totals).all()
        )


def count_transitions(prepared: Prepared) -> SuccessorTable:
    """Count what followed what in training."""
    num_items = prepared.num_items
    follows = prepared.in_training()
    starts = prepared.offsets[:-1]
    follows[starts[starts < len(follows)]] = False  # the first of a history does not
    sources, successors, counts = counted_transitions(prepared.items, follows, num_items)
    totals = np.bincount(sources, counts, num_items).astype(np.int32)
    begins = np.searchsorted(sources, np.arange(num_items + 1))
    kept = np.arange(len(sources)) - begins[sources] < SUCCESSORS
    offsets = np.concatenate([[0], np.cumsum(np.minimum(np.diff(begins), SUCCESSORS))])
    return SuccessorTable(offsets, successors[kept], counts[kept].astype(np.int32), totals)


class TransitionBoosts:
    """The head as it is served: NumPy alone."""

    def __init__(
        self, weight: Float32Array, bias: Float32Array, looks_back: int, table: SuccessorTable
    ) -> None:
        """Take the linear map, [buckets, d] and [buckets], and how many last items it looks at."""
        self._weight = weight
        self._bias = bias
        self._looks_back = looks_back
        self.table = table

    def __call__(
        self, sequence_embeddings: Float32Array, histories: Sequence[Int32Array]
    ) -> list[Boosts]:
        """Return the boosts of each user: items, each once, and what is added to their scores."""
        values = sequence_embeddings @ self._weight.T + self._bias  # [users, buckets]
        return [self._boosts(*pair) for pair in zip(values, histories, strict=True)]

    def _boosts(self, values: Float32Array, history: Int32Array) -> Boosts:
        """Return the boosts of one user, from the values of the buckets."""
        items: list[Int32Array] = []
        boosts: list[Float32Array] = []
        for back, last in enumerate(history[: -self._looks_back - 1 : -1]):
            table = self.table
            chosen = slice(table.offsets[last], table.offsets[last + 1])
            likely, often = buckets(table.counts[chosen], table.totals[last])
            own = values[back * BUCKETS : (back + 1) * BUCKETS]
            items.append(table.successors[chosen])
            boosts.append(own[likely] + own[often])
        distinct, places = np.unique(np.concatenate(items), return_inverse=True)
        total = np.zeros(len(distinct), np.float32)
        np.add.at(total, places, np.concatenate(boosts))
        return distinct.astype(np.int64), total


def buckets(counts: Int32Array, total: np.int32) -> tuple[Int64Array, Int64Array]:
    """Return for transitions from one item the buckets of probability, and of count."""
    ratios = int(total) * RATIO_UNIT // counts.astype(np.int64)
    likely = np.searchsorted(RATIO_BOUNDS, ratios, side="right")
    often = np.searchsorted(COUNT_BOUNDS, counts, side="right")
    return likely, PROBABILITY_BUCKETS + often
