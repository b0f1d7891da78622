"""Names that items were posted with, to be searched for words beside the shared files of names."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from recprune.live.notes import NO_NOTES, Notes
from recprune.live.snapshot import LiveSnapshot
from recprune.recommender.item_notes import has_name, noted_name

_MOST_BYTES = 32 << 20  # in each worker; beyond them, the newest items are found
_ENTRY_BYTES = 100  # of an entry of a dictionary, beside its line


class PostedNames:
    """A line to be searched for every item whose name was posted. Safe to share between threads.

    What has changed is taken over when somebody searches, and kept for the next search.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: Notes = NO_NOTES
        self._lines: Mapping[int, str] = MappingProxyType({})
        self._is_cut = False  # whether lines of older items were left out

    def lines(self, snapshot: LiveSnapshot) -> Mapping[int, str]:
        """Return id and name, case-folded, of the items that a moment has posted names of."""
        with self._lock:
            notes = snapshot.notes
            if notes is not self._notes:
                lines = dict(self._lines)
                _change(lines, notes.changed_since(self._notes), snapshot)
                # When half of the room is free again, all are looked for; not with every change.
                if self._is_cut and _bytes_of(lines.values()) < _MOST_BYTES // 2:
                    lines = {}
                    _change(lines, notes, snapshot)
                    self._is_cut = False
                self._is_cut |= _cut(lines)
                self._lines, self._notes = MappingProxyType(lines), notes
            return self._lines


def _change(lines: dict[int, str], numbers: Iterable[int], snapshot: LiveSnapshot) -> None:
    """Make the lines of some items anew."""
    names: dict[int, str | None] = {}
    for number in numbers:
        lines.pop(number, None)
        note = snapshot.notes.get(number)
        if note is not None and has_name(note):
            names[number] = noted_name(note)
    ids = snapshot.external_ids(np.array([*names], np.int64))
    for (number, name), external_id in zip(names.items(), ids, strict=True):
        lines[number] = f"{external_id} {name or ''}".casefold()


def _cut(lines: dict[int, str]) -> bool:
    """Leave out the oldest items beyond what there is room for; return whether there were any."""
    free = _MOST_BYTES - _bytes_of(lines.values())
    if free >= 0:
        return False
    for number in sorted(lines):
        free += _bytes_of([lines.pop(number)])
        if free >= 0:
            break
    return True


def _bytes_of(lines: Iterable[str]) -> int:
    return sum(sys.getsizeof(line) + _ENTRY_BYTES for line in lines)
