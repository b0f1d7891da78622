"""How often anyone had an item lately: whether what a user had before is still in use.

The repeat head knows an item by what its user did. Whether a file still changes or a product is
still sold, the others know. A log is divided into periods with as many events each, as far as times
tell events apart; at the end of each, every item has a count of its events in which older ones
weigh less. The count falls into a bucket like the other numbers of the head.

What is asked at a moment may use only periods that had ended before it. Served is the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.preparation.prepared import MICROSECONDS, Prepared
from recprune.types import Int64Array, StorageError, frozen

_PERIODS = 64
# With fewer, what is served, the end of the last one, would be unlike all that training looks up.
_FEWEST_PERIODS = 8
_DECAY = 0.125  # share of the log's events after which one weighs e times less
# Two buckets for every doubling, from 2^−8 events to 2^8; the first is for items without any.
_MOST_DOUBLINGS = 8
ACTIVITY_BUCKETS = 4 * _MOST_DOUBLINGS + 1


@dataclass(frozen=True, eq=False)
class Activity:
    """The bucket of every item at the end of each period."""

    ends: Int64Array  # [periods] seconds, ascending: when each ended
    buckets: NDArray[np.uint8]  # [periods + 1, items]; the first row is before all of them

    def __post_init__(self) -> None:
        frozen(self.ends)
        frozen(self.buckets)

    def at(self, items: Int64Array, now: int | None) -> Int64Array:
        """Return the buckets of items at a moment; None is the last that is known of."""
        row = len(self.ends) if now is None else int(self.ends.searchsorted(now))
        found: Int64Array = self.buckets[row, items].astype(np.int64)
        return found

    def until(self, now: int) -> Activity:
        """Return what was known at a moment."""
        count = int(self.ends.searchsorted(now))
        return Activity(self.ends[:count], self.buckets[: count + 1])

    def latest(self) -> Activity:
        """Return what is known in the end, whatever the time: what is served."""
        return Activity(self.ends[:0], self.buckets[-1:].copy())  # without the other rows

    @classmethod
    def from_array(cls, buckets: NDArray[Any], num_items: int) -> Activity:
        """Return the activity that is served, from its one row: a file may say anything."""
        if buckets.dtype != np.uint8 or buckets.shape != (num_items,):
            given = f"{buckets.dtype}{list(buckets.shape)}"
            raise StorageError(f"activity is {given}, expected uint8[{num_items}]")
        if buckets.max(initial=0) >= ACTIVITY_BUCKETS:
            raise StorageError(
                f"activity has a bucket {buckets.max()}, expected less than {ACTIVITY_BUCKETS}"
            )
        return cls(np.empty(0, np.int64), buckets[None])


def measure_activity(prepared: Prepared) -> Activity:
    """Count the training events of every item, period by period.

    Nothing is known where times are not, or hardly tell events apart.
    """
    nothing = Activity(np.empty(0, np.int64), np.zeros((1, prepared.num_items), np.uint8))
    trains = prepared.in_training()
    if prepared.times is None or not trains.any():
        return nothing
    order = np.argsort(prepared.times[trains], kind="stable")
    items = prepared.items[trains][order]
    seconds = prepared.times[trains][order] // MICROSECONDS
    last = np.arange(1, _PERIODS + 1) * len(items) // _PERIODS - 1
    ends = np.unique(seconds[np.maximum(last, 0)])  # events of one second are in one period
    if len(ends) < _FEWEST_PERIODS:
        return nothing
    bounds = np.concatenate([[0], seconds.searchsorted(ends, side="right")])
    fading = np.exp(-np.diff(bounds) / (_DECAY * len(items)))
    buckets = np.zeros((len(ends) + 1, prepared.num_items), np.uint8)
    counts = np.zeros(prepared.num_items)
    for period in range(len(ends)):
        counts *= fading[period]
        chosen = items[bounds[period] : bounds[period + 1]]
        counts += np.bincount(chosen, minlength=prepared.num_items)
        buckets[period + 1] = _bucket(counts)
    return Activity(ends, buckets)


def _bucket(counts: NDArray[np.float64]) -> NDArray[np.uint8]:
    with np.errstate(divide="ignore"):  # −∞ for none, which is the first bucket
        halves = np.floor(2.0 * np.log2(counts)) + 2 * _MOST_DOUBLINGS + 1
    least = np.where(counts > 0.0, 1, 0)
    found: NDArray[np.uint8] = np.clip(halves, least, ACTIVITY_BUCKETS - 1).astype(np.uint8)
    return found
