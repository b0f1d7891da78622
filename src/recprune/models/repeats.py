"""The repeat head: what a user had before, as an addition to the scores of those items alone.

Much of what people do, they do again, and a vector of fixed width need not learn by heart what. For
every item of the history, the head knows how many events ago it came last, how often it came, once
forgetting fast and once slowly, and, where times are known, how long ago it came last when the
recommendation is asked for. Each of the four falls into a bucket, each bucket has a number that the
state and the user's situation decide (a linear map of φ and of `situations`), and their sum is
added to the item's score: a *boost*, which the search adds exactly. A head may know a fifth number,
how often anyone had the item lately (`activity`). So the state weighs repeating against exploring,
and everything else keeps the score that it has.

Where vectors say little about which of the own items comes again, they only disturb that sum. So a
model may be trained to leave own items a share of their score only, or none: the boost then takes
the rest away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune.models.activity import ACTIVITY_BUCKETS, Activity
from recprune.models.situations import NUM_SITUATIONS, situation
from recprune.models.timelines import AGE_BUCKETS, UNKNOWN_AGE, age_buckets
from recprune.types import Boosts, Float32Array, Int32Array, Int64Array, Timeline

# Recent events have a bucket each, older ones share: two buckets for every doubling.
_RECENT = 8
RECENCY_BUCKETS = 28  # up to 8 · 2^10 events ago
# A decayed count weighs an event by exp(−age / τ), with its age in events. These are the best τ of
# personal frequency on the logs that were looked at. Four buckets for every doubling, up to the
# most that can come about, which is about τ.
FAST_DECAY, FAST_BUCKETS = 30.0, 20
SLOW_DECAY, SLOW_BUCKETS = 300.0, 33
# Where the buckets of each kind begin.
FIRST_FAST = RECENCY_BUCKETS
FIRST_SLOW = FIRST_FAST + FAST_BUCKETS
FIRST_AGE = FIRST_SLOW + SLOW_BUCKETS
FIRST_ACTIVITY = FIRST_AGE + AGE_BUCKETS
NEVER = np.int64(1 << 31)


def num_buckets(activity: bool) -> int:
    """Return how many rows a head has, with or without those of activity."""
    return FIRST_ACTIVITY + (ACTIVITY_BUCKETS if activity else 0)


# φ and items → their scores without boosts.
ItemScores: TypeAlias = Callable[[Float32Array, Int64Array], Float32Array]


class EventFeatures(NamedTuple):
    """What is known of every event of histories that stand one after the other."""

    until_next: Int64Array  # events until the item comes again; NEVER if it does not
    fast: NDArray[np.uint8]  # bucket of how often the item came so far, this event included
    slow: NDArray[np.uint8]  # the same, forgotten more slowly


class HadBefore(NamedTuple):
    """The items of one history, each once."""

    items: Int64Array
    buckets: Int64Array  # [items, 4], with activity [items, 5]: rows of the head


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
    fast, slow = np.empty((2, len(items)), np.uint8)
    fast[order] = decayed_bucket(_decayed_counts(gaps, runs, FAST_DECAY), FAST_BUCKETS)
    slow[order] = decayed_bucket(_decayed_counts(gaps, runs, SLOW_DECAY), SLOW_BUCKETS)
    return EventFeatures(until_next, fast, slow)


def own_items(
    history: Int32Array,
    looks_back: int,
    timeline: Timeline | None = None,
    activity: Activity | None = None,
) -> HadBefore:
    """Return the items that came among the last events of a history, with their buckets.

    How often they came is counted over the whole history.
    """
    history = np.asarray(history, np.int32)
    features = event_features(history, np.array([0, len(history)]))
    last = np.flatnonzero(features.until_next == NEVER)
    last = last[last >= len(history) - looks_back]
    items = history[last].astype(np.int64)
    buckets = [
        recency_bucket(len(history) - 1 - last),
        FIRST_FAST + features.fast[last].astype(np.int64),
        FIRST_SLOW + features.slow[last].astype(np.int64),
        FIRST_AGE + _age_buckets(last, timeline),
    ]
    if activity is not None:
        now = None if timeline is None else timeline.now
        buckets.append(FIRST_ACTIVITY + activity.at(items, now))
    return HadBefore(items, np.stack(buckets, axis=1))


def recency_bucket(events_ago: NDArray[Any]) -> Int64Array:
    """Return the bucket of how many events ago an item came last; 0 is the newest event."""
    older = np.maximum(events_ago, _RECENT) / _RECENT
    shared = _RECENT + np.floor(2.0 * np.log2(older)).astype(np.int64)
    buckets = np.where(events_ago < _RECENT, events_ago, shared)
    return np.minimum(buckets, RECENCY_BUCKETS - 1).astype(np.int64)


def _age_buckets(events: Int64Array, timeline: Timeline | None) -> Int64Array:
    if timeline is None:
        return np.full(len(events), UNKNOWN_AGE)
    return age_buckets(timeline.now - timeline.times[events])


def decayed_bucket(counts: NDArray[np.float64], most: int) -> NDArray[np.uint8]:
    """Return the buckets of decayed counts, of which none is below 1."""
    buckets = np.floor(4.0 * np.log2(np.maximum(counts, 1.0)))
    found: NDArray[np.uint8] = np.minimum(buckets, most - 1).astype(np.uint8)
    return found


class RepeatBoosts:
    """The head as it is served: NumPy alone."""

    def __init__(
        self,
        weight: Float32Array,
        bias: Float32Array,
        looks_back: int,
        own_scores: float,
        item_scores: ItemScores,
        activity: Activity | None = None,
    ) -> None:
        """Take the linear map, [buckets, d + situations] and [buckets], and how far it looks back.

        `own_scores` is the share of their scores that own items keep.
        """
        self._by_situation = weight.T[-NUM_SITUATIONS:]
        self._weight = weight[:, :-NUM_SITUATIONS]
        self._bias = bias
        self._looks_back = looks_back
        self._taken_away = np.float32(1.0 - own_scores)
        self._item_scores = item_scores
        self.activity = activity

    def __call__(
        self,
        sequence_embeddings: Float32Array,
        histories: Sequence[Int32Array],
        timelines: Sequence[Timeline | None] | None = None,
        item_scores: ItemScores | None = None,
    ) -> list[Boosts]:
        """Return the boosts of each user: items, and what is added to their scores."""
        scores_of = item_scores or self._item_scores
        values = sequence_embeddings @ self._weight.T + self._bias  # [users, buckets]
        boosts = []
        known = timelines if timelines is not None else [None] * len(histories)
        for row, history, timeline, embedding in zip(
            values, histories, known, sequence_embeddings, strict=True
        ):
            own = own_items(history, self._looks_back, timeline, self.activity)
            now = situation(history, self._looks_back, timeline)
            numbers = row + self._by_situation[now].sum(0)
            boost = numbers[own.buckets].sum(1, dtype=np.float32)
            if self._taken_away:
                boost -= self._taken_away * scores_of(embedding, own.items)
            boosts.append((own.items, boost))
        return boosts


def _count_runs(repeated: NDArray[np.bool_]) -> Int64Array:
    """Return 1, 2, 3, … along every run of entries that repeat the one before."""
    places = np.arange(len(repeated))
    starts = np.maximum.accumulate(np.where(repeated, 0, places))
    return places - starts + 1


def _decayed_counts(gaps: Int64Array, counts: Int64Array, decay: float) -> NDArray[np.float64]:
    """Return f = 1 + e^(−gap / τ) · f of the one before, along every run.

    One round for each number of repetitions: there are few long runs.
    """
    found = np.ones(len(counts))
    factors = np.exp(-np.maximum(gaps, 0) / decay)  # below 0 where a run begins
    by_count = np.argsort(counts, kind="stable")
    ends = np.cumsum(np.bincount(counts, minlength=2))
    for count in range(2, len(ends)):
        chosen = by_count[ends[count - 1] : ends[count]]
        found[chosen] = 1.0 + factors[chosen] * found[chosen - 1]
    return found
