"""What followed the last item."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.popularity import Popularity, fill_up
from recprune.types import Int32Array, Int64Array


class MarkovChain:
    """What followed the user's last item most often in training; then what is popular."""

    name = "Markov chain"

    def __init__(self, train: Interactions) -> None:
        self._popularity = Popularity(train)
        follows = np.ones(train.num_interactions, np.bool_)
        follows[train.offsets[:-1][train.lengths > 0]] = False  # the first of a history does not
        after = np.flatnonzero(follows)
        transitions = train.items[after - 1] * np.int64(train.num_items) + train.items[after]
        transitions, counts = counted_keys(transitions)
        sources, successors = np.divmod(transitions, train.num_items)
        # Transitions ascend by source and successor, and a stable sort keeps that among equals.
        most_frequent_first = sources * (counts.max(initial=0) + 1) - counts
        order = np.argsort(most_frequent_first, kind="stable")
        # A sparse matrix by rows, of which only the order of its entries is still needed.
        self._successors = successors[order].astype(np.int32)
        self._offsets = np.searchsorted(sources, np.arange(train.num_items + 1))

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the k most frequent successors of every user's last item."""
        return fill_up(histories, k, exclude_seen, self._popularity, self._after_last)

    def _after_last(self, history: Int32Array) -> Int32Array:
        if len(history) == 0:
            return self._successors[:0]
        last = int(history[-1])
        return self._successors[self._offsets[last] : self._offsets[last + 1]]


def counted_keys(keys: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distinct keys in ascending order, and how often each occurs."""
    keys = np.sort(keys)  # vectorised: many times faster than np.unique's hash table
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.diff(starts, append=len(keys))
