"""What a search returns: the best items, and what finding them cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune import _native
from recprune.types import Float32Array, Int64Array

# One query's record, as the native core writes it.
RECORD = np.dtype(_native.record_fields())
RECORD_WORDS = RECORD.itemsize // 8


@dataclass(slots=True, eq=False)
class SearchStats:
    """What each query cost, and whether its answer is exact. One entry per query."""

    raw: Int64Array  # [queries, words]: the native records, read only when a property is asked for

    @property
    def records(self) -> NDArray[Any]:
        """All figures as one structured array."""
        return self.raw.view(RECORD)[:, 0]

    @property
    def method(self) -> list[str]:
        """The method that answered."""
        return [_native.Method(int(number)).name for number in self.records["method"]]

    @property
    def exact(self) -> NDArray[np.bool_]:
        """Whether the answer is the exhaustive one."""
        return self.records["exact"].astype(np.bool_)

    @property
    def steps(self) -> Int64Array:
        """Lists, cells or batches of sub-item ids that were visited."""
        return np.asarray(self.records["steps"])

    @property
    def items_scored(self) -> Int64Array:
        """Items whose score was computed, repeats counted."""
        return np.asarray(self.records["items_scored"])

    @property
    def items_touched(self) -> Int64Array:
        """Items that passed through a filter, scored or not."""
        return np.asarray(self.records["items_touched"])

    @property
    def bytes_touched(self) -> Int64Array:
        """Bytes of codes, keys and posting lists that were read; the tables of a query left out."""
        return np.asarray(self.records["bytes_touched"])

    @property
    def threshold(self) -> NDArray[np.float64]:
        """The K-th best score (θ); −∞ where fewer were found."""
        return np.asarray(self.records["threshold"])

    @property
    def upper_bound(self) -> NDArray[np.float64]:
        """No item that is missing from the answer scores higher (σ); θ where that is exact."""
        return np.asarray(self.records["upper_bound"])

    @property
    def nanoseconds(self) -> Int64Array:
        """Time in the native core, sub-item scores included; queries together have equal shares."""
        return np.asarray(self.records["nanoseconds"])

    @property
    def sub_item_score_nanoseconds(self) -> Int64Array:
        """The part of that time which computing the sub-item scores took."""
        return np.asarray(self.records["sub_item_score_nanoseconds"])

    @property
    def together(self) -> Int64Array:
        """How many queries visited their cells together with each, itself counted; 1: alone."""
        return np.asarray(self.records["together"])


@dataclass(slots=True, eq=False)
class TopK:
    """The best items: [queries, k], or [k] for a single query. −1 and −∞ where there are fewer."""

    ids: Int64Array
    scores: Float32Array
    stats: SearchStats
