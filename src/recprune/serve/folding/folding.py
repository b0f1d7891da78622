"""The thread of a worker that folds in what users take and the model does not know.

After an item has been taken by N users it gets a code (`newcomers`) and is put into the live index,
and again at 2N, 4N and so on, until 32N. All workers note who took what; one of them at a time
folds in: the one that holds a lock, which the system takes from it when it ends. What is about to
be put is written down before, beside what is there, so that whoever goes on after a killed worker
knows either again. An item whose code is not one of ours, or that has left, is somebody else's by
now, and stays as it is; the live index compares it once more when nobody else can change it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recprune.live.file_lock import LockedError, locked
from recprune.live.given_changes import ChangedItemError
from recprune.live.item_names import is_name
from recprune.recommender.newcomers.code_finder import MOST_PASSERS, CodeFinder
from recprune.recommender.newcomers.evidence import DatedEvents, states_after
from recprune.recommender.recommender import Recommender
from recprune.serve.engine.engine import Engine
from recprune.serve.folding.takers import NEVER, DueItem, Takers
from recprune.serve.histories.histories import Event, Histories, HistoriesUnavailableError
from recprune.serve.logs import log_problem
from recprune.types import Float32Array, StorageError

if TYPE_CHECKING:
    from recprune.serve.prometheus import Metrics

DOUBLINGS = 5  # of N; with more users, a model should be trained with the item
_MOST_WAITING = 10_000  # events that a worker has not noted yet; further ones are not counted
_MOST_STATES = 1024  # of those who took an item first
_LOOK_S = 1.0  # between two looks for items that are due
_REST_S = 5.0  # after a failure
_PASSERS_KEPT_S = 60.0  # until those who came by are looked at anew


class Folding:
    """Notes events, and folds in what is due, in a thread of its own."""

    def __init__(
        self,
        live: Path,
        first: int,
        engine: Callable[[], Engine],
        histories: Histories,
        metrics: Metrics,
    ) -> None:
        """Begin; items are folded in at `first` users. `engine` returns what answers now."""
        folder = Path(os.path.realpath(live))
        self._lock_file = folder.with_name(f"{folder.name}-folding.lock")
        self._most = first << DOUBLINGS
        takers = folder.with_name(f"{folder.name}-takers.db")
        self._takers = Takers(takers, first=first, most=self._most)
        self._engine, self._histories, self._metrics = engine, histories, metrics
        self._waiting: deque[Event] = deque()
        self._passers: deque[str] = deque(maxlen=MOST_PASSERS)  # users who came by lately
        self._finder: _Finder | None = None
        self._work = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recprune-folding", daemon=True)
        self._thread.start()

    def note(self, events: Sequence[Event]) -> None:
        """Take events that were kept; returns at once."""
        room = max(0, _MOST_WAITING - len(self._waiting))
        self._waiting.extend(events[:room])
        self._work.set()

    def close(self) -> None:
        """Finish the item that is at work."""
        self._end.set()
        self._work.set()
        self._thread.join()
        self._takers.close()

    def _run(self) -> None:
        while not self._end.is_set():
            self._work.wait(_LOOK_S)
            self._work.clear()
            try:
                self._note_waiting()
                self._fold_what_is_due()
            except Exception as error:  # a full disk, histories that are away
                self._failed(error)
                self._end.wait(_REST_S)

    def _failed(self, error: Exception) -> None:
        self._metrics.count_folded("failed")
        log_problem("folding failed", {}, error)

    def _note_waiting(self) -> None:
        events = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not events:
            return
        self._passers.extend(event.user for event in events)
        engine = self._engine()
        recommender = engine.recommender
        if recommender is None:
            return
        known = recommender.item_ids.find_all(
            engine.catalogue.coerce([event.item for event in events])
        )
        pairs = [
            (event.item, event.user)
            for event, number in zip(events, known.tolist(), strict=True)
            if number < 0
        ]
        if pairs:
            self._takers.note(pairs)

    def _fold_what_is_due(self) -> None:
        engine = self._engine()
        live = engine.live
        if live is None:
            return
        if self._takers.due() is None and self._takers.catalogue() == live.identity:
            return
        with suppress(LockedError), locked(self._lock_file, 0.0):
            if self._takers.catalogue() != live.identity:
                self._takers.begin(live.identity, live.origin)
            # After a reload all begins anew.
            while not self._end.is_set() and self._engine() is engine:
                if (item := self._takers.due()) is None:
                    return
                try:
                    self._fold(item, engine)
                except (StorageError, HistoriesUnavailableError):
                    raise
                except Exception as error:  # others must not wait for it for ever
                    self._failed(error)
                    self._takers.settle(item.item, NEVER, None)

    def _fold(self, due: DueItem, engine: Engine) -> None:
        live, recommender = engine.live, engine.recommender
        (name,) = engine.catalogue.coerce([due.item])
        if live is None or recommender is None or not is_name(name, live.snapshot().id_kind):
            self._takers.forget(due.item)  # can never be put
            return
        if recommender.item_ids.find(name) >= 0:  # a model has been trained with it since
            self._takers.forget(due.item)
            return
        live.refresh()
        snapshot = live.snapshot()
        there = snapshot.find([name])
        present = None if there[0] < 0 else snapshot.item_codes(there)[0]
        had = None if present is None else _lasting(present, recommender)
        if not _is_ours(due, had):
            self._leave(due.item)
            return
        states = self._states_of(engine, due.item, self._takers.users(due.item)[:_MOST_STATES])
        code = None
        if len(states):
            finder = self._finder_for(engine)
            code = finder.code(states.sum(axis=0, dtype=np.float64), len(states), None)
        if code is not None:
            self._takers.intend(due.item, had, made := _lasting(code, recommender))
            try:
                live.put([name], code[None], replace=True, expected=[present])
            except ChangedItemError:  # while the states were looked up
                self._leave(due.item)
                return
            had = made
            self._metrics.count_folded("added" if present is None else "replaced")
        following = due.due
        while following <= due.users:
            following *= 2
        following = following if following <= self._most else NEVER
        self._takers.settle(due.item, following, had)

    def _leave(self, item: str) -> None:
        """Leave an item as others have it."""
        self._takers.settle(item, NEVER, None)
        self._metrics.count_folded("left")

    def _states_of(self, engine: Engine, item: str | None, users: Sequence[str]) -> Float32Array:
        """Return the states in which users took an item, or those of now, where they have one."""
        assert engine.recommender is not None  # noqa: S101 # for the type checker
        asked = []
        for user in users:
            events = self._histories.dated_history(user)
            taken = [at for at, (one, _) in enumerate(events) if one == item]
            if item is not None and not taken:
                continue  # it has left a history that is full
            end = taken[0] if taken else len(events)
            items = engine.catalogue.coerce([one for one, _ in events[:end]])
            now = events[end][1] if taken else time.time()
            asked.append(DatedEvents(items, [moment for _, moment in events[:end]], now))
        return states_after(engine.recommender, asked)

    def _finder_for(self, engine: Engine) -> CodeFinder:
        """Return what finds codes, by those who came by lately."""
        if self._finder is None or not self._finder.serves(engine):
            recommender = engine.recommender
            assert recommender is not None  # noqa: S101 # for the type checker
            states = self._states_of(engine, None, [*dict.fromkeys(self._passers)])
            finder = CodeFinder(recommender.index, states)
            self._finder = _Finder(engine, finder, time.monotonic())
        return self._finder.finder


class _Finder(NamedTuple):
    """What finds codes, and what it was made of."""

    engine: Engine
    finder: CodeFinder
    made_at: float

    def serves(self, engine: Engine) -> bool:
        return self.engine is engine and time.monotonic() - self.made_at < _PASSERS_KEPT_S


def _is_ours(due: DueItem, present: bytes | None) -> bool:
    """Say whether nobody else has added, changed or removed an item that we would put."""
    if present is None:
        return due.code is None
    return present in (due.code, due.intended)


def _lasting(code: NDArray[Any], recommender: Recommender) -> bytes:
    """Return a code as bytes that are the same after a refresh.

    In a full table a code is a row, which moves when items come between: there it is told by the
    item whose row it is.
    """
    if recommender.settings["model"]["embedding"] != "full":
        return code.tobytes()
    ids = recommender.item_ids
    # A table has two rows at least, the second of which may be no item's.
    return repr([ids.take([row])[0] if row < len(ids) else row for row in code.tolist()]).encode()
