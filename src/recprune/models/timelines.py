"""When the events of histories were, as callers say it: checked, in whole seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.types import InputError, Int64Array, Timeline

# Buckets of ages: below a second, then two for every doubling up to 2^31 seconds. The last is that
# of ages that are not known.
AGE_BOUNDS = np.unique(np.round(2.0 ** (np.arange(63) / 2)).astype(np.int64))
UNKNOWN_AGE = len(AGE_BOUNDS) + 1
AGE_BUCKETS = UNKNOWN_AGE + 1
UNKNOWN_TIME = -(1 << 62)  # in place of seconds
_LAST_SECOND = 7_258_118_400  # the year 2200, as everywhere in recprune


def age_buckets(ages: Int64Array) -> Int64Array:
    """Return the buckets of ages in seconds."""
    return AGE_BOUNDS.searchsorted(ages, side="right")


def event_times(timelines: Sequence[Timeline | None], longest: int) -> Int64Array:
    """Return when the last events of histories were, and what came after each: [2, users, longest].

    After the last event, that is the request. Shorter histories are padded at the right;
    UNKNOWN_TIME stands there, and where times are not known.
    """
    found = np.full((2, len(timelines), longest), UNKNOWN_TIME)
    for user, timeline in enumerate(timelines):
        if timeline is not None:
            times = timeline.times[-longest:]
            found[0, user, : len(times)] = times
            found[1, user, : len(times) - 1] = times[1:]
            found[1, user, len(times) - 1] = timeline.now
    return found


def gap_and_age_buckets(timelines: Sequence[Timeline | None], count: int) -> Int64Array:
    """Return buckets of how long events were the newest, and of how long ago they are.

    Of histories with at least so many events, the last ones: [2, users, count].
    """
    found = np.full((2, len(timelines), count), UNKNOWN_AGE)
    for user, timeline in enumerate(timelines):
        if timeline is not None:
            times = timeline.times[-count:]
            found[0, user, :-1] = age_buckets(times[1:] - times[:-1])
            found[1, user] = age_buckets(timeline.now - times)
            found[0, user, -1] = found[1, user, -1]  # the last event is the newest until now
    return found


def checked_timelines(
    times: Sequence[Sequence[float] | None] | None,
    now: float | Sequence[float] | None,
    kept: list[NDArray[np.bool_]],
) -> list[Timeline | None]:
    """Return the times of those events of histories that are kept.

    `now` is when all are asked about, or when each of them is.
    """
    asked_at: list[int] | None = None
    if now is not None:
        moments = _seconds(now, "now", 1 if hasattr(now, "__len__") else 0)
        if moments.ndim and len(moments) != len(kept):
            raise InputError(f"now has {len(moments)} entries for {len(kept)} histories")
        asked_at = np.broadcast_to(moments, len(kept)).tolist()
    if times is None:
        return [None] * len(kept)
    if not hasattr(times, "__len__") or not hasattr(times, "__iter__"):
        raise InputError(f"times is {times!r:.60}, expected the times of each history")
    if len(times) != len(kept):
        raise InputError(f"times has {len(times)} entries for {len(kept)} histories")
    timelines: list[Timeline | None] = []
    for place, (row, chosen) in enumerate(zip(times, kept, strict=True)):
        if row is None or not chosen.any():
            timelines.append(None)
            continue
        seconds = _seconds(row, f"times[{place}]", 1)
        if len(seconds) != len(chosen):
            raise InputError(f"times[{place}] has {len(seconds)} times for {len(chosen)} items")
        last = int(seconds[-1]) if asked_at is None else asked_at[place]
        timelines.append(Timeline(seconds[chosen], last))
    return timelines


def _seconds(values: Any, name: str, dimensions: int) -> Int64Array:
    try:
        array = np.asarray(values)
        finite = array.dtype.kind in "iuf" and bool(np.isfinite(array).all())
    except ValueError:
        array, finite = np.empty(0), False
    if not finite or array.ndim != dimensions or np.abs(array).max(initial=0) >= _LAST_SECOND:
        raise InputError(f"{name} is {values!r:.60}, expected seconds since 1970")
    seconds: Int64Array = np.floor(array).astype(np.int64)
    return seconds
