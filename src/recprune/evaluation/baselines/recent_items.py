"""What the user had last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.popularity import Popularity, fill_up
from recprune.types import Int32Array, Int64Array


class RecentItems:
    """What the user had last, most recent first and each item once; then what is popular."""

    name = "recent items"

    def __init__(self, train: Interactions) -> None:
        self._popularity = Popularity(train)

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the last k items of every history; with `exclude_seen` only popularity is left."""
        return fill_up(histories, k, exclude_seen, self._popularity, most_recent_first)


def most_recent_first(history: Int32Array) -> Int32Array:
    """Return each item of a history once, at its last occurrence, most recent first."""
    backwards = history[::-1]
    _, first = np.unique(backwards, return_index=True)
    return backwards[np.sort(first)]
