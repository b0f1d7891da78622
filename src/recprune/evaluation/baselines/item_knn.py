"""What the same users had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.baseline import check_question
from recprune.evaluation.baselines.popularity import Popularity, fill_up
from recprune.evaluation.baselines.recent_items import most_recent_first
from recprune.evaluation.baselines.user_items import largest, user_item_matrix
from recprune.types import Float64Array, InputError, Int32Array, Int64Array

DEFAULT_RECENT_ITEMS = 5
DEFAULT_NEIGHBOURS = 200
# Sparse products at once: some 100 MB of entries, however popular the items are.
_ENTRIES_AT_ONCE = 4_000_000


class ItemKNN:
    """Items that the same users had as the user's recent ones; then what is popular.

    The score of item j is Σ_r cos(h_r, j) / (r + 1), over the `recent` last distinct items h_0, h_1
    … of the history, most recent first. The cosine of two items is that of their columns in the
    binary user–item matrix, |users of both| / √(|users of one| · |users of the other|), and counts
    as 0 beyond the `neighbours` nearest of h_r. An item is near to itself like any other, so that
    repeated consumption is recommended unless it is excluded.
    """

    name = "item KNN"

    def __init__(
        self,
        train: Interactions,
        *,
        recent: int = DEFAULT_RECENT_ITEMS,
        neighbours: int = DEFAULT_NEIGHBOURS,
    ) -> None:
        for name, value in (("recent", recent), ("neighbours", neighbours)):
            if value < 1:
                raise InputError(f"{name} is {value}, expected at least 1")
        self._recent = recent
        self._nearest = neighbours
        self._popularity = Popularity(train)
        self._items_of_users: Any = user_item_matrix(train, np.int32)
        self._users_of_items: Any = self._items_of_users.T.tocsr()
        self._lengths = np.diff(self._items_of_users.indptr)
        self._num_users = np.diff(self._users_of_items.indptr).astype(np.float64)

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the k items most similar to every user's recent ones."""
        check_question(histories, k, self._popularity.num_items)
        recent = [self._last_items(history) for history in histories]
        neighbours = self._neighbours(np.unique(np.concatenate([np.zeros(0, np.int32), *recent])))

        def similar(history: Int32Array) -> Int32Array:
            near = [neighbours[item] for item in self._last_items(history).tolist()]
            if not near:
                return history[:0]
            items = np.concatenate([items for items, _ in near])
            weighted = [cosines / (place + 1) for place, (_, cosines) in enumerate(near)]
            candidates, candidate_of_entry = np.unique(items, return_inverse=True)
            scores = np.bincount(candidate_of_entry, np.concatenate(weighted))
            return candidates[np.argsort(-scores, kind="stable")]

        return fill_up(histories, k, exclude_seen, self._popularity, similar)

    def _last_items(self, history: Int32Array) -> Int32Array:
        return most_recent_first(history)[: self._recent]

    def _neighbours(self, items: Int32Array) -> dict[int, tuple[Int32Array, Float64Array]]:
        """Return the nearest neighbours of some items and their cosines, nearest first."""
        found = {}
        work = np.cumsum(self._users_of_items[items] @ self._lengths)
        ends = np.flatnonzero(np.diff(work // _ENTRIES_AT_ONCE)) + 1
        for block in np.split(items, ends):
            common = self._users_of_items[block] @ self._items_of_users
            for row, item in enumerate(block.tolist()):
                entries = slice(common.indptr[row], common.indptr[row + 1])
                others, counts = common.indices[entries], common.data[entries].astype(np.float64)
                # One rounded quotient of integers: cosines that are equal compare as equal.
                squares = counts * counts / (self._num_users[item] * self._num_users[others])
                nearest = largest(squares, others, self._nearest)
                found[item] = (others[nearest], np.sqrt(squares[nearest]))
        return found
