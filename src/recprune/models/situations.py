"""The situation of a user: what is known of a history as a whole, beside the state of an encoder.

How many events there are, how many of them are of different items, how many happened at the time of
the newest one, and how long ago that is. An encoder sees items one by one, and few of them; what is
likely to come again depends on such numbers too. Each falls into a bucket.
"""

from __future__ import annotations

import numpy as np

from recprune.models.buckets import half_powers
from recprune.models.timelines import AGE_BUCKETS, UNKNOWN_AGE, age_buckets
from recprune.types import Int32Array, Int64Array, Timeline

COUNT_BOUNDS = np.unique(half_powers(19))  # up to 512 events, and more
TENTHS = 10  # of events, that are of different items
# Where the buckets of each kind begin; those of counts stand first.
FIRST_GAP = len(COUNT_BOUNDS) + 1
FIRST_TENTH = FIRST_GAP + AGE_BUCKETS
FIRST_SITTING = FIRST_TENTH + TENTHS
UNKNOWN_SITTING = FIRST_SITTING + len(COUNT_BOUNDS) + 1  # without times
NUM_SITUATIONS = UNKNOWN_SITTING + 1


def situation(history: Int32Array, looks_back: int, timeline: Timeline | None) -> Int64Array:
    """Return the four buckets of a user, of whose history the last events are looked at."""
    seen = history[-looks_back:]
    tenths = TENTHS * len(np.unique(seen)) // len(seen)
    gap, sitting = UNKNOWN_AGE, UNKNOWN_SITTING
    if timeline is not None:
        times = timeline.times[-looks_back:]
        gap = int(age_buckets(timeline.now - times[-1:])[0])
        sitting = FIRST_SITTING + _count_bucket(int((times == times[-1]).sum()))
    buckets = (
        _count_bucket(len(seen)),
        FIRST_GAP + gap,
        FIRST_TENTH + min(tenths, TENTHS - 1),
        sitting,
    )
    return np.array(buckets, np.int64)


def _count_bucket(count: int) -> int:
    return int(COUNT_BOUNDS.searchsorted(count, side="right"))
