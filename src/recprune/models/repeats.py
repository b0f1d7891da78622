"""The repeat head: what a user had before, as an addition to the scores of those items alone.

Much of what people do, they do again, and a vector of fixed width need not learn by heart what. For
every item of the history, the head knows how many events ago it came last, how often it came, how
often lately, and, where times are known, how long ago that was when the recommendation is asked
for. Each of the four falls into a bucket, each bucket has a number that the state decides (a linear
map of φ), and their sum is added to the item's score: a *boost*, which the search adds exactly. So
the state weighs repeating against exploring, and everything else keeps the score that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recprune.types import Boosts, Float32Array, Int32Array, Int64Array, Timeline

# Recent events have a bucket each, older ones share: two buckets for every doubling.
_RECENT = 8
RECENCY_BUCKETS = 28  # up to 8 · 2^10 events ago
COUNT_BUCKETS = 12  # 1, 2, 3, 4, then one for every doubling
FREQUENCY_BUCKETS = 12  # two for every doubling of the decayed count
# Below a second, then one for every doubling up to 2^31 seconds; the last: times are not known.
AGE_BOUNDS = 2 ** np.arange(32, dtype=np.int64)
UNKNOWN_AGE = len(AGE_BOUNDS) + 1
AGE_BUCKETS = UNKNOWN_AGE + 1
# Where the buckets of each kind begin.
FIRST_COUNT = RECENCY_BUCKETS
FIRST_FREQUENCY = FIRST_COUNT + COUNT_BUCKETS
FIRST_AGE = FIRST_FREQUENCY + FREQUENCY_BUCKETS
NUM_BUCKETS = FIRST_AGE + AGE_BUCKETS
# In events: how fast a decayed count forgets. Counting with this alone predicts repeats best on the
# logs that were looked at, and what it is exactly matters little, since recency is there as well.
_FORGETS_AFTER = 30.0
NEVER = np.int64(1 << 31)


class EventFeatures(NamedTuple):
    """What is known of every event of histories that stand one after the other."""

    until_next: Int64Array  # events until the item comes again; NEVER if it does not
    counts: NDArray[np.uint8]  # bucket of how often the item came so far, this event included
    frequencies: NDArray[np.uint8]  # bucket of the same, decayed


class HadBefore(NamedTuple):
    """The items of one history, each once."""

    items: Int64Array
    buckets: Int64Array  # [items, 4]: rows of the head


def event_features(items: Int32Array, offsets: Int64Array) -> EventFeatures:
    """Return the features of all events; user u has `items[offsets[u]:offsets[u + 1]]`."""
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.lexsort((np.arange(len(items)), items, users))  # equal ones together, in their order
    repeated = np.zeros(len(items), np.bool_)  # in that order: whether the one before is the same
    repeated[1:] = (np.diff(users[order]) == 0) & (np.diff(items[order]) == 0)
    gaps = np.diff(order, prepend=0)
    until_next = np.full(len(items), NEVER)
    until_next[order[:-1][repeated[1:]]] = gaps[1:][repeated[1:]]
    runs = _count_runs(repeated)
    counts, frequencies = np.empty((2, len(items)), np.uint8)
    counts[order] = count_bucket(runs)
    frequencies[order] = frequency_bucket(_decayed_counts(gaps, runs))
    return EventFeatures(until_next, counts, frequencies)


def own_items(history: Int32Array, looks_back: int, timeline: Timeline | None = None) -> HadBefore:
    """Return the items that came among the last events of a history, with their buckets.

    How often they came is counted over the whole history.
    """
    features = event_features(history, np.array([0, len(history)]))
    last = np.flatnonzero(features.until_next == NEVER)
    last = last[last >= len(history) - looks_back]
    buckets = np.stack(
        [
            recency_bucket(len(history) - 1 - last),
            FIRST_COUNT + features.counts[last].astype(np.int64),
            FIRST_FREQUENCY + features.frequencies[last].astype(np.int64),
            FIRST_AGE + _age_buckets(last, timeline),
        ],
        axis=1,
    )
    return HadBefore(history[last].astype(np.int64), buckets)


def recency_bucket(events_ago: NDArray[Any]) -> Int64Array:
    """Return the bucket of how many events ago an item came last; 0 is the newest event."""
    older = np.maximum(events_ago, _RECENT) / _RECENT
    shared = _RECENT + np.floor(2.0 * np.log2(older)).astype(np.int64)
    buckets = np.where(events_ago < _RECENT, events_ago, shared)
    return np.minimum(buckets, RECENCY_BUCKETS - 1).astype(np.int64)


def _age_buckets(events: Int64Array, timeline: Timeline | None) -> Int64Array:
    if timeline is None:
        return np.full(len(events), UNKNOWN_AGE)
    return np.searchsorted(AGE_BOUNDS, timeline.now - timeline.times[events], side="right")


def count_bucket(counts: NDArray[Any]) -> NDArray[np.uint8]:
    shared = 2 + np.floor(np.log2(np.maximum(counts, 4))).astype(np.int64)
    buckets = np.where(counts <= 4, counts - 1, shared)
    found: NDArray[np.uint8] = np.minimum(buckets, COUNT_BUCKETS - 1).astype(np.uint8)
    return found


def frequency_bucket(frequencies: NDArray[Any]) -> NDArray[np.uint8]:
    buckets = np.floor(2.0 * np.log2(np.maximum(frequencies, 1.0)))
    found: NDArray[np.uint8] = np.minimum(buckets, FREQUENCY_BUCKETS - 1).astype(np.uint8)
    return found


class RepeatBoosts:
    """The head as it is served: NumPy alone."""

    def __init__(self, weight: Float32Array, bias: Float32Array, looks_back: int) -> None:
        """Take the linear map, [buckets, d] and [buckets], and how many events it looks back."""
        self._weight = weight
        self._bias = bias
        self._looks_back = looks_back

    def __call__(
        self,
        sequence_embeddings: Float32Array,
        histories: Sequence[Int32Array],
        timelines: Sequence[Timeline | None] | None = None,
    ) -> list[Boosts]:
        """Return the boosts of each user: items, and what is added to their scores."""
        values = sequence_embeddings @ self._weight.T + self._bias  # [users, buckets]
        boosts = []
        known = timelines if timelines is not None else [None] * len(histories)
        for row, history, timeline in zip(values, histories, known, strict=True):
            own = own_items(history, self._looks_back, timeline)
            boosts.append((own.items, row[own.buckets].sum(1, dtype=np.float32)))
        return boosts


def _count_runs(repeated: NDArray[np.bool_]) -> Int64Array:
    """Return 1, 2, 3, … along every run of entries that repeat the one before."""
    places = np.arange(len(repeated))
    starts = np.maximum.accumulate(np.where(repeated, 0, places))
    return places - starts + 1


def _decayed_counts(gaps: Int64Array, counts: Int64Array) -> NDArray[np.float64]:
    """Return f = 1 + e^(−gap / τ) · f of the one before, along every run.

    One round for each number of repetitions: there are few long runs.
    """
    found = np.ones(len(counts))
    factors = np.exp(-gaps / _FORGETS_AFTER)
    by_count = np.argsort(counts, kind="stable")
    ends = np.cumsum(np.bincount(counts, minlength=2))
    for count in range(2, len(ends)):
        chosen = by_count[ends[count - 1] : ends[count]]
        found[chosen] = 1.0 + factors[chosen] * found[chosen - 1]
    return found
