"""Which items pass a bound condition, as bits; and those of the last ones, kept."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune.attributes.binding import Bound, CodeTest, Group, Ranges
from recprune.attributes.column import NO_VALUE, AttributeColumn
from recprune.search.question import mask_of
from recprune.types import Int64Array, frozen

Words: TypeAlias = NDArray[np.uint64]
_BITS = 64
# Ranges of codes that all items are compared with, one after the other; where there are more, their
# items are looked up in postings, four bytes an item.
_MOST_RANGES = 4
# Where more than one of so many items has changed, all are looked at.
_CHANGED_PER_ITEM = 16
_ENTRY_BYTES = 400  # of a kept condition beside its bits and its text, about


def words_of(bound: Bound, columns: Mapping[str, AttributeColumn], cache: BitmapCache) -> Words:
    """Return the items that a condition is true of, as bits; what is in the cache stays as it is.

    Where some items have changed since, the condition is asked of these alone.
    """
    kept = cache.get(bound.key)
    if kept is not None and not kept.changed:
        return kept.words
    if kept is not None:
        changed = np.unique(np.concatenate(kept.changed))
        words = _mended(kept.words, changed, bound, columns)
    elif isinstance(bound, CodeTest):
        words = code_words(columns[bound.column], bound.ranges, inverse=bound.inverse)
    else:
        words = _joined(bound, [words_of(part, columns, cache) for part in bound.parts])
    cache.put(bound.key, words)
    return words


def _joined(group: Group, parts: list[Words]) -> Words:
    join = np.bitwise_and if group.all_of else np.bitwise_or
    found: Words = join(parts[0], parts[1])
    for part in parts[2:]:
        join(found, part, out=found)
    return found


def _mended(
    words: Words, changed: Int64Array, bound: Bound, columns: Mapping[str, AttributeColumn]
) -> Words:
    """Return bits in which those of some items, in ascending order, are made anew."""
    num_items = next(iter(columns.values())).num_items
    mended = np.zeros(-(-num_items // _BITS), np.uint64)  # there may be items more than before
    mended[: len(words)] = words
    chosen = {name: columns[name].take(changed) for name in _columns_of(bound)}
    true = mask_of(words_of(bound, chosen, BitmapCache(0)), len(changed))
    places, bits = changed // _BITS, np.uint64(1) << (changed % _BITS).astype(np.uint64)
    np.bitwise_or.at(mended, places, bits)
    np.bitwise_xor.at(mended, places[~true], bits[~true])
    return mended


def _columns_of(bound: Bound) -> set[str]:
    if isinstance(bound, CodeTest):
        return {bound.column}
    return set().union(*(_columns_of(part) for part in bound.parts))


def code_words(column: AttributeColumn, ranges: Ranges, *, inverse: bool = False) -> Words:
    """Return the items with a code in some ranges, or all others, as bits."""
    inside = _merged(ranges)
    if not column.is_list:
        if inside and inside[0][0] == NO_VALUE + 1 and column.is_whole:
            inside[0] = (NO_VALUE, inside[0][1])  # the same items, by one comparison less
        outside = _outside(inside, column.num_codes)
        if len(outside) + (not inverse) <= len(inside):  # less to compare with, or nothing to turn
            inside, inverse = outside, not inverse
    if column.is_list or len(inside) > _MOST_RANGES:
        mask = _listed(column, inside)
    else:
        mask = _among(column.codes, inside, column.num_codes)
    words = packed(mask)
    if inverse:
        np.invert(words, out=words)
        if len(mask) % _BITS:
            words[-1] &= np.uint64((1 << len(mask) % _BITS) - 1)
    return words


def _listed(column: AttributeColumn, ranges: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return the items that the postings of some codes have."""
    starts, items = column.postings
    mask = np.zeros(column.num_items, np.bool_)
    for low, high in ranges:
        mask[items[starts[low] : starts[high]]] = True
    return mask


def _merged(ranges: Ranges) -> list[tuple[int, int]]:
    """Return ranges in order, without those that are empty, as few as there can be."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if low >= high:
            continue
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def _outside(ranges: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return what is between ranges, from 0 to below `end`."""
    edges = [0, *(edge for pair in ranges for edge in pair), end]
    return [pair for pair in zip(edges[::2], edges[1::2], strict=True) if pair[0] < pair[1]]


def _among(codes: NDArray[Any], ranges: list[tuple[int, int]], end: int) -> NDArray[np.bool_]:
    mask = np.zeros(len(codes), np.bool_) if not ranges else _inside(codes, *ranges[0], end)
    for low, high in ranges[1:]:
        mask |= _inside(codes, low, high, end)
    return mask


def _inside(codes: NDArray[Any], low: int, high: int, end: int) -> NDArray[np.bool_]:
    found: NDArray[np.bool_]
    if low == 0 and high == end:
        found = np.ones(len(codes), np.bool_)
    elif low == 0:
        found = codes < high
    elif high == end:
        found = codes >= low
    elif high == low + 1:
        found = codes == low
    else:  # what is below wraps around, and is then above
        found = codes - codes.dtype.type(low) < high - low
    return found


def packed(mask: NDArray[np.bool_]) -> Words:
    """Return a mask over the items as bits, 64 in a word; those beyond the items are 0."""
    octets = np.zeros(-(-len(mask) // _BITS) * 8, np.uint8)
    bits = np.packbits(mask, bitorder="little")
    octets[: len(bits)] = bits
    return octets.view(np.uint64)


# Kept --------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """Bits, and which items have changed since they were made."""

    words: Words
    changed: tuple[Int64Array, ...] = ()  # by one change after the other


class BitmapCache:
    """Bits by the condition that they are of; what was asked for longest ago goes first.

    Safe to share between threads. It belongs to one version of the columns.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> Kept | None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
            return kept

    def put(self, key: str, words: Words) -> None:
        """Keep bits, which are read-only from then on; none that are larger than the cache."""
        frozen(words)
        with self._lock:
            self._add(key, Kept(words))

    def after(self, changed: Int64Array) -> BitmapCache:
        """Return the cache of the next version, in which some items are no longer the same."""
        following = BitmapCache(self.max_bytes)
        with self._lock:
            kept = dict(self._kept)
        for key, (words, before) in kept.items():
            together = (*before, changed) if len(changed) else before
            if sum(map(len, together)) * _CHANGED_PER_ITEM <= len(words) * _BITS:
                following._add(key, Kept(words, together))
        return following

    def _add(self, key: str, kept: Kept) -> None:
        before = self._kept.pop(key, None)
        self._bytes -= _size(key, before) if before is not None else 0
        if _size(key, kept) > self.max_bytes:
            return
        self._kept[key] = kept
        self._bytes += _size(key, kept)
        while self._bytes > self.max_bytes:
            old, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(old, oldest)


def _size(key: str, kept: Kept) -> int:
    """Return the bytes that a condition takes: of a small catalogue, its text is most of it."""
    return kept.words.nbytes + sys.getsizeof(key) + _ENTRY_BYTES
