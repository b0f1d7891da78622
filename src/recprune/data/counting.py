"""Counting what occurs, and what follows what, in whole arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recprune.types import Int32Array, Int64Array


def counted_keys(keys: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distinct keys in ascending order, and how often each occurs."""
    keys = np.sort(keys)  # vectorised: many times faster than np.unique's hash table
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.diff(starts, append=len(keys))


def counted_transitions(
    items: Int32Array, follows: NDArray[np.bool_], num_items: int
) -> tuple[Int32Array, Int32Array, Int64Array]:
    """Return the distinct pairs of an item and its successor, and how often each occurs.

    `follows` says which interactions follow the one before. Pairs ascend by the first item; of one
    item, the most frequent successor comes first, and of equals the lower id.
    """
    after = np.flatnonzero(follows)
    keys, counts = counted_keys(items[after - 1] * np.int64(num_items) + items[after])
    sources, successors = (part.astype(np.int32) for part in np.divmod(keys, num_items))
    # Keys ascend by item and successor, and a stable sort keeps that among equals.
    order = np.argsort(sources * (counts.max(initial=0) + 1) - counts, kind="stable")
    return sources[order], successors[order], counts[order]
