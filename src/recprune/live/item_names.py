"""External ids of items that lie in the order of their numbers, and how one is found.

`data/identifiers` keeps ids sorted; items of a segment have an order of their own. Two arrays of
four bytes an item lead from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import (
    ExternalId,
    ExternalIds,
    IntegerIds,
    StringIds,
    ids_from_arrays,
)
from recprune.types import InputError, Int64Array, StorageError, frozen, type_in_words

IdKind: TypeAlias = Literal["none", "integers", "strings"]
NameArray: TypeAlias = NDArray[Any]  # int64, or objects that are strings


@dataclass(frozen=True, eq=False)
class ItemNames:
    """The external ids of a segment's items."""

    ids: ExternalIds  # sorted
    places: NDArray[np.uint32]  # the position of each of them
    ranks: NDArray[np.uint32]  # of each position, its place among them

    def __post_init__(self) -> None:
        frozen(self.places)
        frozen(self.ranks)

    @classmethod
    def of(cls, names: NameArray) -> ItemNames:
        """Return the ids of positions 0 … n−1; none occurs twice."""
        ids: ExternalIds
        if names.dtype == object:
            texts = [name.encode() for name in names]
            order = np.array(sorted(range(len(texts)), key=texts.__getitem__), np.int64)
            offsets, pool = packed_texts([texts[place] for place in order])
            ids = StringIds(offsets, pool)
        else:
            order = np.argsort(names, kind="stable")
            ids = IntegerIds(names[order])
        ranks = np.empty(len(order), np.uint32)
        ranks[order] = np.arange(len(order), dtype=np.uint32)
        return cls(ids, order.astype(np.uint32), ranks)

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], kind: IdKind, num_items: int
    ) -> ItemNames:
        """Return what `to_arrays` gave, as if a stranger had made it."""
        try:
            ids = ids_from_arrays(arrays, "item")
        except KeyError as error:
            raise StorageError(f"the external ids have no {error}") from None
        if ids is None or kind_of(ids) != kind or len(ids) != num_items:
            raise StorageError(f"expected external ids of {num_items} items, {kind}")
        ranks = arrays.get("item_ranks")
        if ranks is None or ranks.dtype != np.uint32 or ranks.shape != (num_items,):
            raise StorageError(f"item_ranks is not uint32[{num_items}]")
        places = np.full(num_items, num_items, np.uint32)
        inside = ranks < num_items
        places[ranks[inside]] = np.flatnonzero(inside).astype(np.uint32)
        if (places == num_items).any():
            raise StorageError("item_ranks is not an order of all items")
        return cls(ids, places, ranks)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        return self.ids.to_arrays("item") | {"item_ranks": self.ranks}

    def find_all(self, external_ids: Sequence[object]) -> Int64Array:
        """Return the position of each, −1 where there is none."""
        ranks = self.ids.find_all(external_ids)
        if not len(self.places):
            return ranks
        return np.where(ranks >= 0, self.places[ranks].astype(np.int64), -1)

    def take(self, positions: Int64Array) -> NameArray:
        """Return the external ids of some positions."""
        ranks = self.ranks[positions]
        if isinstance(self.ids, IntegerIds):
            return self.ids.numbers[ranks]
        return as_objects(self.ids.take(ranks.tolist()))


def kind_of(ids: ExternalIds) -> IdKind:
    return "integers" if isinstance(ids, IntegerIds) else "strings"


def as_objects(texts: Iterable[str]) -> NameArray:
    values = list(texts)
    names = np.empty(len(values), object)
    names[:] = values
    return names


def packed_texts(texts: Sequence[bytes]) -> tuple[Int64Array, NDArray[np.uint8]]:
    """Return texts as `StringIds` has them: offsets, and one pool of bytes."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    return offsets, np.frombuffer(b"".join(texts), np.uint8)


def no_names(kind: IdKind) -> NameArray | None:
    """Return the external ids of no items; None where items have none."""
    if kind == "none":
        return None
    return np.empty(0, np.int64 if kind == "integers" else object)


def given_kind(item_ids: Any) -> IdKind:
    """Say which external ids a new catalogue has; no ids at all are strings, if not an array."""
    if item_ids is None:
        return "none"
    return "integers" if np.asarray(item_ids).dtype.kind in "iu" else "strings"


def checked_names(item_ids: Any, kind: IdKind, count: int) -> NameArray | None:
    """Return external ids for so many new items, of the kind that a catalogue has."""
    if kind == "none":
        if item_ids is not None:
            raise InputError("item_ids: this catalogue was created without external ids")
        return None
    if item_ids is None:
        raise InputError(f"item_ids is missing: the external ids of this catalogue are {kind}")
    if isinstance(item_ids, np.ndarray):
        values: list[ExternalId] = item_ids.tolist()
    elif isinstance(item_ids, Sequence) and not isinstance(item_ids, str):
        values = list(item_ids)
    else:
        raise InputError(f"item_ids is {type_in_words(item_ids)}, expected a sequence of ids")
    if len(values) != count:
        raise InputError(f"item_ids has {len(values)} ids for {count} items")
    seen: set[ExternalId] = set()
    for place, value in enumerate(values):
        if not is_name(value, kind):
            raise InputError(f"item_ids[{place}] is {value!r}, expected one of {kind}")
        if value in seen:
            raise InputError(f"item_ids[{place}] is {value!r}, which is there twice")
        seen.add(value)
    return np.array(values, np.int64) if kind == "integers" else as_objects(map(str, values))


def is_name(value: object, kind: IdKind) -> bool:
    """Say whether something can be an external id of this kind."""
    if kind == "integers":
        return (
            isinstance(value, int | np.integer)
            and not isinstance(value, bool)
            and -(2**63) <= int(value) < 2**63
        )
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half a character
        return False
