"""One attribute of all items: the distinct values, sorted, and for each item a code into them.

Codes follow the order of the values, so that whatever a condition asks of a column is a question
about ranges of small integers, whichever type the values have: text is compared no slower than
numbers, in a byte or two for an item where there are few values.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import StringIds, ids_from_arrays
from recprune.types import Int64Array, StorageError, frozen

Kind: TypeAlias = Literal["text", "integer", "number", "boolean", "time"]
Value: TypeAlias = str | int | float | bool

# Of values that no item has, in small columns: looking for them takes a pass over all items.
_SPARE_BYTES = 1 << 20
NO_VALUE = 0  # the code of an item that has none; those of values begin at 1
_CODE_TYPES = (np.uint8, np.uint16, np.uint32)
_VALUE_TYPES: dict[str, tuple[type[np.generic], ...]] = {
    "integer": (np.int64,),
    "number": (np.float64, np.float32),
    "boolean": (np.uint8,),
    "time": (np.int64,),  # microseconds since 1970, UTC
}


class Postings(NamedTuple):
    """Which items have a code, or have it in their lists: items[starts[c] : starts[c + 1]]."""

    starts: Int64Array
    items: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class AttributeColumn:
    """The values of one attribute. Lists are the codes of all their elements, one after the other.

    Where an item has no list at all, its list is the one code `NO_VALUE`; an empty one has none.
    """

    kind: Kind
    values: StringIds | NDArray[Any]  # distinct, ascending
    codes: NDArray[Any]  # [items], or [elements]
    offsets: Int64Array | None = None  # [items + 1]: where the elements of an item begin
    used_bytes: int | None = None  # of the values when all were of some item; None: as they are now

    def __post_init__(self) -> None:
        for array in (self.values, self.codes, self.offsets):
            if isinstance(array, np.ndarray):
                frozen(array)

    @property
    def is_list(self) -> bool:
        return self.offsets is not None

    @property
    def described(self) -> str:
        """The type of the column, as messages and listings call it."""
        return f"list of {self.kind}" if self.is_list else self.kind

    @property
    def num_items(self) -> int:
        return len(self.codes) if self.offsets is None else len(self.offsets) - 1

    @property
    def num_codes(self) -> int:
        """Codes are less than this."""
        return len(self.values) + 1

    @property
    def nbytes(self) -> int:
        lists = 0 if self.offsets is None else self.offsets.nbytes
        return self._value_bytes + self.codes.nbytes + lists

    @property
    def _value_bytes(self) -> int:
        values = self.values
        if isinstance(values, StringIds):
            return values.offsets.nbytes + values.pool.nbytes
        return values.nbytes

    def code_from(self, value: Value) -> int:
        """Return the code of the first value that is not less than one."""
        return bisect_left(_Ordered(self.values), value) + 1

    def code_after(self, value: Value) -> int:
        """Return the code of the first value that is greater than one."""
        return bisect_right(_Ordered(self.values), value) + 1

    def codes_of(self, values: Sequence[Value]) -> list[int]:
        """Return the codes of values, `NO_VALUE` where no item may have one."""
        if isinstance(self.values, StringIds):
            found: list[int] = (self.values.find_all(values) + 1).tolist()
            return found
        codes = map(self.code_from, values)
        pairs = zip(codes, values, strict=True)
        return [
            code if code < self.num_codes and self.value_of(code) == value else NO_VALUE
            for code, value in pairs
        ]

    def value_of(self, code: int) -> Value | None:
        """Return what a code stands for."""
        if code == NO_VALUE:
            return None
        value = _Ordered(self.values)[code - 1]
        return bool(value) if self.kind == "boolean" else value

    def value_at(self, item: int) -> Value | list[Value] | None:
        """Return the value of an item, None where it has none."""
        if self.offsets is None:
            return self.value_of(int(self.codes[item]))
        codes = self.codes[self.offsets[item] : self.offsets[item + 1]].tolist()
        values = [self.value_of(code) for code in codes]
        return None if codes == [NO_VALUE] else [value for value in values if value is not None]

    @cached_property
    def is_whole(self) -> bool:
        """Whether every item has a value."""
        return bool(self.codes.all()) if self.offsets is None else False

    @cached_property
    def postings(self) -> Postings:
        """The items of every code; made when first asked for."""
        owners = np.arange(self.num_items, dtype=np.uint32)
        if self.offsets is not None:
            owners = np.repeat(owners, np.diff(self.offsets))
        order = np.argsort(self.codes, kind="stable")
        counts = np.bincount(self.codes, minlength=self.num_codes)
        return Postings(np.concatenate([[0], np.cumsum(counts)]), owners[order])

    def take(self, items: Int64Array) -> AttributeColumn:
        """Return the same column of some items, numbered anew."""
        if self.offsets is None:
            return AttributeColumn(self.kind, self.values, self.codes[items])
        starts, lengths = self.offsets[items], np.diff(self.offsets)[items]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return AttributeColumn(self.kind, self.values, self.codes[places], offsets)

    def with_used_values(self) -> AttributeColumn:
        """Return the same column without values that no item has."""
        used = np.zeros(self.num_codes, np.bool_)
        used[self.codes] = True
        if used[1:].all() or self.kind == "boolean":
            return replace(self, used_bytes=None)
        values = self.values
        kept = values.select(used[1:]) if isinstance(values, StringIds) else values[used[1:]]
        used[NO_VALUE] = False
        codes = np.cumsum(used).astype(code_type(len(kept)))[self.codes]
        codes[self.codes == NO_VALUE] = NO_VALUE
        return replace(self, values=kept, codes=codes, used_bytes=None)

    def with_items(
        self, items: Int64Array, changed: AttributeColumn, num_items: int
    ) -> AttributeColumn:
        """Return the column of `num_items` with the values that some items have in another one.

        `items` ascend, and row r of `changed` is the new value of items[r]. Values that no item has
        any more stay among the values until these have twice the bytes that they had when all were
        used: so whoever changes one item again and again leaves a bounded heap behind.
        """
        column = self._with_items(items, changed, num_items)
        used = self._value_bytes if self.used_bytes is None else self.used_bytes
        if column._value_bytes > 2 * used + _SPARE_BYTES:
            return column.with_used_values()
        return replace(column, used_bytes=used)

    def _with_items(
        self, items: Int64Array, changed: AttributeColumn, num_items: int
    ) -> AttributeColumn:
        values, old_codes, new_codes = _united(self, changed)
        if self.offsets is None or changed.offsets is None:
            codes = np.zeros(num_items, code_type(len(values)))
            codes[: len(self.codes)] = old_codes
            codes[items] = new_codes
            return AttributeColumn(self.kind, values, codes)
        # All elements by their items: those that stay, new ones, and new items without a list.
        lengths = np.diff(self.offsets)
        is_changed = np.zeros(num_items, np.bool_)
        is_changed[items] = True
        owners = np.repeat(np.arange(len(lengths)), lengths)
        stay = ~is_changed[owners]
        without = np.setdiff1d(np.arange(len(lengths), num_items), items)
        owners = np.concatenate([owners[stay], np.repeat(items, np.diff(changed.offsets)), without])
        codes = np.concatenate(
            [old_codes[stay], new_codes, np.full(len(without), NO_VALUE, old_codes.dtype)]
        ).astype(code_type(len(values)))
        offsets = np.zeros(num_items + 1, np.int64)
        np.cumsum(np.bincount(owners, minlength=num_items), out=offsets[1:])
        codes = codes[np.argsort(owners, kind="stable")]
        return AttributeColumn(self.kind, values, codes, offsets)

    # On disk -------------------------------------------------------------------------------------

    def to_arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the arrays that `column_from_arrays` reads back."""
        arrays = {f"{prefix}_codes": self.codes}
        if isinstance(self.values, StringIds):
            arrays |= self.values.to_arrays(f"{prefix}_values")
        else:
            arrays[f"{prefix}_values"] = self.values
        if self.offsets is not None:
            arrays[f"{prefix}_lists"] = self.offsets
        return arrays


def code_type(num_values: int) -> type[np.unsignedinteger[Any]]:
    """Return the smallest type that holds the codes of so many values."""
    return next(kind for kind in _CODE_TYPES if num_values <= np.iinfo(kind).max)


def column_from_arrays(
    arrays: Mapping[str, NDArray[Any]], prefix: str, kind: str, num_items: int
) -> AttributeColumn:
    """Return the column whose `to_arrays(prefix)` is among `arrays`.

    It is checked as if a stranger had made it: whatever is looked up is within its bounds, and the
    values ascend, as they are searched.
    """
    if kind not in get_args(Kind):
        raise StorageError(f"{prefix} is of kind {kind!r}, expected {', '.join(get_args(Kind))}")
    values: Any = ids_from_arrays(arrays, f"{prefix}_values") if kind == "text" else None
    if kind == "text" and not isinstance(values, StringIds):
        raise KeyError(f"{prefix}_values_offsets")
    if values is None:
        values = arrays[f"{prefix}_values"]
        _check_values(values, f"{prefix}_values", kind)
    codes, offsets = arrays[f"{prefix}_codes"], arrays.get(f"{prefix}_lists")
    if codes.dtype not in _CODE_TYPES or codes.ndim != 1:
        raise StorageError(f"{prefix}_codes is {codes.dtype}{list(codes.shape)}, expected codes")
    if len(values) > np.iinfo(codes.dtype).max:
        raise StorageError(f"{prefix}_codes is {codes.dtype}, too narrow for {len(values)} values")
    if codes.max(initial=0) > len(values):
        raise StorageError(f"{prefix}_codes has {codes.max()}, expected {len(values)} at most")
    if offsets is None and len(codes) != num_items:
        raise StorageError(f"{prefix}_codes has {len(codes)} items, expected {num_items}")
    if offsets is not None:
        _check_offsets(offsets, f"{prefix}_lists", num_items, len(codes))
    checked: Any = kind
    return AttributeColumn(checked, values, codes, offsets)


def _check_values(values: NDArray[Any], name: str, kind: str) -> None:
    if values.dtype not in _VALUE_TYPES[kind] or values.ndim != 1:
        expected = " or ".join(str(np.dtype(one)) for one in _VALUE_TYPES[kind])
        raise StorageError(
            f"{name} is {values.dtype}{list(values.shape)}, expected {expected}[values]"
        )
    ascends = values[1:] > values[:-1]
    if not ascends.all() or np.isnan(values[:1]).any():
        place = int(ascends.argmin()) + 1 if not ascends.all() else 0
        raise StorageError(f"{name}[{place}] is {values[place]}, expected more than before it")
    if kind == "boolean" and values.tolist() != [0, 1]:
        raise StorageError(f"{name} is not 0 and 1")


def _check_offsets(offsets: NDArray[Any], name: str, num_items: int, num_elements: int) -> None:
    if offsets.dtype != np.int64 or offsets.shape != (num_items + 1,):
        raise StorageError(
            f"{name} is {offsets.dtype}{list(offsets.shape)}, expected int64[{num_items + 1}]"
        )
    if offsets[0] != 0 or offsets[-1] != num_elements or (offsets[1:] < offsets[:-1]).any():
        raise StorageError(f"{name} does not ascend from 0 to {num_elements}")


class _Ordered(Sequence[Any]):
    """Values as Python's own, which compares an integer with a float exactly."""

    def __init__(self, values: StringIds | NDArray[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: Any) -> Any:
        found = self._values[place]
        return found if isinstance(found, str) else found.item()


def _united(
    first: AttributeColumn, second: AttributeColumn
) -> tuple[StringIds | NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the values of two columns as those of one, and the codes of both into these."""
    if first.values is second.values:
        return first.values, first.codes, second.codes
    if isinstance(first.values, StringIds) and isinstance(second.values, StringIds):
        given = second.values.take(range(len(second.values)))
        is_new = (first.values.find_all(given) < 0).tolist()
        new = list(compress(given, is_new))
        before = [bisect_left(_Ordered(first.values), text) for text in new]
        values: Any = _with_texts(first.values, new, before)
        places = values.find_all(given)
    else:
        own_values, other_values = np.asarray(first.values), np.asarray(second.values)
        near = np.searchsorted(own_values, other_values)
        is_there = near < np.searchsorted(own_values, other_values, side="right")
        values = np.insert(own_values, near[~is_there], other_values[~is_there])
        places = np.searchsorted(values, other_values)
        before = near[~is_there].tolist()
    # A code moves by as many values as are new before it.
    moved = np.zeros(len(first.values) + 1, np.int64)
    np.add.at(moved, before, 1)
    own = np.arange(1, len(first.values) + 1) + np.cumsum(moved)[: len(first.values)]
    kind = code_type(len(values))
    first_codes = np.concatenate([[NO_VALUE], own]).astype(kind)
    second_codes = np.concatenate([[NO_VALUE], places + 1]).astype(kind)
    old = first_codes[first.codes] if before else first.codes
    return values, old, second_codes[second.codes]


def _with_texts(texts: StringIds, new: Sequence[str], places: Sequence[int]) -> StringIds:
    """Return texts with others before the given places; both ascend, and none is there twice."""
    if not new:
        return texts
    cuts = texts.offsets[list(places)].tolist()
    encoded = [text.encode() for text in new]
    pieces: list[Any] = []
    last = 0
    for cut, text in zip(cuts, encoded, strict=True):
        pieces += [texts.pool[last:cut], np.frombuffer(text, np.uint8)]
        last = cut
    pool = np.concatenate([*pieces, texts.pool[last:]])
    lengths = np.insert(np.diff(texts.offsets), places, [len(text) for text in encoded])
    return StringIds(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), pool)
