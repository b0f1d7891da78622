"""Notes: what is said of items beside their codes; the search knows nothing of them.

A note is a small object of JSON. A snapshot has those of its generation, which are arrays, and the
changes since as dictionaries, one above the other. A change adds one, and takes with it those that
are not clearly larger, as segments are merged: so snapshots share most of what they have, and a
note is copied a number of times that grows with the logarithm of the changes.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune.types import InputError, Int64Array, Json, StorageError, frozen, type_in_words

MOST_NOTE_BYTES = 16 << 10  # of one item: a name and what it is like, not its picture
_LARGER = 2  # so many times as large as what is above it is a layer that is left alone

NotesToBe: TypeAlias = Sequence[Json | None] | Callable[[int, Json | None], Json | None]
"""What is said of items from now on: an object for each, None where nothing is; or a function of an
item's place among those that are named and of what is said so far."""

_Layer: TypeAlias = Mapping[int, bytes | None]  # None: nothing is said any more


class NoteError(InputError):
    """What is to be said of an item cannot be said."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(f"notes[{place}] {reason}")
        self.place = place  # among the items that something is said of
        self.reason = reason


def note_text(note: object, place: int) -> bytes | None:
    """Return a note as it is kept; refuse what cannot be any."""
    if note is None:
        return None
    if not isinstance(note, dict):
        raise NoteError(place, f"is {type_in_words(note)}, expected an object of JSON, or None")
    try:
        text = json.dumps(note, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:  # half a character is a ValueError
        raise NoteError(place, f"cannot be written as JSON: {error}") from None
    if len(text) > MOST_NOTE_BYTES:
        raise NoteError(place, f"has {len(text):,} bytes, expected at most {MOST_NOTE_BYTES:,}")
    return text


def check_text(text: bytes) -> None:
    """Refuse what a stranger wrote in place of a note."""
    if len(text) > MOST_NOTE_BYTES:
        raise StorageError(f"a note has {len(text):,} bytes, expected {MOST_NOTE_BYTES:,} at most")
    try:
        note = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text.decode():
            json.dumps(note, ensure_ascii=False).encode()  # not with half a character
    except (ValueError, RecursionError):
        raise StorageError(f"a note is no JSON: {text!r:.80}") from None
    if not isinstance(note, dict):
        raise StorageError(f"a note is {type_in_words(note)}, expected an object")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


@dataclass(frozen=True, eq=False)
class SavedNotes:
    """The notes of some items as arrays, by ascending number."""

    numbers: NDArray[np.uint32]
    offsets: Int64Array  # where the text of each begins, and where the last one ends
    pool: NDArray[np.uint8]

    def __post_init__(self) -> None:
        for array in (self.numbers, self.offsets, self.pool):
            frozen(array)

    @classmethod
    def checked(cls, arrays: Mapping[str, NDArray[Any]], num_items: int) -> SavedNotes:
        """Return what `to_arrays` gave, as if a stranger had made it; nothing where it is none."""
        names = ("note_numbers", "note_offsets", "note_pool")
        if not any(name in arrays for name in names):
            return NOTHING_SAVED
        try:
            numbers, offsets, pool = (arrays[name] for name in names)
        except KeyError as error:
            raise StorageError(f"has no {error}, but other arrays of notes") from None
        for name, array, dtype in zip(names, (numbers, offsets, pool), _TYPES, strict=True):
            if array.dtype != dtype or array.ndim != 1:
                raise StorageError(
                    f"{name} is {array.dtype}{list(array.shape)}, expected {dtype.__name__}[…]"
                )
        if (numbers[1:] <= numbers[:-1]).any() or (len(numbers) and numbers[-1] >= num_items):
            raise StorageError(f"note_numbers does not ascend among {num_items} numbers")
        _check_offsets(offsets, len(numbers), len(pool))
        notes = cls(numbers, offsets, pool)
        for _, text in notes.texts():
            check_text(text)
        return notes

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that `checked` reads back; none where there are no notes."""
        if not len(self.numbers):
            return {}
        return {
            "note_numbers": self.numbers,
            "note_offsets": self.offsets,
            "note_pool": self.pool,
        }

    def has(self, numbers: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Say which of some numbers have a note."""
        places = np.searchsorted(self.numbers, numbers)
        found = places < len(self.numbers)
        found[found] = self.numbers[places[found]] == numbers[found]
        return found

    def text(self, number: int) -> bytes | None:
        # Of one: NumPy's own search would take longer than this one.
        numbers, offsets = self.numbers.data, self.offsets.data
        place = bisect_left(numbers, number)
        if place == len(numbers) or numbers[place] != number:
            return None
        return bytes(self.pool.data[offsets[place] : offsets[place + 1]])

    def texts(self) -> Iterator[tuple[int, bytes]]:
        """Return number and text of every note."""
        pool, offsets = self.pool.data, self.offsets.tolist()
        for place, number in enumerate(self.numbers.tolist()):
            yield number, bytes(pool[offsets[place] : offsets[place + 1]])

    def changed(self, changes: _Layer) -> SavedNotes:
        """Return the notes after some changes.

        What stays is copied in stretches between them: notes may be as large as memory allows, and
        there is room for one copy.
        """
        numbers = np.array(sorted(changes), np.uint32)
        texts = [changes[number] for number in numbers.tolist()]
        places, had = np.searchsorted(self.numbers, numbers), self.has(numbers)
        pool, begin = self.pool.data, 0
        pieces: list[memoryview | bytes] = []
        for text, at, after in zip(
            texts, self.offsets[places].tolist(), self.offsets[places + had].tolist(), strict=True
        ):
            pieces += [pool[begin:at], text or b""]
            begin = after
        pieces.append(pool[begin:])
        stay = np.ones(len(self.numbers), np.bool_)
        stay[places[had]] = False
        is_said = np.array([text is not None for text in texts], np.bool_)
        kept, said = self.numbers[stay], numbers[is_said]
        lengths = [len(text) for text in texts if text is not None]
        between = np.searchsorted(kept, said)
        offsets = np.zeros(len(kept) + len(said) + 1, np.int64)
        np.cumsum(np.insert(np.diff(self.offsets)[stay], between, lengths), out=offsets[1:])
        together = np.frombuffer(b"".join(pieces), np.uint8)
        return SavedNotes(np.insert(kept, between, said), offsets, together)


_TYPES = (np.uint32, np.int64, np.uint8)
NOTHING_SAVED = SavedNotes(np.empty(0, np.uint32), np.zeros(1, np.int64), np.empty(0, np.uint8))


def _check_offsets(offsets: NDArray[Any], count: int, num_bytes: int) -> None:
    if (
        offsets.shape != (count + 1,)
        or offsets[0] != 0
        or offsets[-1] != num_bytes
        or (offsets[1:] < offsets[:-1]).any()
    ):
        raise StorageError(f"note_offsets does not ascend from 0 to {num_bytes} for {count} notes")


class Notes(Mapping[int, Json]):
    """The notes of a catalogue at one moment, by the numbers of items. Frozen, and safe to share.

    A note is made anew whenever it is asked for: changing what was returned changes nothing here.
    """

    def __init__(self, saved: SavedNotes = NOTHING_SAVED) -> None:
        """Take those of a generation; further ones are made by `changed`."""
        self._saved = saved
        self._layers: tuple[_Layer, ...] = ()  # each of less than the one before it
        self._count = len(saved.numbers)

    @property
    def is_saved(self) -> bool:
        """Whether nothing was changed since the generation."""
        return not self._layers

    def text(self, number: int) -> bytes | None:
        """Return a note as it is kept, None where there is none."""
        for layer in reversed(self._layers):
            if number in layer:
                return layer[number]
        return self._saved.text(number) if self._is_number(number) else None

    def changed(self, changes: _Layer) -> Notes:
        """Return the notes after some changes."""
        had = self._noted([*changes])
        real = {n: text for n, text in changes.items() if text is not None or n in had}
        if not real:
            return self
        after = Notes(self._saved)
        have = sum(text is not None for text in real.values())
        after._count = self._count - len(had) + have
        layers = list(self._layers)
        while layers and len(layers[-1]) <= _LARGER * len(real):
            real = {**layers.pop(), **real}
        after._layers = (*layers, real)
        return after

    def changed_since(self, before: Notes) -> list[int]:
        """Return the numbers of which something else was said at another moment, ascending.

        Cheap between near moments of one generation; else all notes are compared.
        """
        if self._saved is before._saved:
            shared = {id(layer) for layer in self._layers} & {id(layer) for layer in before._layers}
            touched: set[int] = set()
            for layer in (*self._layers, *before._layers):
                if id(layer) not in shared:
                    touched.update(layer)
            return sorted(n for n in touched if self.text(n) != before.text(n))
        mine, theirs = dict(self.texts()), dict(before.texts())
        differing = {number for number, text in mine.items() if theirs.get(number) != text}
        return sorted(differing | (theirs.keys() - mine.keys()))

    def texts(self) -> Iterator[tuple[int, bytes]]:
        """Return number and text of every note, by ascending number."""
        changes = self._changes()
        if not changes:
            yield from self._saved.texts()
            return
        together = {n: text for n, text in self._saved.texts() if n not in changes}
        together |= {n: text for n, text in changes.items() if text is not None}
        for number in sorted(together):
            yield number, together[number]

    def numbers(self) -> Int64Array:
        """Return the numbers that have a note, ascending."""
        changes = self._changes()
        saved = self._saved.numbers.astype(np.int64)
        touched = np.fromiter(changes, np.int64, len(changes))
        said = [number for number, text in changes.items() if text is not None]
        kept = saved[~np.isin(saved, touched)]
        return np.sort(np.concatenate([kept, np.array(said, np.int64)]))

    def saved(self) -> SavedNotes:
        """Return all of them as arrays."""
        changes = self._changes()
        return self._saved.changed(changes) if changes else self._saved

    def _noted(self, numbers: list[int]) -> set[int]:
        """Return which of some numbers have a note."""
        found = set(compress(numbers, self._saved.has(np.array(numbers, np.uint32)).tolist()))
        for layer in self._layers:
            for number in numbers:
                if number in layer:
                    (found.discard if layer[number] is None else found.add)(number)
        return found

    def _changes(self) -> dict[int, bytes | None]:
        """Return all that was changed since the generation."""
        changes: dict[int, bytes | None] = {}
        for layer in self._layers:
            changes |= layer
        return changes

    @staticmethod
    def _is_number(number: object) -> bool:
        return isinstance(number, int | np.integer) and 0 <= int(number) < 2**32

    # As a mapping --------------------------------------------------------------------------------

    def __getitem__(self, number: int) -> Json:
        text = self.text(number)
        if text is None:
            raise KeyError(number)
        note: Json = json.loads(text)
        return note

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers().tolist())

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"Notes({len(self):,})"


NO_NOTES = Notes()
