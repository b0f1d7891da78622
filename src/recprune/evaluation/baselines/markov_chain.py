"""What followed the last item."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recprune.data.counting import counted_transitions
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
        sources, self._successors, _ = counted_transitions(train.items, follows, train.num_items)
        # A sparse matrix by rows, of which only the order of its entries is still needed.
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
