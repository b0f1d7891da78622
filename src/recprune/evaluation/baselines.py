"""Simple recommenders that a model has to beat before its figures mean anything.

All of them learn from a training log by counting, take histories oldest first, and break ties by
item id. Items without training interactions are never recommended, unless from the user's own past.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from recprune.data.interactions import Interactions
from recprune.types import Float64Array, InputError, Int32Array, Int64Array, needs_extra

DEFAULT_RECENT_ITEMS = 5
DEFAULT_NEIGHBOURS = 200
# Sparse products at once: some 100 MB of entries, however popular the items are.
_ENTRIES_AT_ONCE = 4_000_000


class Baseline(Protocol):
    """Anything that recommends items for histories."""

    name: str

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the k best items of every user, [users, k], −1 where there are fewer.

        With `exclude_seen` no item of the user's own history is among them.
        """
        ...


class Popularity:
    """The items with the most interactions, the same for every user."""

    name = "popularity"

    def __init__(self, train: Interactions) -> None:
        counts = np.bincount(train.items, minlength=train.num_items)
        had = np.count_nonzero(counts)
        self._order = np.argsort(-counts, kind="stable")[:had].astype(np.int32)
        # Where an item stands in that order; items without interactions stand behind its end.
        self._places = np.full(train.num_items, train.num_items, np.int32)
        self._places[self._order] = np.arange(had, dtype=np.int32)

    @property
    def num_items(self) -> int:
        """Catalogue size, items without interactions included."""
        return len(self._places)

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the k most popular items for every user."""
        return _fill(histories, k, exclude_seen, self, lambda _: self._order[:0])

    def most_popular(self, count: int, *, without: Int32Array) -> Int32Array:
        """Return the `count` most popular items that are not among `without`, or all there are."""
        first = self._order[: count + len(without)]
        kept = np.ones(len(first), np.bool_)
        places = self._places[without]
        kept[places[places < len(first)]] = False
        return first[kept][:count]


class RecentItems:
    """What the user had last, most recent first and each item once; then what is popular."""

    name = "recent items"

    def __init__(self, train: Interactions) -> None:
        self._popularity = Popularity(train)

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the last k items of every history; with `exclude_seen` only popularity is left."""
        return _fill(histories, k, exclude_seen, self._popularity, _most_recent_first)


class MarkovChain:
    """What followed the user's last item most often in training; then what is popular."""

    name = "Markov chain"

    def __init__(self, train: Interactions) -> None:
        self._popularity = Popularity(train)
        follows = np.ones(train.num_interactions, np.bool_)
        follows[train.offsets[:-1][train.lengths > 0]] = False  # the first of a history does not
        after = np.flatnonzero(follows)
        transitions = train.items[after - 1] * np.int64(train.num_items) + train.items[after]
        transitions, counts = _counted(transitions)
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
        return _fill(histories, k, exclude_seen, self._popularity, self._after_last)

    def _after_last(self, history: Int32Array) -> Int32Array:
        if len(history) == 0:
            return self._successors[:0]
        last = int(history[-1])
        return self._successors[self._offsets[last] : self._offsets[last + 1]]


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
        with needs_extra("data"):
            from scipy.sparse import csr_array
        self._recent = recent
        self._nearest = neighbours
        self._popularity = Popularity(train)
        users = np.repeat(np.arange(train.num_users, dtype=np.int64), train.lengths)
        pairs, _ = _counted(users * train.num_items + train.items)
        users, items = np.divmod(pairs, train.num_items)
        offsets = np.searchsorted(users, np.arange(train.num_users + 1))
        entries = (np.ones(len(items), np.int32), items.astype(np.int32), offsets)
        self._items_of_users: Any = csr_array(entries, (train.num_users, train.num_items))
        self._users_of_items: Any = self._items_of_users.T.tocsr()
        self._lengths = np.diff(offsets)
        self._num_users = np.diff(self._users_of_items.indptr).astype(np.float64)

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the k items most similar to every user's recent ones."""
        _check(histories, k, self._popularity.num_items)
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

        return _fill(histories, k, exclude_seen, self._popularity, similar)

    def _last_items(self, history: Int32Array) -> Int32Array:
        return _most_recent_first(history)[: self._recent]

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
                nearest = _largest(squares, others, self._nearest)
                found[item] = (others[nearest], np.sqrt(squares[nearest]))
        return found


def every_baseline(train: Interactions) -> tuple[Baseline, ...]:
    """Return all baselines with their default settings, the simplest first."""
    return Popularity(train), RecentItems(train), MarkovChain(train), ItemKNN(train)


def _fill(
    histories: Sequence[Int32Array],
    k: int,
    exclude_seen: bool,
    popularity: Popularity,
    preferred: Callable[[Int32Array], Int32Array],
) -> Int64Array:
    """Return the preferred items for every history, best first, then popular ones up to k."""
    _check(histories, k, popularity.num_items)
    ids = np.full((len(histories), k), -1, np.int64)
    for row, history in enumerate(histories):
        excluded = history if exclude_seen else history[:0]
        chosen = preferred(history)[: k + len(excluded)]
        chosen = chosen[~np.isin(chosen, excluded)][:k]
        without = np.concatenate([chosen, excluded])
        popular = popularity.most_popular(k - len(chosen), without=without)
        ids[row, : len(chosen) + len(popular)] = np.concatenate([chosen, popular])
    return ids


def _check(histories: Sequence[Int32Array], k: int, num_items: int) -> None:
    if k < 1:
        raise InputError(f"k is {k}, expected at least 1")
    for row, history in enumerate(histories):
        if history.ndim != 1 or history.dtype.kind not in "iu":
            raise InputError(
                f"histories[{row}] is {history.dtype}{list(history.shape)}, expected integers [n]"
            )
        if len(history) and not 0 <= history.min() <= history.max() < num_items:
            raise InputError(f"histories[{row}] holds items outside 0 to {num_items - 1}")


def _most_recent_first(history: Int32Array) -> Int32Array:
    """Return each item of a history once, at its last occurrence, most recent first."""
    backwards = history[::-1]
    _, first = np.unique(backwards, return_index=True)
    return backwards[np.sort(first)]


def _counted(keys: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distinct keys in ascending order, and how often each occurs."""
    keys = np.sort(keys)  # vectorised: many times faster than np.unique's hash table
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.diff(starts, append=len(keys))


def _largest(values: Float64Array, ids: Int32Array, count: int) -> Int64Array:
    """Return the places of the `count` largest values, largest first, ties by id ascending."""
    places = np.arange(len(values))
    if len(values) > count:
        # All that tie with the last one stay in until ids decide between them.
        places = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return places[np.lexsort((ids[places], -values[places]))][:count]
