"""What was done to the service, and when: by time.monotonic(), the clock that all of it shares."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from recprune.types import Json


@dataclass
class Entry:
    """One strike of a hardship, or something that was seen."""

    hardship: str
    what: str
    begun: float
    ended: float
    figures: dict[str, float] = field(default_factory=dict)
    store_is_away: bool = False  # for its length, events cannot be kept


class Diary:
    """Entries of all threads, in the order in which they ended."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._lock = threading.Lock()

    @contextmanager
    def noting(self, hardship: str, what: str, *, store_is_away: bool = False) -> Iterator[Entry]:
        """Note what happens in a `with` block; whoever is inside may add figures."""
        now = time.monotonic()
        entry = Entry(hardship, what, now, now, store_is_away=store_is_away)
        try:
            yield entry
        finally:
            entry.ended = time.monotonic()
            with self._lock:
                self._entries.append(entry)

    def entries(self) -> list[Entry]:
        with self._lock:
            return list(self._entries)

    def store_was_away(self, moment: float, grace: float) -> bool:
        """Whether the store was away then, or had been until `grace` seconds before."""
        return any(
            entry.store_is_away and entry.begun - 1.0 <= moment <= entry.ended + grace
            for entry in self.entries()
        )

    def to_json(self, zero: float) -> list[Json]:
        """Return the entries, with times since `zero`."""
        return [
            asdict(entry)
            | {"begun": round(entry.begun - zero, 2), "ended": round(entry.ended - zero, 2)}
            for entry in self.entries()
        ]
