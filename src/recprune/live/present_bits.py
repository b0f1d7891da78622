"""Bits that say which items of a segment are still there, 64 to a word.

A snapshot shares them with the one before it: a change makes a copy of those that it touches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.search.question import mask_of
from recprune.types import Int64Array, StorageError, frozen

_WORD_BITS = 64


def all_present(num_items: int) -> NDArray[np.uint64]:
    """Return bits of which all are set."""
    octets = np.zeros(8 * -(-num_items // _WORD_BITS), np.uint8)
    octets[: num_items // 8] = 0xFF
    if num_items % 8:
        octets[num_items // 8] = (1 << num_items % 8) - 1
    return octets.view(np.uint64)


def without(
    words: NDArray[np.uint64] | None, positions: Int64Array, num_items: int
) -> NDArray[np.uint64]:
    """Return bits with those of some positions, each given once, cleared."""
    cleared = np.array(words) if words is not None else all_present(num_items)
    bits = np.uint64(1) << (positions % _WORD_BITS).astype(np.uint64)
    np.bitwise_and.at(cleared, positions // _WORD_BITS, ~bits)
    frozen(cleared)
    return cleared


def are_present(words: NDArray[np.uint64] | None, positions: Int64Array) -> NDArray[np.bool_]:
    """Say for each position whether its bit is set."""
    if words is None:
        return np.ones(len(positions), np.bool_)
    shifts = (positions % _WORD_BITS).astype(np.uint64)
    return (words[positions // _WORD_BITS] >> shifts & np.uint64(1)).astype(np.bool_)


def present_mask(words: NDArray[np.uint64] | None, num_items: int) -> NDArray[np.bool_]:
    return np.ones(num_items, np.bool_) if words is None else mask_of(words, num_items)


def checked_bits(words: NDArray[Any], num_items: int, name: str) -> int:
    """Return how many bits are set; refuse what cannot be bits over so many items."""
    count = -(-num_items // _WORD_BITS)
    if words.dtype != np.uint64 or words.shape != (count,):
        raise StorageError(f"{name} is {words.dtype}{list(words.shape)}, expected uint64[{count}]")
    if num_items % _WORD_BITS and int(words[-1]) >> num_items % _WORD_BITS:
        raise StorageError(f"{name} has bits beyond item {num_items - 1}")
    return int(np.bitwise_count(words).sum())
