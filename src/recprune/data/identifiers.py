"""External ids: the caller's own names of users and items, beside the internal ids 0 … n−1.

Internal ids follow the order of the external ones (numbers by value, strings by their UTF-8 bytes),
so the same log gives the same internal ids whatever the order of its rows, and an external id is
found by binary search without a hash table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from recprune.types import InputError, Int32Array, Int64Array, frozen, needs_extra

if TYPE_CHECKING:
    import polars as pl

ExternalId: TypeAlias = int | str


@dataclass(frozen=True, eq=False)
class IntegerIds:
    """Sorted, distinct integers; position is the internal id."""

    numbers: Int64Array

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
        found = np.full(len(external_ids), -1, np.int64)
        places = [place for place, value in enumerate(external_ids) if _is_int64(value)]
        given = np.array([external_ids[place] for place in places], np.int64)
        # Ascending: one search then begins in the cache of the one before it.
        wanted, which = np.unique(given, return_inverse=True)
        first = np.searchsorted(self.numbers, wanted, "left")
        end = np.searchsorted(self.numbers, wanted, "right")
        found[places] = np.where(first < end, first, -1)[which]
        return found

    def take(self, internal_ids: Iterable[int]) -> list[int]:
        """Return the external ids of several internal ones."""
        return [self[int(internal_id)] for internal_id in internal_ids]

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
        found: dict[bytes | None, int] = {None: -1}
        distinct = sorted({text for text in wanted if text is not None})
        self._find_sorted(distinct, 0, len(self), found)
        return np.array([found[text] for text in wanted], np.int64)

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

    def _find_sorted(
        self, wanted: list[bytes], first: int, end: int, found: dict[bytes | None, int]
    ) -> None:
        """Add to `found` the positions of ids that all belong between `first` and `end`.

        The position of the middle one bounds those of the others.
        """
        if not wanted:
            return
        middle = len(wanted) // 2
        text = wanted[middle]
        position = bisect_left(range(len(self)), text, first, end, key=self._bytes)
        is_there = position < len(self) and self._bytes(position) == text
        found[text] = position if is_there else -1
        self._find_sorted(wanted[:middle], first, position, found)
        self._find_sorted(wanted[middle + 1 :], position, end, found)

    def _bytes(self, position: int) -> bytes:
        return self.pool[self.offsets[position] : self.offsets[position + 1]].tobytes()


ExternalIds: TypeAlias = IntegerIds | StringIds

_INTEGERS = (int, np.integer)
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
_MOST_DIGITS = 40  # of an id given as text: more than any int64 has


def _is_int64(value: object) -> TypeGuard[int]:
    """Say whether a value can be an integer id; True and False cannot."""
    return (
        isinstance(value, _INTEGERS)
        and not isinstance(value, bool)
        and _SMALLEST <= int(value) <= _LARGEST
    )


def _utf8(value: object) -> bytes | None:
    """Return the bytes of what can be a string id, None for anything else."""
    if not isinstance(value, str):
        return None
    try:
        return value.encode()
    except UnicodeEncodeError:  # half a character: in no file that could be read
        return None


def coerce_ids(ids: object, given: Iterable[object]) -> list[Any]:
    """Return ids that came as text or JSON in the type that a catalogue's ids have.

    Where those are integers, "17" and 17.0 are 17; where they are strings, 17 is "17". What cannot
    be converted stays as it is, and will not be found.
    """
    if isinstance(ids, StringIds):
        return [str(value) for value in given]
    return [_as_integer(value) for value in given]


def _as_integer(value: object) -> object:
    if isinstance(value, float):
        return int(value) if value.is_integer() else str(value)
    if not isinstance(value, str):
        return value
    digits = value[1:] if value.startswith(("-", "+")) else value
    # Not by int() alone: it takes "1_0" and "٥" for numbers, and minutes for a million digits.
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS
    return int(value) if is_number else value


def ids_from_arrays(arrays: Mapping[str, NDArray[Any]], prefix: str) -> ExternalIds | None:
    """Return the ids whose `to_arrays(prefix)` is among `arrays`; None where there are none."""
    if f"{prefix}_numbers" in arrays:
        return IntegerIds(arrays[f"{prefix}_numbers"])
    if f"{prefix}_offsets" in arrays:
        return StringIds(arrays[f"{prefix}_offsets"], arrays[f"{prefix}_pool"])
    return None


def _checked(internal_id: int, size: int) -> int:
    if not 0 <= internal_id < size:
        raise IndexError(f"internal id {internal_id}, expected 0 to {size - 1}")
    return internal_id


def number_ids(values: pl.Series) -> tuple[ExternalIds, Int32Array]:
    """Return the distinct values, sorted, and for each value its place among them.

    `values` is a polars series of Int64 or String without nulls.
    """
    with needs_extra("data"):
        import polars as pl
        import pyarrow as pa
    if values.dtype == pl.Int64:
        return number_integers(values)
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
