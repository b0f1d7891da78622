"""External ids: the caller's own names of users and items, beside the internal ids 0 … n−1.

Internal ids follow the order of the external ones (numbers by value, strings by their UTF-8 bytes),
so the same log gives the same internal ids whatever the order of its rows, and an external id is
found by binary search without a hash table.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from recprune.types import (
    InputError,
    Int32Array,
    Int64Array,
    StorageError,
    frozen,
    needs_extra,
)

if TYPE_CHECKING:
    import polars as pl

ExternalId: TypeAlias = int | str


@dataclass(frozen=True, eq=False)
class IntegerIds:
    """Sorted, distinct integers; position is the internal id."""

    numbers: Int64Array
    are_strings: ClassVar[bool] = False

    def __post_init__(self) -> None:
        frozen(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, internal_id: int) -> int:
        return int(self.numbers[_checked(internal_id, len(self))])

    def find(self, external_id: object) -> int:
        """Return the internal id of `external_id`, or −1 where there is none."""
        if not _is_int64(external_id):
            return -1
        position = int(np.searchsorted(self.numbers, external_id))
        found = position < len(self) and self.numbers[position] == external_id
        return position if found else -1

    def find_all(self, external_ids: Sequence[object]) -> Int64Array:
        """Do as `find` does, for many at once, of which each then takes far less time."""
        given = _all_int64(external_ids)
        if given is None:
            return _where_integers(external_ids, self.find_all)
        if not len(self) or not len(given):
            return np.full(len(given), -1, np.int64)
        first, last = int(self.numbers[0]), int(self.numbers[-1])
        if last - first == len(self) - 1:  # no number is left out
            return np.where((given >= first) & (given <= last), given - first, -1)
        # Ascending: one search then begins in the cache of the one before it.
        wanted, which = np.unique(given, return_inverse=True)
        places = np.minimum(np.searchsorted(self.numbers, wanted), len(self) - 1)
        return np.where(self.numbers[places] == wanted, places, -1)[which]

    def take(self, internal_ids: Iterable[int]) -> list[int]:
        """Return the external ids of several internal ones."""
        chosen = np.fromiter(internal_ids, np.int64)
        for internal_id in (chosen.min(initial=0), chosen.max(initial=0)) if len(chosen) else ():
            _checked(int(internal_id), len(self))
        found: list[int] = self.numbers[chosen].tolist()
        return found

    def select(self, keep: NDArray[np.bool_]) -> IntegerIds:
        """Return only the ids where `keep` is true, numbered anew in the same order."""
        return IntegerIds(self.numbers[keep])

    def to_arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the arrays that `ids_from_arrays` reads back."""
        return {f"{prefix}_numbers": self.numbers}


@dataclass(frozen=True, eq=False)
class StringIds:
    """Sorted, distinct strings in one UTF-8 pool; position is the internal id.

    Id k is the bytes `pool[offsets[k]:offsets[k + 1]]`: two plain arrays, no object per id.
    """

    offsets: Int64Array
    pool: NDArray[np.uint8]
    are_strings: ClassVar[bool] = True

    def __post_init__(self) -> None:
        frozen(self.offsets)
        frozen(self.pool)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, internal_id: int) -> str:
        return self._bytes(_checked(internal_id, len(self))).decode()

    def find(self, external_id: object) -> int:
        """Return the internal id of `external_id`, or −1 where there is none."""
        return int(self.find_all([external_id])[0])

    def find_all(self, external_ids: Sequence[object]) -> Int64Array:
        """Do as `find` does, for many at once, of which each then takes far less time."""
        wanted = [_utf8(external_id) for external_id in external_ids]
        if len(wanted) < _FEW:
            return np.array([self._find_one(text) for text in wanted], np.int64)
        lengths = np.array([-1 if text is None else len(text) for text in wanted], np.int64)
        pool = np.frombuffer(b"".join(filter(None, wanted)), np.uint8)
        starts = np.cumsum(np.maximum(lengths, 0)) - lengths
        found = np.full(len(wanted), -1, np.int64)
        strings = np.flatnonzero(lengths >= 0)
        found[strings] = self._find_texts(_Texts.of(pool, starts[strings], lengths[strings]))
        return found

    def take(self, internal_ids: Iterable[int]) -> list[str]:
        """Return the external ids of several internal ones."""
        return [self[int(internal_id)] for internal_id in internal_ids]

    def select(self, keep: NDArray[np.bool_]) -> StringIds:
        """Return only the ids where `keep` is true, numbered anew in the same order."""
        lengths = np.diff(self.offsets)
        offsets = np.zeros(int(keep.sum()) + 1, np.int64)
        np.cumsum(lengths[keep], out=offsets[1:])
        return StringIds(offsets, self.pool[np.repeat(keep, lengths)])

    def to_arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the arrays that `ids_from_arrays` reads back."""
        return {f"{prefix}_offsets": self.offsets, f"{prefix}_pool": self.pool}

    def _find_one(self, text: bytes | None) -> int:
        if text is None:
            return -1
        position = bisect_left(range(len(self)), text, key=self._bytes)
        is_there = position < len(self) and self._bytes(position) == text
        return position if is_there else -1

    def _find_texts(self, wanted: _Texts) -> Int64Array:
        """Return the positions of texts, −1 where there is none: all binary searches in step."""
        first = np.zeros(len(wanted.starts), np.int64)
        end = np.full(len(first), len(self), np.int64)
        searching = np.arange(len(first) if len(self) else 0)
        while len(searching):
            middle = (first[searching] + end[searching]) // 2
            is_less = _order(self._texts(middle), wanted.take(searching)) < 0
            first[searching[is_less]] = middle[is_less] + 1
            end[searching[~is_less]] = middle[~is_less]
            searching = searching[first[searching] < end[searching]]
        inside = np.flatnonzero(first < len(self))
        same = _order(self._texts(first[inside]), wanted.take(inside)) == 0
        found = np.full(len(first), -1, np.int64)
        found[inside[same]] = first[inside[same]]
        return found

    def _texts(self, positions: Int64Array) -> _Texts:
        starts = self.offsets[positions]
        return _Texts.of(self.pool, starts, self.offsets[positions + 1] - starts)

    def _bytes(self, position: int) -> bytes:
        return self.pool[self.offsets[position] : self.offsets[position + 1]].tobytes()


@dataclass(frozen=True)
class RowNumbers:
    """The ids of an index without any: an item is its row."""

    count: int
    are_strings: ClassVar[bool] = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, internal_id: int) -> int:
        return internal_id

    def find_all(self, external_ids: Sequence[object]) -> Int64Array:
        """Return the internal ids, −1 where there is none."""
        return find_rows(self.count, external_ids)

    def take(self, internal_ids: Iterable[int]) -> list[int]:
        """Return the ids of several items."""
        return list(internal_ids)


ExternalIds: TypeAlias = IntegerIds | StringIds
CatalogueIds: TypeAlias = IntegerIds | StringIds | RowNumbers


class FoundIds(Protocol):
    """The external ids of any catalogue, as far as they are looked up."""

    @property
    def are_strings(self) -> bool: ...

    def __len__(self) -> int: ...

    def find_all(self, external_ids: Sequence[object]) -> Int64Array: ...

    def take(self, internal_ids: Iterable[int]) -> Sequence[ExternalId]: ...


class _Texts(NamedTuple):
    """Some texts in one pool of bytes; text k has so many of them from `starts[k]` on."""

    words: NDArray[Any]  # of eight bytes, of which one begins at every byte of the pool
    starts: Int64Array
    lengths: Int64Array

    @classmethod
    def of(cls, pool: NDArray[np.uint8], starts: Int64Array, lengths: Int64Array) -> _Texts:
        if len(pool) < _WORD:
            pool = np.pad(pool, (0, _WORD - len(pool)))
        words: NDArray[Any] = np.ndarray(
            len(pool) - _WORD + 1, np.dtype(">u8"), np.ascontiguousarray(pool), strides=(1,)
        )
        return cls(words, starts, lengths)

    def take(self, places: Int64Array) -> _Texts:
        return self._replace(starts=self.starts[places], lengths=self.lengths[places])

    def word(self, number: int) -> NDArray[np.uint64]:
        """Return eight bytes of every text as a number; zeros stand for what is beyond its end."""
        begins = self.starts + _WORD * number
        read = np.minimum(begins, len(self.words) - 1)  # the pool may end inside a word
        count = np.clip(self.lengths - _WORD * number, 0, _WORD)  # bytes that belong to the text
        found = self.words[read].astype(np.uint64)
        found <<= (8 * np.minimum(begins - read, _WORD - 1)).astype(np.uint64)
        beyond = (8 * np.minimum(_WORD - count, _WORD - 1)).astype(np.uint64)
        return np.where(count > 0, found >> beyond << beyond, np.uint64(0))


def _order(first: _Texts, second: _Texts) -> Int64Array:
    """Return −1, 0 or 1 for each pair of texts: how their bytes compare."""
    order: Int64Array = np.sign(
        first.lengths - second.lengths
    )  # where one is the beginning of the other
    longest = np.minimum(first.lengths, second.lengths)
    equal = np.arange(len(order))
    for number in range(int(longest.max(initial=0)) // _WORD + 1):
        one, other = first.take(equal).word(number), second.take(equal).word(number)
        differ = one != other
        order[equal[differ]] = np.where(one < other, -1, 1)[differ]
        equal = equal[~differ & (_WORD * (number + 1) <= longest[equal])]
    return order


_INTEGERS = (int, np.integer)
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
MOST_DIGITS = 40  # of an integer id, or of one given as text: more than any int64 has
_BEYOND = 10**MOST_DIGITS
_WORD = 8  # bytes of texts that are compared at once
_FEW = 256  # strings that are found faster one by one than in step
_AT_ONCE = 1 << 18  # strings that are compared together: some tens of megabytes


def _all_int64(values: Sequence[object]) -> Int64Array | None:
    """Return integer ids as an array; None if anything else is among them."""
    if not {int}.issuperset(map(type, values)):
        return None
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return None


def _where_integers(
    values: Sequence[object], find_all: Callable[[Sequence[object]], Int64Array]
) -> Int64Array:
    """Look up those of some values that can be integer ids; the others are not found."""
    found = np.full(len(values), -1, np.int64)
    places = [place for place, value in enumerate(values) if _is_int64(value)]
    if places:
        found[places] = find_all([int(values[place]) for place in places])  # type: ignore[call-overload]
    return found


def find_rows(count: int, external_ids: Sequence[object]) -> Int64Array:
    """Do as `IntegerIds.find_all` does, for ids that are the numbers from 0 to below `count`."""
    rows = _all_int64(external_ids)
    if rows is None:
        return _where_integers(external_ids, lambda integers: find_rows(count, integers))
    return np.where((rows >= 0) & (rows < count), rows, -1)


def _refuse_long(value: object) -> None:
    """Refuse an integer that would take long to write down, in a message or as a string id."""
    if isinstance(value, int) and not -_BEYOND < value < _BEYOND:
        raise InputError(f"an id is an integer of more than {MOST_DIGITS} digits")


def _is_int64(value: object) -> TypeGuard[int]:
    """Say whether a value can be an integer id; True and False cannot."""
    _refuse_long(value)
    return (
        isinstance(value, _INTEGERS)
        and not isinstance(value, bool)
        and _SMALLEST <= int(value) <= _LARGEST
    )


def _utf8(value: object) -> bytes | None:
    """Return the bytes of what can be a string id, None for anything else."""
    if not isinstance(value, str):
        _refuse_long(value)
        return None
    try:
        return value.encode()
    except UnicodeEncodeError:  # half a character: in no file that could be read
        return None


def coerce_ids(ids: FoundIds, given: Iterable[object]) -> list[Any]:
    """Return ids that came as text or JSON in the type that a catalogue's ids have.

    Where those are integers, "17" and 17.0 are 17; where they are strings, 17 is "17". What cannot
    be converted stays as it is, and will not be found.
    """
    values = list(given)
    are_strings = ids.are_strings
    if {str if are_strings else int}.issuperset(map(type, values)):  # as nearly always
        return values
    return [_as_string(value) if are_strings else _as_integer(value) for value in values]


def _as_string(value: object) -> str:
    _refuse_long(value)
    return str(value)


def _as_integer(value: object) -> object:
    if isinstance(value, float):
        return int(value) if value.is_integer() else str(value)
    if not isinstance(value, str):
        return value
    digits = value[1:] if value.startswith(("-", "+")) else value
    # Not by int() alone: it takes "1_0" and "٥" for numbers, and minutes for a million digits.
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS
    return int(value) if is_number else value


def united(first: ExternalIds, second: ExternalIds) -> ExternalIds:
    """Return all ids that either has; they are all integers, or all strings."""
    if isinstance(first, IntegerIds) and isinstance(second, IntegerIds):
        return IntegerIds(np.union1d(first.numbers, second.numbers))
    if not (isinstance(first, StringIds) and isinstance(second, StringIds)):
        kinds = ["strings" if ids.are_strings else "integers" for ids in (first, second)]
        raise InputError(f"ids are {kinds[0]} in one and {kinds[1]} in the other")
    texts = sorted({ids._bytes(place) for ids in (first, second) for place in range(len(ids))})
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    return StringIds(offsets, np.frombuffer(b"".join(texts), np.uint8))


def ids_from_arrays(arrays: Mapping[str, NDArray[Any]], prefix: str) -> ExternalIds | None:
    """Return the ids whose `to_arrays(prefix)` is among `arrays`; None where there are none.

    They are checked as if a stranger had made them: lookups rely on ids that ascend.
    """
    ids: ExternalIds
    if f"{prefix}_numbers" in arrays:
        ids = IntegerIds(arrays[f"{prefix}_numbers"])
        _check_form(ids.numbers, f"{prefix}_numbers", np.dtype(np.int64))
        _check_ascends(ids.numbers, f"{prefix}_numbers", strictly=True)
        return ids
    if f"{prefix}_offsets" in arrays:
        ids = StringIds(arrays[f"{prefix}_offsets"], arrays[f"{prefix}_pool"])
        _check_strings(ids, prefix)
        return ids
    return None


def _check_form(array: NDArray[Any], name: str, dtype: np.dtype[Any]) -> None:
    if array.dtype != dtype or array.ndim != 1:
        raise StorageError(f"{name} is {array.dtype}{list(array.shape)}, expected {dtype}[ids]")


def _check_ascends(array: Int64Array, name: str, *, strictly: bool) -> None:
    wrong = array[1:] <= array[:-1] if strictly else array[1:] < array[:-1]
    if wrong.any():
        place = int(wrong.argmax()) + 1
        expected = "more" if strictly else "no less"
        raise StorageError(f"{name}[{place}] is {array[place]}, expected {expected} than before it")


def _check_strings(ids: StringIds, prefix: str) -> None:
    offsets, pool = ids.offsets, ids.pool
    _check_form(offsets, f"{prefix}_offsets", np.dtype(np.int64))
    _check_form(pool, f"{prefix}_pool", np.dtype(np.uint8))
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(pool):
        raise StorageError(f"{prefix}_offsets does not go from 0 to {len(pool)}")
    _check_ascends(offsets, f"{prefix}_offsets", strictly=False)
    # Text as a whole, and no id begins inside a character: then each of them is text.
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(pool), _AT_ONCE * 8):
            decoder.decode(pool[start : start + _AT_ONCE * 8].tobytes())
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise StorageError(f"{prefix}_pool is not text in UTF-8") from None
    starts = offsets[:-1][offsets[:-1] < len(pool)]
    if ((pool[starts] & 0xC0) == 0x80).any():
        raise StorageError(f"{prefix}_offsets has an id that begins inside a character")
    for start in range(0, len(ids) - 1, _AT_ONCE):
        places = np.arange(start, min(start + _AT_ONCE, len(ids) - 1))
        wrong = _order(ids._texts(places), ids._texts(places + 1)) >= 0
        if wrong.any():
            place = int(places[wrong.argmax()]) + 1
            raise StorageError(f"{prefix}: id {place} is {ids[place]!r}, out of order or repeated")


def _checked(internal_id: int, size: int) -> int:
    if not 0 <= internal_id < size:
        raise IndexError(f"internal id {internal_id}, expected 0 to {size - 1}")
    return internal_id


def integers_or_texts(values: pl.Series, kept: pl.Series | None = None) -> pl.Series:
    """Return integers of any type as Int64, or as String where one that is kept fits none.

    Such large ones are hashes, which are as good a name as a number.
    """
    with needs_extra("data"):
        import polars as pl
    kept = values if kept is None else kept
    fits = kept.cast(pl.Int64, strict=False).null_count() == kept.null_count()
    return values.cast(pl.Int64, strict=False) if fits else values.cast(pl.String)


def too_large_for_integers(ids: ExternalIds) -> str | None:
    """Return an integer beyond int64 for which ids that would all be integers are strings.

    None where they are integers, or strings for another reason.
    """
    if not isinstance(ids, StringIds):
        return None
    used = np.flatnonzero(np.bincount(ids.pool, minlength=256))
    if not set(b"-0123456789").issuperset(used.tolist()):
        return None
    for place in np.flatnonzero(np.diff(ids.offsets) >= len(str(_LARGEST))).tolist():
        number = _as_integer(ids[place])
        if isinstance(number, int) and not _is_int64(number):
            return ids[place]
    return None


def number_ids(values: pl.Series) -> tuple[ExternalIds, Int32Array]:
    """Return the distinct values, sorted, and for each value its place among them.

    `values` is a polars series of Int64 or String without nulls.
    """
    with needs_extra("data"):
        import polars as pl
    if values.dtype == pl.Int64:
        return number_integers(values)
    return number_texts(values)


def sorted_ids(given: Any, count: int, of: str) -> tuple[ExternalIds, Int64Array]:
    """Return ids as catalogues have them, sorted, and which of those given each one was.

    There has to be one for each of `count` things, which `of` names.
    """
    if len(given) != count:
        raise InputError(f"{len(given)} item_ids, but {count} {of}")
    if isinstance(given, IntegerIds | StringIds):
        return given, np.arange(count)
    with needs_extra("data"):
        import polars as pl
    try:
        values = pl.Series(given)
    except (TypeError, pl.exceptions.PolarsError):
        values = pl.Series([], dtype=pl.Null)
    if not (values.dtype.is_integer() or values.dtype == pl.String) or values.has_nulls():
        raise InputError("item_ids must be all integers or all strings")
    ids, places = number_ids(integers_or_texts(values) if values.dtype.is_integer() else values)
    if len(ids) < count:
        row = int(np.flatnonzero(np.bincount(places)[places] > 1)[0])
        raise InputError(f"item_ids[{row}] is {values[row]!r}, which is there twice")
    order = np.empty(count, np.int64)
    order[places] = np.arange(count)
    return ids, order


def number_texts(values: pl.Series) -> tuple[StringIds, Int32Array]:
    """Do as `number_ids` does, for String."""
    with needs_extra("data"):
        import pyarrow as pa
    distinct = values.unique().sort()
    # Arrow's layout of large strings is that of `StringIds`: take its buffers, no object per id.
    _, offsets, pool = distinct.rechunk().to_arrow().cast(pa.large_string()).buffers()
    offsets = np.frombuffer(offsets, np.int64, count=len(distinct) + 1)
    pool = np.frombuffer(pool or b"", np.uint8)[: offsets[-1]]
    return StringIds(offsets, pool), _places(values, distinct)


def number_integers(values: pl.Series) -> tuple[IntegerIds, Int32Array]:
    """Do as `number_ids` does, for Int64."""
    numbers = values.to_numpy()
    if _is_dense(numbers):
        return _number_dense(numbers)
    distinct = values.unique().sort()
    return IntegerIds(distinct.to_numpy()), _places(values, distinct)


def _places(values: pl.Series, distinct: pl.Series) -> Int32Array:
    import polars as pl

    if len(distinct) > np.iinfo(np.int32).max:
        raise InputError(f"{len(distinct)} distinct ids; at most 2³¹ − 1 are supported")
    table = pl.DataFrame({"id": distinct, "place": np.arange(len(distinct), dtype=np.int32)})
    rows = values.alias("id").to_frame()
    return rows.join(table, on="id", how="left", maintain_order="left")["place"].to_numpy()


def _is_dense(numbers: Int64Array) -> bool:
    """Say whether a table over the whole range of `numbers` costs no more than they do."""
    if len(numbers) == 0:
        return True
    # In Python integers: the range of two int64 may not fit one.
    return int(numbers.max()) - int(numbers.min()) < max(4 * len(numbers), 1 << 20)


def _number_dense(numbers: Int64Array) -> tuple[IntegerIds, Int32Array]:
    """Number ids that lie close together by a table of their range instead of hashing."""
    if len(numbers) == 0:
        return IntegerIds(numbers), np.empty(0, np.int32)
    lowest = numbers.min()
    present = np.zeros(int(numbers.max() - lowest) + 1, np.bool_)
    places = numbers - lowest if lowest else numbers
    present[places] = True
    position_of = np.cumsum(present, dtype=np.int32)
    position_of -= 1
    return IntegerIds(np.flatnonzero(present) + lowest), position_of[places]
