"""The next snapshot, while changes are put into it; nothing is copied that none touches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.live.item_names import NameArray
from recprune.live.present_bits import without
from recprune.live.segment import Items, joined
from recprune.live.snapshot import (
    LiveSnapshot,
    PresentSegment,
    find_sorted,
    names_of,
    refuse_missing,
)
from recprune.types import InputError, Int64Array


class Draft:
    """A snapshot that is being changed.

    A change that was checked before it was written is never refused here. One that a stranger wrote
    may be, as an InputError: then the draft goes, and the snapshot before it stays.
    """

    def __init__(self, snapshot: LiveSnapshot) -> None:
        self.num_items = snapshot.num_items
        self.moment = snapshot.moment
        self._before = snapshot
        self._segments = list(snapshot.segments)
        self._tail = [snapshot.tail]  # lots of items; sorted when it matters
        self._notes: dict[int, bytes | None] = {}  # that are other ones

    def add(self, items: Items) -> None:
        """Take in new items; their numbers are those after all others."""
        self.num_items += len(items)
        self._tail.append(self._own(items))

    def remove(self, numbers: NDArray[Any]) -> None:
        """Let items leave, with their notes; refuse numbers that are not there, or given twice."""
        self._remove(numbers[self._before.owns(numbers)])
        if self._notes or self._before.notes:
            self._notes |= dict.fromkeys(numbers.tolist())

    def _remove(self, numbers: NDArray[Any]) -> None:
        tail = self._settled_tail()
        in_tail = find_sorted(tail.numbers, numbers)
        missing = in_tail < 0
        found = [at.find(numbers) for at in self._segments]
        for positions in found:
            missing &= positions < 0
        refuse_missing(numbers, missing)
        refuse_twice(numbers)
        for place, positions in enumerate(found):
            here = positions[positions >= 0]
            if len(here):
                self._segments[place] = _without_items(self._segments[place], here)
        if (in_tail >= 0).any():
            keep = np.ones(len(tail), np.bool_)
            keep[in_tail[in_tail >= 0]] = False
            self._tail = [tail.take(keep)]

    def replace(self, items: Items) -> None:
        """Give items that are there other codes; numbers and external ids stay."""
        items = self._own(items)
        if not len(items):
            return
        names = self._names_of(items.numbers)
        self._remove(items.numbers)
        self._tail.append(Items(items.numbers, items.codes, items.item_bias, names))

    def note(self, numbers: NDArray[Any], texts: Sequence[bytes | None]) -> None:
        """Have something else said of items; refuse numbers not there, or given twice."""
        if self._before.shard is not None:
            return
        # Mostly those that have just come: a tail of many lots is not put in order for them.
        there = find_sorted(self._tail[-1].numbers, numbers) >= 0
        if not there.all():
            there |= find_sorted(self._settled_tail().numbers, numbers) >= 0
            for at in self._segments:
                there |= at.find(numbers) >= 0
        refuse_missing(numbers, ~there)
        refuse_twice(numbers)
        self._notes |= zip(numbers.tolist(), texts, strict=True)

    def finish(self) -> LiveSnapshot:
        """Return what became of it."""
        before = self._before
        return LiveSnapshot(
            tuple(self._segments),
            self._settled_tail(),
            self.num_items,
            self.moment,
            before.id_kind,
            before.division,
            before.shard,
            before.notes.changed(self._notes),
        )

    def _own(self, items: Items) -> Items:
        """Return those of some items that a snapshot of one shard has a part in."""
        return items if self._before.shard is None else items.take(self._before.owns(items.numbers))

    def _names_of(self, numbers: NDArray[Any]) -> NameArray | None:
        return names_of(self._segments, self._settled_tail(), numbers)

    def _settled_tail(self) -> Items:
        self._tail = [joined([lot for lot in self._tail if len(lot)] or self._tail[:1])]
        return self._tail[0]


def refuse_twice(numbers: NDArray[Any]) -> None:
    """Refuse numbers of which one is there twice, naming it."""
    ordered = np.sort(numbers)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise InputError(f"ids holds {ordered[twice[0]]} twice")


def _without_items(at: PresentSegment, positions: Int64Array) -> PresentSegment:
    words = without(at.present, positions, at.segment.index.num_items)
    return PresentSegment(at.segment, words, at.num_present - len(positions), at.shard)
