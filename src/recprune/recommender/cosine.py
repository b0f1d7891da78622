"""The items most like another one: the best cosines of item vectors, exact.

An item's vector is that of its sub-items, one after the other. Let T_m[b] be the inner product of a
sub-item's vector with the same part of the vector asked for, whose length is q, and N_m[b] the
square of its own length; summed over an item's code, these are s and x. The item's cosine is
s / (q √x), which is no sum over splits, so that no index ranks by it. But the items whose cosine is
t > 0 or better are among those that a sum finds: the root is concave, so that between two lengths a
and b its chord lies below it,

    √x ≥ (x + a b) / (a + b)    for a ≤ √x ≤ b,

and an item of such a length whose s / q is t √x or more has

    Σ_m (T_m / q − t N_m / (a + b)) ≥ t a b / (a + b):

a search of sub-item scores with a floor. Outside of a and b the chord lies above the root, and an
item is left to the band of lengths that it is in. All bands are searched at once; the narrower they
are, the fewer items are found that have a worse cosine. Which t to take, the search says itself: a
first one, without floors, finds some K items, and the K-th best cosine is at least theirs.

The core adds in float32, and cosines are compared as float32: floors are lower by what that may
amount to. Of what is found, cosines are computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.live.snapshot import LiveSnapshot
from recprune.search.index import Index
from recprune.search.question import mask_of
from recprune.types import MAX_SUB_ITEMS, Float32Array, Float64Array, Int64Array

# Of so many items all are looked at: as many as a full table has, whose one split prunes nothing.
EVERY_ITEM = MAX_SUB_ITEMS
_AT_ONCE = 1 << 20  # items whose cosines are in memory together
_BANDS = 8  # of lengths, at most: down to a fifth of the longest, and one for all below
_RATIO = 1.25  # of a band's lengths: its chord is within a hundredth of the root
_GUESS = 0.7  # what the first search takes for a good cosine
_MORE = 4  # times as many as are wanted are searched for after the first search, and so on
_FEW = 16  # that part of the items may be found, else looking at all of them takes less
_ROUNDED = 2.0**-24  # half of what two neighbours among float32 cosines are apart, at most
_NOTHING: tuple[Int64Array, Float32Array] = (np.empty(0, np.int64), np.empty(0, np.float32))


class CosineSearch:
    """Finds the items of an index, or of a live one at a moment, by the cosine with one of them.

    An item's bias is no part of its vector, and a vector of zeros has the cosine 0 with all.
    """

    def __init__(self, index: Index | LiveSnapshot, *, every_item: int = EVERY_ITEM) -> None:
        """Look at all items where there are no more than `every_item`."""
        self._index = index
        self._every_item = every_item
        self._vectors = index.sub_item_embeddings()  # [M, B, d/M]
        self._squares = _inner_products(self._vectors, self._vectors)  # [M, B]
        # A compact index puts all codes together, once for all that is asked.
        self._codes_of: Callable[[Int64Array], NDArray[Any]] = (
            index.item_codes if isinstance(index, LiveSnapshot) else index.item_codes().__getitem__
        )

    def best(
        self,
        item: int,
        k: int,
        *,
        exclude: Int64Array,
        allow: NDArray[Any] | None = None,
        threads: int = 1,
    ) -> tuple[Int64Array, Float32Array]:
        """Return the best k without the item itself, and their cosines; fewer if there are fewer.

        The tie rule is cosine descending, item id ascending. `allow` is a mask or bits, as in
        `Index.search`.
        """
        code = self._codes_of(np.array([item]))[0]
        asked = self._vectors[np.arange(len(code)), code]  # [M, d/M]
        products = _inner_products(self._vectors, asked[:, None])  # [M, B]
        length = float(np.sqrt(_sums(self._squares, code[None])[0]))
        exclude = np.append(exclude, item)
        found = None
        if self._can_prune() and length > 0.0 and k > 0:
            found = self._candidates(products, length, k, exclude, allow, threads)
        if found is None:
            found = self._eligible(exclude, allow)
        best, cosines = _NOTHING
        for begin in range(0, len(found), _AT_ONCE):
            part = found[begin : begin + _AT_ONCE]
            best = np.concatenate([best, part])
            cosines = np.concatenate([cosines, self._cosines(products, length, part)])
            order = _order(best, cosines, k)
            best, cosines = best[order], cosines[order]
        return best, cosines

    def _can_prune(self) -> bool:
        index = self._index
        biased = index.has_bias if isinstance(index, LiveSnapshot) else index.item_bias is not None
        return index.num_items > self._every_item and not biased

    def _candidates(
        self,
        products: Float64Array,
        length: float,
        k: int,
        exclude: Int64Array,
        allow: NDArray[Any] | None,
        threads: int,
    ) -> Int64Array | None:
        """Return items among which are all of the best k; None where they would be too many."""
        longest = float(np.sqrt(self._squares.max(axis=1).sum()))
        if longest == 0.0:
            return None
        # Nothing is larger than 1, so that float32 holds all sums.
        scaled, squares = products / length / longest, self._squares / longest**2
        edges = _edges(float(np.sqrt(squares.min(axis=1).sum())))
        shorter, longer = edges[1:], edges[:-1]

        def search(least: float, wanted: int, with_floors: bool) -> Int64Array:
            """Return what is found in every band, [bands, wanted]."""
            weights = least / (shorter + longer)
            tables = scaled - weights[:, None, None] * squares  # [bands, M, B]
            floors = weights * shorter * longer
            # One rounding for every number of a table and every addition, and one of the floor.
            sizes = np.abs(tables).max(axis=2).sum(axis=1) + floors
            floors -= 2.0 * _ROUNDED * (tables.shape[1] + 2) * sizes
            return self._index.search_scores(
                tables.astype(np.float32),
                wanted,
                exclude=[exclude] * len(tables),
                allow=allow,
                floor=floors if with_floors else None,
                threads=threads,
            ).ids

        wanted = k
        found = search(_GUESS, wanted, with_floors=False)
        while _MORE * wanted <= self._index.num_items // _FEW:
            items = np.unique(found[found >= 0])
            if len(items) < k:  # there are no more
                return items
            cosines = self._cosines(products, length, items)
            least = float(cosines[_order(items, cosines, k)][-1]) - _ROUNDED
            if least <= 0.0:
                return None
            wanted *= _MORE
            found = search(least, wanted, with_floors=True)
            if (found[:, -1] < 0).all():  # all above the floors
                return np.unique(found[found >= 0])
        return None

    def _eligible(self, exclude: Int64Array, allow: NDArray[Any] | None) -> Int64Array:
        """Return all items that may be in the answer."""
        index = self._index
        if isinstance(index, LiveSnapshot):
            items = index.numbers()
        else:
            items = np.arange(index.num_items, dtype=np.int64)
        if allow is not None:
            mask = allow if allow.dtype == np.bool_ else mask_of(allow, index.num_items)
            items = items[mask[items]]
        return items[~np.isin(items, exclude)]

    def _cosines(self, products: Float64Array, length: float, items: Int64Array) -> Float32Array:
        """Return the cosines of items: what they depend on are codes alone, so equal ones are."""
        codes = self._codes_of(items)
        lengths = length * np.sqrt(_sums(self._squares, codes))
        cosines = np.zeros(len(items))
        np.divide(_sums(products, codes), lengths, out=cosines, where=lengths > 0.0)
        return cosines.astype(np.float32)


def _edges(shortest: float) -> Float64Array:
    """Return the lengths that divide bands, from 1 down to the shortest there is."""
    edges = _RATIO ** -np.arange(float(_BANDS))
    return np.append(edges[(edges > shortest) | (edges == 1.0)], min(shortest, 1.0))


def _inner_products(vectors: Float32Array, others: Float32Array) -> Float64Array:
    """Return those of vectors [M, B, d/M] and others, of the same shape or [M, 1, d/M]: [M, B]."""
    products: Float64Array = np.einsum("mbd,mbd->mb", vectors, others, dtype=np.float64)
    return products


def _sums(tables: Float64Array, codes: NDArray[Any]) -> Float64Array:
    """Add up the numbers of sub-items, [M, B], for codes [items, M], in the order of splits."""
    sums = np.zeros(len(codes))
    for table, sub_items in zip(tables, codes.T, strict=True):
        sums += table[sub_items]
    return sums


def _order(items: Int64Array, cosines: Float32Array, k: int) -> NDArray[np.intp]:
    """Return the places of the best k, the best first."""
    places = np.arange(len(items))
    if 0 < k < len(items):  # the others need no order
        places = np.flatnonzero(cosines >= np.partition(cosines, -k)[-k])
    return places[np.lexsort((items[places], -cosines[places]))][:k]
