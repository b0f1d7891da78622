"""What an encoder keeps of users, beside their histories: a place for it, and its bytes.

A state can be made anew from the history at any time, so a place may lose some, and nothing here is
waited for: what fails costs time, and no answer. What is read is bound by checksums to the model
and to the items that it stands for; where anything does not fit, there is no state.

A state is a head, which says what it stands for, and rows. After an event, one row is added and the
head replaced.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from recprune.models.continuation import Continuation, KeptState, new_items
from recprune.types import Float32Array, RecpruneError

READ_PATIENCE_S = 1.0  # how long a call waits that a question waits for
WRITE_PATIENCE_S = 5.0  # and one that none does

_MAGIC = b"rprs1"
_COUNTS = struct.Struct("<II")  # items, rows
_CHECKSUM = struct.Struct("<I")


class StatesUnavailableError(RecpruneError):
    """States cannot be read or written just now."""


class StoredState(NamedTuple):
    """A state as bytes."""

    head: bytes
    rows: Sequence[bytes]  # of the last items


class States(Protocol):
    """Where states of users are kept: many, but not all."""

    def read(self, user: str) -> StoredState | None:
        """Return the state of a user, if there is one."""

    def write(self, user: str, state: KeptState, continuation: Continuation) -> None:
        """Keep a state in place of another one, of which it takes over what it continues."""

    def close(self) -> None:
        """Let go of files and connections."""


def head_of(state: KeptState, continuation: Continuation) -> bytes:
    counts = _COUNTS.pack(len(state.items), len(state.rows))
    items = state.items.astype("<i4").tobytes()
    body = continuation.fingerprint + counts + items + state.embedding.astype("<f4").tobytes()
    return _MAGIC + body + _CHECKSUM.pack(crc32(body))


def rows_of(state: KeptState, count: int, continuation: Continuation) -> list[bytes]:
    """Return the last rows."""
    items, first = state.items.astype("<i4"), len(state.items) - count
    rows = state.rows[len(state.rows) - count :].astype("<f4")
    return [
        (row := values.tobytes()) + _row_checksum(items, first + place, row, continuation)
        for place, values in enumerate(rows)
    ]


def state_of(stored: StoredState, continuation: Continuation) -> KeptState | None:
    """Return what was stored, if it is whole and of this model."""
    found = _read_head(stored.head, continuation)
    if found is None or found[1] != len(stored.rows):
        return None
    items, _, embedding = found
    size = 4 * continuation.row_width
    first = len(items) - len(stored.rows)
    for place, row in enumerate(stored.rows):
        values, checksum = row[:size], row[size:]
        if len(values) < size:
            return None
        if _row_checksum(items, first + place, values, continuation) != checksum:
            return None
    values = b"".join(row[:size] for row in stored.rows)
    rows = np.frombuffer(values, "<f4").reshape(-1, continuation.row_width)
    return KeptState(items.astype(np.int32), rows.astype(np.float32), embedding)


def rows_to_add(head: bytes | None, state: KeptState, continuation: Continuation) -> int | None:
    """Return by how many rows a state continues the one with a head; None: it does not."""
    found = None if head is None else _read_head(head, continuation)
    if found is None:
        return None
    items, count, _ = found
    new = new_items(items, state.items, continuation.length)
    # All rows that are needed are there then.
    added = new is not None and min(count + new, continuation.most_rows) == len(state.rows)
    return new if added else None


def _read_head(
    head: bytes, continuation: Continuation
) -> tuple[NDArray[np.int32], int, Float32Array] | None:
    """Return items, how many rows, and φ; None where it is damaged or of another model."""
    body, checksum = head[len(_MAGIC) : -_CHECKSUM.size], head[-_CHECKSUM.size :]
    start = len(continuation.fingerprint)
    if not head.startswith(_MAGIC) or _CHECKSUM.pack(crc32(body)) != checksum:
        return None
    if not body.startswith(continuation.fingerprint) or len(body) < start + _COUNTS.size:
        return None
    num_items, num_rows = _COUNTS.unpack_from(body, start)
    start += _COUNTS.size
    if len(body) != start + 4 * (num_items + continuation.width):
        return None
    if not 0 < num_items <= continuation.length or num_rows > num_items:
        return None
    if num_rows != min(num_items, continuation.most_rows):
        return None
    items = np.frombuffer(body, "<i4", num_items, start)
    embedding = np.frombuffer(body, "<f4", continuation.width, start + 4 * num_items)
    return items, num_rows, embedding.astype(np.float32)


def _row_checksum(
    items: NDArray[np.int32], place: int, row: bytes, continuation: Continuation
) -> bytes:
    """Return the checksum of a row: of its numbers, the model and all items that it depends on."""
    first = max(0, place - continuation.behind)
    told = crc32(items[first : place + 1].tobytes(), crc32(continuation.fingerprint))
    return _CHECKSUM.pack(crc32(row, told))
