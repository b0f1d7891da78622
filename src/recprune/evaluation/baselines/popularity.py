"""What most have: the plainest baseline, and what fills up the answers of all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.baseline import check_question
from recprune.types import Int32Array, Int64Array


class Popularity:
    """The items with the most interactions, the same for every user."""

    name = "popularity"

    def __init__(self, train: Interactions) -> None:
        self._order = most_frequent_first(train.items, train.num_items)
        # Where an item stands in that order; items without interactions stand behind its end.
        self._places = np.full(train.num_items, train.num_items, np.int32)
        self._places[self._order] = np.arange(len(self._order), dtype=np.int32)

    @property
    def num_items(self) -> int:
        """Catalogue size, items without interactions included."""
        return len(self._places)

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the k most popular items for every user."""
        return fill_up(histories, k, exclude_seen, self, lambda _: self._order[:0])

    def most_popular(self, count: int, *, without: Int32Array) -> Int32Array:
        """Return the `count` most popular items that are not among `without`, or all there are."""
        first = self._order[: count + len(without)]
        kept = np.ones(len(first), np.bool_)
        places = self._places[without]
        kept[places[places < len(first)]] = False
        return first[kept][:count]


def most_frequent_first(items: Int32Array, num_items: int) -> Int32Array:
    """Return each item that occurs once, the most frequent first, ties by item id."""
    counts = np.bincount(items, minlength=num_items)
    return np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].astype(np.int32)


def fill_up(
    histories: Sequence[Int32Array],
    k: int,
    exclude_seen: bool,
    popularity: Popularity,
    preferred: Callable[[Int32Array], Int32Array],
) -> Int64Array:
    """Return the preferred items for every history, best first, then popular ones up to k."""
    check_question(histories, k, popularity.num_items)
    ids = np.full((len(histories), k), -1, np.int64)
    for row, history in enumerate(histories):
        excluded = history if exclude_seen else history[:0]
        chosen = preferred(history)[: k + len(excluded)]
        chosen = chosen[~np.isin(chosen, excluded)][:k]
        without = np.concatenate([chosen, excluded])
        popular = popularity.most_popular(k - len(chosen), without=without)
        ids[row, : len(chosen) + len(popular)] = np.concatenate([chosen, popular])
    return ids
