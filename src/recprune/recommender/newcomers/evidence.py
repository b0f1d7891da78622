"""What is known of items that a model does not know: the states of those who took them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recprune.data.identifiers import ExternalId
from recprune.data.interactions import Interactions
from recprune.models.inference import Encoder
from recprune.models.timelines import checked_timelines
from recprune.preparation.prepared import MICROSECONDS
from recprune.recommender.recommender import Recommender
from recprune.recommender.request import look_up
from recprune.types import (
    Float32Array,
    Float64Array,
    InputError,
    Int32Array,
    Int64Array,
    Progress,
    Timeline,
    no_progress,
    random_generator,
)

_AT_ONCE = 2048  # states, between two words of progress


@dataclass(frozen=True, eq=False)
class Evidence:
    """Who took some items, and who else came by."""

    state_sums: Float64Array  # of those who took each item, just before they did, [items, d]
    counts: Int64Array  # how many these are
    passing: Float32Array  # states before events that were drawn from the log, [drawn, d]


class NumberedLog:
    """A log with the numbers of its items, by which a model knows those below `num_known`."""

    def __init__(
        self, log: Interactions, numbers: Int64Array, num_known: int, encoder: Encoder
    ) -> None:
        """Take the number of each item of the log."""
        self._log, self._encoder = log, encoder
        self._numbers = numbers[log.items]  # of the items of events
        known = self._numbers < num_known
        self._items = self._numbers[known].astype(np.int32)
        self._seconds = log.times[known] // MICROSECONDS
        # How many events of known items come before each event.
        self._before = np.concatenate([[0], np.cumsum(known)])

    def evidence(
        self,
        items: Int64Array,
        *,
        most: int,
        passers: int,
        seed: int,
        progress: Progress = no_progress,
    ) -> Evidence:
        """Look at the first events of some items, by ascending number, at most so many of each."""
        events = self.first_events(items, most)
        states, there = self.states(events, progress)
        rows = np.searchsorted(items, self._numbers[events[there]])
        sums = np.zeros((len(items), self._encoder.width))
        np.add.at(sums, rows, states[there])
        counts = np.bincount(rows, minlength=len(items))
        rng = random_generator(seed)
        # Some have nothing before them.
        drawn = np.sort(rng.permutation(len(self._numbers))[: 2 * passers])
        passing, there = self.states(drawn, progress)
        return Evidence(sums, counts, rng.permutation(passing[there])[:passers])

    def states(
        self, events: Int64Array, progress: Progress = no_progress
    ) -> tuple[Float32Array, Int64Array]:
        """Return φ of the user just before each event, and for which events there is one.

        There is none where the user had nothing before that the model knows.
        """
        offsets = self._log.offsets
        users = np.searchsorted(offsets, events, side="right") - 1
        starts, ends = self._before[offsets[users]], self._before[events]
        starts = np.maximum(starts, ends - self._encoder.length)
        moments = self._log.times[events] // MICROSECONDS
        there = np.flatnonzero(ends > starts)
        states = np.zeros((len(events), self._encoder.width), np.float32)
        for first in range(0, len(there), _AT_ONCE):
            progress(f"states {first:,} of {len(there):,}")
            part = there[first : first + _AT_ONCE]
            spans = [slice(starts[place], ends[place]) for place in part]
            timelines = [
                Timeline(self._seconds[span], int(moments[place]))
                for span, place in zip(spans, part, strict=True)
            ]
            states[part] = self._encoder.encode([self._items[span] for span in spans], timelines)
        return states, there

    def first_events(self, items: Int64Array, most: int) -> Int64Array:
        """Return the first events of some items, at most so many of each, in the log's order."""
        events = np.flatnonzero(np.isin(self._numbers, items))
        numbers = self._numbers[events]
        order = np.lexsort((events, self._log.times[events], numbers))
        events, numbers = events[order], numbers[order]
        begins = np.searchsorted(numbers, numbers)  # where its item begins
        return np.sort(events[np.arange(len(events)) - begins < most])


class DatedEvents(NamedTuple):
    """What a user had, by external ids, when, and when the state is asked for, in seconds."""

    items: Sequence[ExternalId]
    times: Sequence[float]
    now: float


def states_after(recommender: Recommender, histories: Sequence[DatedEvents]) -> Float32Array:
    """Return φ of users after some events, [found, d], for those with an item that is known.

    Those with times that no event can have are left out.
    """
    found = look_up(recommender.item_ids, [history.items for history in histories])
    known: list[Int32Array] = []
    timelines: list[Timeline | None] = []
    for history, items, kept in zip(histories, found.known, found.kept, strict=True):
        if not len(items):
            continue
        with suppress(InputError):
            timelines += checked_timelines([history.times], history.now, [kept])
            known.append(items)
    if not known:
        return np.empty((0, recommender.index.width), np.float32)
    return recommender.encoder.encode(known, timelines)
