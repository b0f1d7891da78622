"""The latest moments of a catalogue, kept so that any between them can be had again.

What a moment shares with the one before it is not kept twice: segments, and the bits and the tail
that no change has touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from recprune.live.change_log import Tip
from recprune.live.snapshot import LiveSnapshot

_KEPT_SECONDS = 30.0  # after the next one was seen
_APART_SECONDS = 1.0  # between those that are kept; changes in between are read again
_DENSE = 8  # of the latest that are kept however close they are


class _RecentMoment(NamedTuple):
    snapshot: LiveSnapshot
    tip: Tip
    seen: float  # by time.monotonic()


class RecentMoments:
    """Snapshots, and where in the log the changes after each begin. Not safe between threads."""

    def __init__(self) -> None:
        self._kept: list[_RecentMoment] = []  # by sequence

    def note(self, snapshot: LiveSnapshot, tip: Tip) -> None:
        """Keep a moment, in place of the same one in older segments."""
        others = [at for at in self._kept if at.snapshot.sequence != snapshot.sequence]
        others.append(_RecentMoment(snapshot, tip, time.monotonic()))
        self._kept = sorted(others, key=lambda at: at.snapshot.sequence)
        self.sweep()

    def sweep(self) -> None:
        """Keep no more than is needed; the last one always is."""
        oldest = time.monotonic() - _KEPT_SECONDS
        dense = min(sorted(at.seen for at in self._kept)[-_DENSE:], default=0.0)
        kept: list[_RecentMoment] = []
        for at, after in zip(self._kept, self._kept[1:], strict=False):
            is_close = bool(kept) and abs(at.seen - kept[-1].seen) < _APART_SECONDS
            if after.seen >= oldest and (at.seen >= dense or not is_close):
                kept.append(at)
        self._kept = kept + self._kept[-1:]

    def until(self, sequence: int) -> Iterator[tuple[LiveSnapshot, Tip]]:
        """Return the moments that are kept and not after a change, the latest first."""
        for at in reversed(self._kept):
            if at.snapshot.sequence <= sequence:
                yield at.snapshot, at.tip
