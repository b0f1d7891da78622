"""When the events of histories were, as callers say it: checked, in whole seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.types import InputError, Int64Array, Timeline

_LAST_SECOND = 7_258_118_400  # the year 2200, as everywhere in recprune


def checked_timelines(
    times: Sequence[Sequence[float] | None] | None,
    now: float | None,
    kept: list[NDArray[np.bool_]],
) -> list[Timeline | None]:
    """Return the times of those events of histories that are kept."""
    asked_at = None if now is None else int(_seconds(now, "now", 0))
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
        last = int(seconds[-1]) if asked_at is None else asked_at
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
