"""A recommender takes the place of another, and a live index made from it that of its live index.

While the old folders are served, the new ones are made beside them. Then nobody changes the old
catalogue for the moment that it takes to repeat its last changes and to exchange the folders.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.attributes.attributes import Attributes
from recprune.live.generation import is_live
from recprune.live.item_names import as_objects
from recprune.live.live_index import LiveIndex
from recprune.live.snapshot import LiveSnapshot
from recprune.recommender.assortment import fingerprint
from recprune.recommender.recommender import Recommender
from recprune.recommender.saving import KIND
from recprune.storage import put_in_place, saved_kind
from recprune.types import Int64Array, StorageError


class Succession:
    """The folders in which one recommender follows another."""

    def __init__(
        self,
        target: Path,
        live: LiveIndex | None,
        attributes: str | Path | None,
        add_new: bool,
    ) -> None:
        """`target` has the recommender, `live` is its live index, `attributes` those of its items.

        With `add_new`, items come into the live index that the old recommender does not know.
        """
        self._target = Path(os.path.realpath(target))  # a link stays, what it points to is replaced
        self._live = live
        self._attributes = None if attributes is None else Path(os.path.realpath(attributes))
        self._add_new = add_new

    def swap(self, old: Recommender, new: Recommender) -> None:
        """Put the new recommender in place, and what belongs to it."""
        if old.attributes is not None:
            new = new.with_attributes(old.attributes.carried_over(old.item_ids, new.item_ids))
        staged = _beside(self._target)
        new.save(staged)
        if self._live is None:
            _put(staged, self._target)
            shutil.rmtree(staged, ignore_errors=True)
            return
        beside = _beside(self._live.folder)
        shutil.rmtree(beside, ignore_errors=True)
        new.make_live(beside, origin=self._live.origin).close()
        if self._attributes is not None:
            kept = _beside(self._attributes)
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self._attributes, kept)
        self._exchange(old, new, first=True)

    def finish_earlier(self, new: Recommender) -> bool:
        """Finish a swap that was killed between two folders; return whether there was one.

        The recommender was in place by then, and the old one beside it.
        """
        live = self._live
        if live is None:
            return False
        made_from = fingerprint(new.index, new.item_ids)
        staged, beside = _beside(self._target), _beside(live.folder)
        if live.made_from == made_from or not is_live(beside) or saved_kind(staged) != KIND:
            return False
        with LiveIndex.open(beside) as fresh:
            if fresh.made_from != made_from:
                return False
        old = Recommender.load(staged)
        if live.made_from != fingerprint(old.index, old.item_ids):
            return False
        self._exchange(old, new, first=False)
        return True

    def _exchange(self, old: Recommender, new: Recommender, *, first: bool) -> None:
        """Put what is beside in place: the recommender if it is the first time, then the rest."""
        live = self._live
        assert live is not None  # noqa: S101 # for the type checker
        staged, beside = _beside(self._target), _beside(live.folder)
        with ExitStack() as stack:
            fresh = stack.enter_context(LiveIndex.open(beside))
            before = live.snapshot()
            self._bring(fresh, before, old, new)  # most of it, while changes go on
            _bring_notes(fresh, before, _noted(before, fresh.snapshot()))
            last = stack.enter_context(live.held())
            self._bring(fresh, last, old, new)
            _bring_notes(fresh, last, _noted_since(last, before))
            attributes = self._attributes_of(fresh.snapshot(), last)
            fresh.close()
            old_live, new_one = live.folder.stat(), (staged if first else self._target).stat()
            try:
                # From here on the live index tells by what it was made from that something is left.
                if first:
                    _put(staged, self._target)
                if attributes is not None and self._attributes is not None:
                    attributes.save(self._attributes)
                _put(beside, live.folder)
            except Exception:
                # Else they would not belong together until the next refresh.
                if _is_at(self._target, new_one) and _is_at(live.folder, old_live):
                    self._take_back(staged)
                raise
        for folder in (staged, beside, *((_beside(self._attributes),) if self._attributes else ())):
            shutil.rmtree(folder, ignore_errors=True)

    def _take_back(self, staged: Path) -> None:
        """Put the old recommender in place again, and the attributes of the old live index."""
        if self._attributes is not None:
            Attributes.load(_beside(self._attributes)).save(self._attributes)
        _put(self._target, staged)

    def _attributes_of(self, fresh: LiveSnapshot, before: LiveSnapshot) -> Attributes | None:
        """Return the attributes of a catalogue, by its numbers, from those of the one before it."""
        if self._attributes is None:
            return None
        numbers = np.arange(fresh.num_items)
        there = fresh.are_there(numbers)
        places = np.full(fresh.num_items, -1, np.int64)
        names: Any = fresh.external_ids(numbers[there])
        places[there] = before.find(names)
        # Of the copy: in a swap that was killed, they may have been put in place before.
        return Attributes.load(_beside(self._attributes)).extended(before.num_items).taken(places)

    def _bring(
        self, fresh: LiveIndex, wanted: LiveSnapshot, old: Recommender, new: Recommender
    ) -> None:
        """Give a live index the items that another one has, with their codes."""
        numbers = wanted.numbers()
        names: Any = wanted.external_ids(numbers)
        codes = _as_now(wanted.item_codes(numbers), old, new)
        at_present = fresh.snapshot()
        found = at_present.find(names)
        differs = found < 0
        there = np.flatnonzero(found >= 0)
        differs[there] = (at_present.item_codes(found[there]) != codes[there]).any(axis=1)
        gone = np.setdiff1d(at_present.numbers(), found[there])
        if self._add_new and len(gone):
            named: Any = at_present.external_ids(gone)
            gone = gone[old.item_ids.find_all(named) >= 0]
        fresh.remove(gone)
        for part in _in_parts(np.flatnonzero(differs), _ITEMS_AT_ONCE):
            chosen = [names[at] for at in part]
            integers = wanted.id_kind == "integers"
            ids = np.array(chosen, np.int64) if integers else as_objects(chosen)
            fresh.put(ids, codes[part], replace=True)


def _bring_notes(fresh: LiveIndex, wanted: LiveSnapshot, numbers: Int64Array) -> None:
    """Have the same said of some items as another live index says of them, by its numbers."""
    names: Any = wanted.external_ids(numbers)
    notes = fresh.snapshot().notes
    found = fresh.snapshot().find(names).tolist()
    differing = [
        (number, own)
        for number, own in zip(found, numbers.tolist(), strict=True)
        if notes.text(number) != wanted.notes.text(own)
    ]
    for part in _in_parts(np.arange(len(differing)), _NOTES_AT_ONCE):
        chosen = [differing[place] for place in part.tolist()]
        fresh.note(
            np.array([number for number, _ in chosen], np.int64),
            [wanted.notes.get(own) for _, own in chosen],
        )


def _noted(wanted: LiveSnapshot, fresh: LiveSnapshot) -> Int64Array:
    """Return the items of which one or the other says something, by the numbers of the first.

    The other has notes already where a swap that was killed is finished.
    """
    names: Any = fresh.external_ids(fresh.notes.numbers())
    found = wanted.find(names)
    return np.union1d(wanted.notes.numbers(), found[found >= 0])


def _noted_since(after: LiveSnapshot, before: LiveSnapshot) -> Int64Array:
    """Return the items that are there, and of which something else is said since a moment.

    An item that left and came back has another number, and nothing is said of it any more.
    """
    came = np.arange(before.num_items, after.num_items)
    changed = np.array(after.notes.changed_since(before.notes), np.int64)
    numbers = np.union1d(came, changed)
    return numbers[after.are_there(numbers)]


_ITEMS_AT_ONCE = 100_000  # in one change
_NOTES_AT_ONCE = 10_000  # each of which may be as long as notes are


def _in_parts(places: Int64Array, most: int) -> list[Int64Array]:
    return [places[at : at + most] for at in range(0, len(places), most)]


def _put(temporary: Path, target: Path) -> None:
    try:
        put_in_place(temporary, target)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"{target}: cannot be replaced: {reason}") from None


def _is_at(place: Path, folder: os.stat_result) -> bool:
    """Whether a folder, by its state of before, is at a place now."""
    try:
        return os.path.samestat(place.stat(), folder)
    except OSError:
        return False


def _beside(target: Path) -> Path:
    """Return where that is made which takes the place of a folder; then the old one lies there."""
    return target.with_name(f".{target.name}.refreshed")


def _as_now(codes: NDArray[Any], old: Recommender, new: Recommender) -> NDArray[Any]:
    """Return codes of the old recommender's sub-items as those of the new one's.

    They are the same, but in a full table, where an item is a sub-item, and has moved.
    """
    if new.settings["model"]["embedding"] != "full":
        return codes
    moved = new.item_ids.find_all(old.item_ids.take(range(len(old.item_ids))))
    # A table has two rows at least, the second of which may be no item's.
    rows = np.append(moved, np.full(old.index.num_sub_items - len(moved), len(moved)))
    now: NDArray[Any] = rows[codes].astype(codes.dtype)
    return now
