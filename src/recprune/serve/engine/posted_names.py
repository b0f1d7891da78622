"""Names that items were posted with, to be searched for words beside the shared files of names."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from recprune.live.notes import NO_NOTES, Notes
from recprune.live.snapshot import LiveSnapshot
from recprune.recommender.item_notes import has_name, noted_name

_MOST_LINES = 100_000  # some 15 MB in each worker; beyond them, the newest items are found


class PostedNames:
    """A line to be searched for every item whose name was posted. Safe to share between threads.

    What has changed is taken over when somebody searches, and kept for the next search.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: Notes = NO_NOTES
        self._lines: Mapping[int, str] = MappingProxyType({})

    def lines(self, snapshot: LiveSnapshot) -> Mapping[int, str]:
        """Return id and name, case-folded, of the items that a moment has posted names of."""
        with self._lock:
            notes = snapshot.notes
            if notes is not self._notes:
                self._lines = MappingProxyType(self._changed(snapshot))
                self._notes = notes
            return self._lines

    def _changed(self, snapshot: LiveSnapshot) -> dict[int, str]:
        lines = dict(self._lines)
        names: dict[int, str | None] = {}
        for number in snapshot.notes.changed_since(self._notes):
            lines.pop(number, None)
            note = snapshot.notes.get(number)
            if note is not None and has_name(note):
                names[number] = noted_name(note)
        ids = snapshot.external_ids(np.array([*names], np.int64))
        for (number, name), external_id in zip(names.items(), ids, strict=True):
            lines[number] = f"{external_id} {name or ''}".casefold()
        if len(lines) > _MOST_LINES:
            lines = {number: lines[number] for number in sorted(lines)[-_MOST_LINES:]}
        return lines
