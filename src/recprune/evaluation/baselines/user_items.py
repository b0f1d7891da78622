"""Who had what as a matrix, and the best of some scores: where several baselines begin and end."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.data.counting import counted_keys
from recprune.data.interactions import Interactions
from recprune.types import Int32Array, Int64Array, needs_extra


def user_item_matrix(train: Interactions, dtype: type[np.generic]) -> Any:
    """Return the binary matrix of a log, csr_array[users, items]: 1 where a user had an item."""
    with needs_extra("data"):
        from scipy.sparse import csr_array
    users = np.repeat(np.arange(train.num_users, dtype=np.int64), train.lengths)
    pairs, _ = counted_keys(users * train.num_items + train.items)
    users, items = np.divmod(pairs, train.num_items)
    offsets = np.searchsorted(users, np.arange(train.num_users + 1))
    entries = (np.ones(len(items), dtype), items.astype(np.int32), offsets)
    return csr_array(entries, (train.num_users, train.num_items))


def largest(values: NDArray[Any], ids: Int32Array, count: int) -> Int64Array:
    """Return the places of the `count` largest values, largest first, ties by id ascending."""
    places = np.arange(len(values))
    if len(values) > count:
        # All that tie with the last one stay in until ids decide between them.
        places = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return places[np.lexsort((ids[places], -values[places]))][:count]


def best_scored(scores: NDArray[Any], count: int) -> Int32Array:
    """Return the `count` items with the largest scores [items]; none whose score is 0 or less."""
    items = np.flatnonzero(scores > 0.0).astype(np.int32)
    return items[largest(scores[items], items, count)]
