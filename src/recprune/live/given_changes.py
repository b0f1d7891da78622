"""What a caller wants changed, checked against the catalogue as it is, as one change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import ExternalId
from recprune.live.changes import Addition, NotedUpsert, Noting, Removal, Replacement, Upsert
from recprune.live.draft import refuse_twice
from recprune.live.item_names import NameArray, checked_names
from recprune.live.notes import NotesToBe, note_text
from recprune.live.segment import Items
from recprune.live.snapshot import LiveSnapshot, refuse_missing
from recprune.search.checks import MAX_ITEMS, checked_bias, checked_codes, checked_items
from recprune.types import CodeArray, Float32Array, InputError, Int64Array, type_in_words


class KnownItemError(InputError):
    """An item is added whose external id is that of one which is there."""

    def __init__(self, place: int, external_id: ExternalId) -> None:
        super().__init__(f"item_ids[{place}] is {external_id!r}, which is there already")
        self.place = place  # among those that were to be added
        self.external_id = external_id


class ChangedItemError(InputError):
    """An item is not what whoever puts it expects it to be: somebody else has changed it."""

    def __init__(self, place: int, external_id: ExternalId) -> None:
        super().__init__(
            f"item_ids[{place}] is {external_id!r}, which is not there as expected: others have "
            "added, changed or removed it"
        )
        self.place = place  # among those that were to be put
        self.external_id = external_id


def addition(
    snapshot: LiveSnapshot,
    codes: CodeArray,
    item_bias: Float32Array | None,
    item_ids: Any,
    notes: NotesToBe | None,
) -> Addition | NotedUpsert:
    """Return the change that `LiveIndex.add` makes."""
    checked, _ = checked_codes(codes, snapshot.sub_item_embeddings())
    count, first = len(checked), snapshot.num_items
    _refuse_too_many(first, count)
    names = checked_names(item_ids, snapshot.id_kind, count)
    if names is not None:
        _refuse_known(snapshot, names.tolist())
    bias = _bias_for(snapshot, item_bias, count)
    if bias is None and snapshot.has_bias:
        bias = np.zeros(count, np.float32)
    numbers = np.arange(first, first + count, dtype=np.uint32)
    added = Addition(Items(numbers, np.array(checked), bias, names))
    if notes is None:
        return added
    none = Replacement(snapshot.tail.take(np.empty(0, np.int64)))
    return NotedUpsert(Upsert(none, added), _some_noting(snapshot, numbers, notes))


def removal(snapshot: LiveSnapshot, ids: Any) -> Removal:
    """Return the change that `LiveIndex.remove` makes."""
    return Removal(_checked_numbers(snapshot, ids))


def replacement(
    snapshot: LiveSnapshot, ids: Any, codes: CodeArray, item_bias: Float32Array | None
) -> Replacement:
    """Return the change that `LiveIndex.replace` makes."""
    numbers = _checked_numbers(snapshot, ids)
    checked, _ = checked_codes(codes, snapshot.sub_item_embeddings())
    if len(checked) != len(numbers):
        raise InputError(f"codes has {len(checked)} rows for {len(numbers)} ids")
    bias = _bias_for(snapshot, item_bias, len(checked))
    if bias is None:
        bias = snapshot.item_bias(numbers)
    items = Items(numbers, checked, bias, None)
    return Replacement(items.take(np.argsort(numbers)))


def noting(snapshot: LiveSnapshot, ids: Any, notes: NotesToBe) -> Noting:
    """Return the change that `LiveIndex.note` makes."""
    numbers = _checked_numbers(snapshot, ids)
    return Noting(numbers, _texts(snapshot, numbers, notes))


def upsert(
    snapshot: LiveSnapshot,
    item_ids: Any,
    codes: CodeArray,
    item_bias: Sequence[float | None] | None,
    notes: NotesToBe | None,
    *,
    replace: bool,
    expected: Sequence[CodeArray | None] | None,
) -> tuple[Upsert | NotedUpsert, Int64Array]:
    """Return the change that `LiveIndex.put` makes, and the numbers of its items, as given."""
    checked, _ = checked_codes(codes, snapshot.sub_item_embeddings())
    names = _required_names(snapshot, item_ids, len(checked))
    if not replace:
        _refuse_known(snapshot, names.tolist())
    numbers = snapshot.find(names.tolist())
    if expected is not None:
        _refuse_unexpected(snapshot, names.tolist(), numbers, expected)
    new, first = numbers < 0, snapshot.num_items
    _refuse_too_many(first, int(new.sum()))
    bias = _some_biases(snapshot, item_bias, numbers)
    numbers[new] = np.arange(first, first + int(new.sum()))
    items = Items(numbers.astype(np.uint32), np.array(checked), bias, names)
    there = items.take(np.flatnonzero(~new)[np.argsort(numbers[~new])])
    changed = Items(there.numbers, there.codes, there.item_bias, None)
    made = Upsert(Replacement(changed), Addition(items.take(new)))
    if notes is None:
        return made, numbers
    return NotedUpsert(made, _some_noting(snapshot, items.numbers, notes)), numbers


def _some_noting(snapshot: LiveSnapshot, numbers: NDArray[np.uint32], notes: NotesToBe) -> Noting:
    """Return the notes of items that are put; where there is none, what was said stays."""
    texts = _texts(snapshot, numbers, notes)
    said = [place for place, text in enumerate(texts) if text is not None]
    return Noting(numbers[said], [texts[place] for place in said])


def _texts(
    snapshot: LiveSnapshot, numbers: NDArray[np.uint32], notes: NotesToBe
) -> list[bytes | None]:
    if callable(notes):
        before = map(snapshot.notes.get, numbers.tolist())
        given = [notes(place, said) for place, said in enumerate(before)]
    elif isinstance(notes, Sequence):
        given = [*notes]
    else:
        raise InputError(f"notes is {type_in_words(notes)}, expected a sequence or a function")
    if len(given) != len(numbers):
        raise InputError(f"notes has {len(given)} objects for {len(numbers)} items")
    return [note_text(note, place) for place, note in enumerate(given)]


def _required_names(snapshot: LiveSnapshot, item_ids: Any, count: int) -> NameArray:
    names = checked_names(item_ids, snapshot.id_kind, count)
    if names is None:
        raise InputError("this catalogue was created without external ids")
    return names


def _refuse_too_many(first: int, count: int) -> None:
    if first + count >= MAX_ITEMS:
        raise InputError(f"{count} items after {first}; there are numbers for {MAX_ITEMS}")


def _checked_numbers(snapshot: LiveSnapshot, ids: Any) -> NDArray[np.uint32]:
    """Return numbers of items that are there, each given once."""
    given = np.asarray(ids)
    if given.size == 0 and given.ndim == 1:
        given = given.astype(np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InputError(f"ids is {given.dtype}{list(given.shape)}, expected item numbers")
    outside = (given < 0) | (given >= snapshot.num_items)
    refuse_missing(given, outside)
    numbers = checked_items(given, snapshot.num_items).astype(np.uint32)
    refuse_missing(numbers, ~snapshot.are_there(numbers))
    refuse_twice(numbers)
    return numbers


def _bias_for(snapshot: LiveSnapshot, given: Any, count: int) -> Float32Array | None:
    """Return the biases that a change brings, if this catalogue may have any."""
    if given is None:
        return None
    if not snapshot.has_bias:
        raise InputError("item_bias: this catalogue was created without biases")
    return checked_bias(given, count)


def _some_biases(
    snapshot: LiveSnapshot, given: Sequence[float | None] | None, numbers: Int64Array
) -> Float32Array | None:
    """Return the biases of items, where some are given; new items have the number −1."""
    values = [None] * len(numbers) if given is None else list(given)
    if len(values) != len(numbers):
        raise InputError(f"item_bias has {len(values)} numbers for {len(numbers)} items")
    chosen = [place for place, value in enumerate(values) if value is not None]
    with np.errstate(over="ignore"):
        new = np.array([values[place] for place in chosen], np.float64).astype(np.float32)
    checked = _bias_for(snapshot, new, len(chosen)) if chosen else None
    kept = snapshot.item_bias(numbers[numbers >= 0])
    if kept is None:
        return None
    bias = np.zeros(len(numbers), np.float32)
    bias[numbers >= 0] = kept
    if checked is not None:
        bias[chosen] = checked
    return bias


def _refuse_unexpected(
    snapshot: LiveSnapshot,
    names: list[ExternalId],
    numbers: Int64Array,
    expected: Sequence[CodeArray | None],
) -> None:
    """Refuse an external id that has another code than expected, or is there or not against it."""
    if len(expected) != len(names):
        raise InputError(f"expected has {len(expected)} codes for {len(names)} items")
    for place, (number, code) in enumerate(zip(numbers.tolist(), expected, strict=True)):
        if number < 0 or code is None:
            is_as_expected = number < 0 and code is None
        else:
            is_as_expected = np.array_equal(snapshot.item_codes([number])[0], code)
        if not is_as_expected:
            raise ChangedItemError(place, names[place])


def _refuse_known(snapshot: LiveSnapshot, names: list[ExternalId]) -> None:
    """Refuse an external id that an item has which is there."""
    known = snapshot.find(names) >= 0
    if known.any():
        place = int(known.argmax())
        raise KnownItemError(place, names[place])
