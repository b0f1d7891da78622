"""The changes of a catalogue, and the bytes that they are in a log.

Which arrays a change has follows from the catalogue: with or without biases, external ids or not.
So the length of its bytes follows from its count, and anything else is refused before it is read.
Where there are notes, they are a part of the change: an item and what is said of it are one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from recprune.live.draft import Draft
from recprune.live.item_names import IdKind, NameArray, as_objects, packed_texts
from recprune.live.notes import check_text
from recprune.live.segment import Items
from recprune.live.snapshot import LiveSnapshot
from recprune.search.checks import MAX_ITEMS
from recprune.types import Float32Array, StorageError

_COUNT = struct.Struct("<QQ")  # the number of the first new item (else 0), and how many items
_LENGTH = struct.Struct("<Q")  # bytes of the first of two parts
MOST_BYTES = 256 << 20  # of one change: what opening a log must have room for


@dataclass(frozen=True, eq=False)
class Addition:
    """New items, with the numbers after all others."""

    items: Items

    def count(self) -> int:
        return len(self.items)

    def apply(self, draft: Draft) -> None:
        draft.add(self.items)


@dataclass(frozen=True, eq=False)
class Removal:
    """Items that leave."""

    numbers: NDArray[np.uint32]

    def count(self) -> int:
        return len(self.numbers)

    def apply(self, draft: Draft) -> None:
        draft.remove(self.numbers)


@dataclass(frozen=True, eq=False)
class Replacement:
    """Other codes, and biases, for items that stay; these have no external ids of their own."""

    items: Items

    def count(self) -> int:
        return len(self.items)

    def apply(self, draft: Draft) -> None:
        draft.replace(self.items)


@dataclass(frozen=True, eq=False)
class Upsert:
    """Other codes for items that stay and new items, in one change."""

    replaced: Replacement
    added: Addition

    def count(self) -> int:
        return self.replaced.count() + self.added.count()

    def apply(self, draft: Draft) -> None:
        self.replaced.apply(draft)  # first, as it may be refused; an addition is not
        self.added.apply(draft)


@dataclass(frozen=True, eq=False)
class Noting:
    """Other notes of items that are there; what is None is not said any more."""

    numbers: NDArray[np.uint32]
    texts: Sequence[bytes | None]

    def count(self) -> int:
        return len(self.numbers)

    def apply(self, draft: Draft) -> None:
        draft.note(self.numbers, self.texts)


@dataclass(frozen=True, eq=False)
class NotedUpsert:
    """An upsert, and notes of some items that are there after it."""

    upsert: Upsert
    noting: Noting

    def count(self) -> int:
        return self.upsert.count()

    def apply(self, draft: Draft) -> None:
        self.upsert.apply(draft)
        self.noting.apply(draft)


Change: TypeAlias = Addition | Removal | Replacement | Upsert | Noting | NotedUpsert
# By their number, from 1 on. What has no notes is written as it was before there were any.
_KINDS: tuple[type[Change], ...] = (Addition, Removal, Replacement, Upsert, Noting, NotedUpsert)


First = TypeVar("First", bound=Change)
Second = TypeVar("Second", bound=Change)


class ChangeShape(NamedTuple):
    """What the changes of a catalogue have."""

    num_splits: int
    num_sub_items: int
    has_bias: bool
    id_kind: IdKind

    @classmethod
    def of(cls, snapshot: LiveSnapshot) -> ChangeShape:
        return cls(snapshot.num_splits, snapshot.num_sub_items, snapshot.has_bias, snapshot.id_kind)

    @property
    def code_type(self) -> np.dtype[Any]:
        return np.dtype("<u1" if self.num_sub_items <= 256 else "<u2")


def encode(change: Change) -> tuple[int, bytes]:
    """Return a change as its kind's number and bytes."""
    kind = _KINDS.index(type(change)) + 1
    if isinstance(change, Removal):
        return kind, _COUNT.pack(0, len(change.numbers)) + _octets(change.numbers, "<u4")
    if isinstance(change, Noting):
        offsets, pool = packed_texts([text or b"" for text in change.texts])
        arrays = [_octets(change.numbers, "<u4"), _octets(offsets, "<i8"), pool.tobytes()]
        return kind, _COUNT.pack(0, len(change.numbers)) + b"".join(arrays)
    if isinstance(change, Upsert):
        return kind, _encoded_pair(change.replaced, change.added)
    if isinstance(change, NotedUpsert):
        return kind, _encoded_pair(change.upsert, change.noting)
    items = change.items
    is_new = isinstance(change, Addition)
    first = int(items.numbers[0]) if is_new and len(items) else 0
    parts = [_COUNT.pack(first, len(items))]
    if not is_new:
        parts.append(_octets(items.numbers, "<u4"))
    parts.append(_octets(items.codes, items.codes.dtype.newbyteorder("<")))
    if items.item_bias is not None:
        parts.append(_octets(items.item_bias, "<f4"))
    if is_new and items.names is not None:
        parts.extend(_encoded_names(items.names))
    return kind, b"".join(parts)


def _encoded_pair(first: Change, second: Change) -> bytes:
    content = encode(first)[1]
    return _LENGTH.pack(len(content)) + content + encode(second)[1]


def decode(kind: int, content: memoryview, shape: ChangeShape, next_number: int) -> Change:
    """Return the change that bytes stand for; refuse what no catalogue of this shape can have."""
    if not 1 <= kind <= len(_KINDS):
        raise StorageError(f"kind {kind}, expected 1 to {len(_KINDS)}")
    if kind == _KINDS.index(Upsert) + 1:
        return Upsert(*_decoded_pair((Replacement, Addition), content, shape, next_number))
    if kind == _KINDS.index(NotedUpsert) + 1:
        return NotedUpsert(*_decoded_pair((Upsert, Noting), content, shape, next_number))
    reader = _Unpacker(content)
    first, count = reader.count()
    if kind == _KINDS.index(Removal) + 1:
        numbers = reader.take("<u4", count)
        reader.finish()
        return Removal(numbers)
    if kind == _KINDS.index(Noting) + 1:
        numbers = reader.take("<u4", count)
        texts = _decoded_texts(reader, count, "notes")
        reader.finish()
        for text in filter(None, texts):
            check_text(text)
        return Noting(numbers, [text or None for text in texts])
    is_new = kind == _KINDS.index(Addition) + 1
    if is_new:
        if count and first != next_number:
            raise StorageError(f"items from number {first} on, expected {next_number}")
    else:
        numbers = reader.take("<u4", count)
    codes = reader.take(shape.code_type, count * shape.num_splits)
    codes = codes.reshape(count, shape.num_splits)
    if codes.size and int(codes.max()) >= shape.num_sub_items:
        raise StorageError(f"a code is {codes.max()}, expected less than {shape.num_sub_items}")
    bias: Float32Array | None = None
    if shape.has_bias:
        bias = reader.take("<f4", count)
        if not np.isfinite(bias).all():
            raise StorageError("a bias is not finite")
    names = _decoded_names(reader, shape.id_kind, count) if is_new else None
    reader.finish()
    if is_new:
        numbers = np.arange(first, first + count).astype(np.uint32)  # as many as there are codes
        return Addition(Items(numbers, codes, bias, names))
    order = np.argsort(numbers, kind="stable")  # as in a snapshot
    return Replacement(Items(numbers, codes, bias, None).take(order))


def _decoded_pair(
    kinds: tuple[type[First], type[Second]],
    content: memoryview,
    shape: ChangeShape,
    next_number: int,
) -> tuple[First, Second]:
    """Return the two changes of which one is made."""
    if len(content) < _LENGTH.size:
        raise StorageError(f"{len(content)} bytes, expected {_LENGTH.size} or more")
    [length] = _LENGTH.unpack_from(content)
    if length > len(content) - _LENGTH.size:
        raise StorageError(f"{len(content)} bytes, too few for a first part of {length}")
    end = _LENGTH.size + length
    first = decode(_KINDS.index(kinds[0]) + 1, content[_LENGTH.size : end], shape, next_number)
    second = decode(_KINDS.index(kinds[1]) + 1, content[end:], shape, next_number)
    if not isinstance(first, kinds[0]) or not isinstance(second, kinds[1]):
        raise StorageError("a part of a change is of another kind")  # for the type checker
    return first, second


class _Unpacker:
    """Takes arrays from bytes, one after the other."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._place = 0

    def count(self) -> tuple[int, int]:
        if len(self._content) < _COUNT.size:
            raise StorageError(f"{len(self._content)} bytes, expected {_COUNT.size} or more")
        self._place = _COUNT.size
        first, count = _COUNT.unpack_from(self._content)
        if first + count >= MAX_ITEMS:  # before anything is made of it
            raise StorageError(f"{count} items from number {first} on, more than there can be")
        return first, count

    def take(self, dtype: Any, count: int) -> NDArray[Any]:
        kind = np.dtype(dtype)
        size = count * kind.itemsize
        if size > len(self._content) - self._place:
            raise StorageError(f"{len(self._content)} bytes, too few for its {count} numbers")
        found = np.frombuffer(self._content, kind, count, self._place)
        self._place += size
        # A copy in the machine's own order: the bytes are not kept.
        return found.astype(kind.newbyteorder("="))

    def finish(self) -> None:
        if self._place != len(self._content):
            raise StorageError(f"{len(self._content)} bytes, expected {self._place}")


def _octets(array: NDArray[Any], dtype: Any) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _encoded_names(names: NameArray) -> list[bytes]:
    if names.dtype != object:
        return [_octets(names, "<i8")]
    offsets, pool = packed_texts([name.encode() for name in names])
    return [_octets(offsets, "<i8"), pool.tobytes()]


def _decoded_names(reader: _Unpacker, kind: IdKind, count: int) -> NameArray | None:
    if kind == "none":
        return None
    if kind == "integers":
        return reader.take("<i8", count)
    try:
        return as_objects([text.decode() for text in _decoded_texts(reader, count, "external ids")])
    except UnicodeDecodeError:
        raise StorageError("an external id is not text in UTF-8") from None


def _decoded_texts(reader: _Unpacker, count: int, what: str) -> list[bytes]:
    offsets = reader.take("<i8", count + 1)
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
        raise StorageError(f"{what} have offsets that do not ascend from 0")
    pool = reader.take("<u1", int(offsets[-1])).tobytes()
    bounds = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return [pool[begin:end] for begin, end in bounds]
