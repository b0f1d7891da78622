"""What may be asked of an index: every argument checked, with a message that says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from recprune import _native
from recprune.types import MAX_SUB_ITEMS, Float32Array, InputError, Int64Array, type_in_words

MAX_SPLITS = 64
_MAX_THREADS = 1024
# Results that may be asked for beyond the catalogue: with more, padding would fill the memory.
_MOST_PADDED = 65_536
_FLOAT32 = np.dtype(np.float32)
MAX_ITEMS = 2**32 - 64
_make_exclusions = _native.BatchExclusions.make  # looked up once: each of these is felt
_make_boosts = _native.BatchBoosts.make
_Made = TypeVar("_Made")


def checked_codes(codes: Any, embeddings: Any) -> tuple[NDArray[Any], Float32Array]:
    """Return codes as uint8 or uint16 by the number of sub-items, and the embeddings."""
    for name, array in (("codes", codes), ("sub_item_embeddings", embeddings)):
        if not isinstance(array, np.ndarray):
            raise InputError(f"{name} is {type_in_words(array)}, expected a NumPy array")
    if codes.ndim != 2 or codes.dtype not in (np.uint8, np.uint16):
        raise InputError(
            f"codes is {codes.dtype}{list(codes.shape)}, expected uint8 or uint16 [n, M]"
        )
    if embeddings.ndim != 3 or embeddings.dtype != np.float32:
        raise InputError(
            f"sub_item_embeddings is {embeddings.dtype}{list(embeddings.shape)}, "
            "expected float32 [M, B, d/M]"
        )
    num_items, num_splits = codes.shape
    if not 1 <= num_splits <= MAX_SPLITS:
        raise InputError(f"codes has {num_splits} splits, expected 1 to {MAX_SPLITS}")
    if embeddings.shape[0] != num_splits:
        raise InputError(
            f"sub_item_embeddings has {embeddings.shape[0]} splits, codes has {num_splits}"
        )
    num_sub_items = embeddings.shape[1]
    if not 2 <= num_sub_items <= MAX_SUB_ITEMS:
        raise InputError(f"sub_item_embeddings has {num_sub_items} sub-items, expected 2 to 65536")
    if embeddings.shape[2] < 1:
        raise InputError("sub_item_embeddings has no dimensions")
    if num_items >= MAX_ITEMS:
        raise InputError(f"{num_items} items; an index holds fewer than {MAX_ITEMS}: use shards")
    if codes.size and int(codes.max()) >= num_sub_items:
        item, split = np.unravel_index(int(codes.argmax()), codes.shape)
        raise InputError(
            f"codes[{item}, {split}] is {codes[item, split]}, expected less than {num_sub_items}"
        )
    refuse_infinite(embeddings, "sub_item_embeddings")
    codes = codes.astype(np.uint8 if num_sub_items <= 256 else np.uint16, copy=False)
    return np.ascontiguousarray(codes), embeddings


def checked_bias(bias: Any, num_items: int) -> Float32Array:
    """Return a copy of the biases, float32 [num_items]."""
    if not isinstance(bias, np.ndarray) or bias.dtype != np.float32 or bias.shape != (num_items,):
        given = (
            f"{bias.dtype}{list(bias.shape)}"
            if isinstance(bias, np.ndarray)
            else type(bias).__name__
        )
        raise InputError(f"item_bias is {given}, expected float32 [{num_items}]")
    refuse_infinite(bias, "item_bias")
    return np.array(bias)


def checked_count(count: Any, name: str) -> int:
    """Return an integer of any type as an int."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise InputError(f"{name} is {count!r}, expected an integer")
    return int(count)


def checked_k(k: Any, num_items: int) -> int:
    """Return how many items are wanted; more than there are is padding, which has a limit."""
    if type(k) is not int:
        k = checked_count(k, "k")
    most = num_items + _MOST_PADDED
    if not 1 <= k <= most:
        given = k if abs(k) < 10**40 else "a number of more than 40 digits"
        raise InputError(
            f"k is {given}, expected 1 to {most}: the catalogue's {num_items} items and "
            f"{_MOST_PADDED} more"
        )
    return int(k)


def checked_threads(threads: Any) -> int:
    if type(threads) is not int or not 1 <= threads <= _MAX_THREADS:
        raise InputError(f"threads is {threads!r}, expected an integer from 1 to {_MAX_THREADS}")
    return threads


def refuse_infinite(array: Float32Array, name: str) -> None:
    """Refuse NaN and infinity, naming the first one's position."""
    if not np.isfinite(array).all():
        place = np.unravel_index(int((~np.isfinite(array)).argmax()), array.shape)
        where = ", ".join(str(int(axis)) for axis in place)
        raise InputError(f"{name}[{where}] is {array[place]}, expected a finite number")


def checked_queries(queries: Any, name: str, shape: tuple[int, ...]) -> tuple[Float32Array, bool]:
    """Return the queries as [queries, values], and whether there was just one without a batch."""
    if not isinstance(queries, np.ndarray) or queries.dtype != _FLOAT32:
        given = queries.dtype if isinstance(queries, np.ndarray) else type(queries).__name__
        raise InputError(f"{name} is {given}, expected a NumPy array of float32")
    single = queries.shape == shape
    if queries.ndim == 2 and queries.shape[1:] == shape and queries.flags.c_contiguous:
        return queries, False  # as nearly always: nothing to do
    if not single and queries.shape[1:] != shape:
        expected = ", ".join(map(str, shape))
        raise InputError(
            f"{name} has shape {list(queries.shape)}, "
            f"expected [{expected}] or [queries, {expected}]"
        )
    rows = 1 if single else queries.shape[0]
    return np.ascontiguousarray(queries).reshape(rows, math.prod(shape)), single


def checked_items(items: Any, num_items: int) -> NDArray[Any]:
    wanted = np.asarray(items)
    if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
        raise InputError(f"items is {wanted.dtype}{list(wanted.shape)}, expected integers [items]")
    outside = (wanted < 0) | (wanted >= num_items)
    if outside.any():
        place = int(outside.argmax())
        raise InputError(f"items[{place}] is {wanted[place]}, expected 0 to {num_items - 1}")
    return wanted


def checked_exclude(
    exclude: Any, num_queries: int, single: bool, num_items: int
) -> _native.BatchExclusions | None:
    """Return the excluded ids of every query."""
    if exclude is None:
        return None
    return _made(_make_exclusions, _excluded_rows, exclude, num_queries, single, num_items)


def _excluded_rows(
    exclude: Any, num_queries: int, single: bool, num_items: int
) -> list[Int64Array]:
    """Return the excluded ids of every query as an array."""
    if not isinstance(exclude, Sequence | np.ndarray):
        raise InputError(f"exclude is {type_in_words(exclude)}, expected item ids")
    rows: Sequence[Any] | NDArray[Any] = [exclude] if single else exclude
    if len(rows) != num_queries:
        raise InputError(f"exclude has {len(rows)} rows for {num_queries} queries")
    kept = []
    for number, row in enumerate(rows):
        try:
            ids = np.asarray(row)
        except ValueError:
            raise InputError(f"exclude[{number}] is not a flat sequence of item ids") from None
        if ids.size == 0:
            ids = np.empty(0, np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InputError(
                f"exclude[{number}] is {ids.dtype}{list(ids.shape)}, expected item ids"
            )
        expected = f"expected 0 to {num_items - 1}, or -1"
        kept.append(_as_int64(ids, f"exclude[{number}]", expected))
    return kept


def _made(
    make: Callable[[Any, int, bool, int], _Made | None],
    rows_of: Callable[[Any, int, bool, int], list[Any]],
    given: Any,
    num_queries: int,
    single: bool,
    num_items: int,
) -> _Made:
    """Return what the core makes of ids: of arrays of the usual types at once, else of rows.

    Two hundred ids are to cost a few microseconds, so it is the core that looks at each of them.
    """
    try:
        made = make(given, num_queries, single, num_items)
        if made is None:
            made = make(
                rows_of(given, num_queries, single, num_items), num_queries, False, num_items
            )
    except ValueError as error:
        raise InputError(str(error)) from None
    if made is None:  # to leave it out would be another question
        raise InputError("an array of item ids or boosts cannot be read")
    return made


def _as_int64(ids: NDArray[Any], name: str, expected: str) -> Int64Array:
    if ids.dtype == np.uint64 and ids.max(initial=0) >= 2**63:
        raise InputError(f"{name} holds {ids.max()}, {expected}")
    # Aligned too: a view into a file's bytes may not be.
    return np.require(ids, np.int64, ["C", "A"])


def checked_boosts(
    boosts: Any, num_queries: int, single: bool, num_items: int
) -> _native.BatchBoosts | None:
    """Return the boosts of every query."""
    if boosts is None:
        return None
    return _made(_make_boosts, _boosted_rows, boosts, num_queries, single, num_items)


def _boosted_rows(
    boosts: Any, num_queries: int, single: bool, num_items: int
) -> list[tuple[Int64Array, Float32Array]]:
    """Return the boosts of every query as arrays."""
    if not isinstance(boosts, list | tuple):
        raise InputError(f"boosts is {type_in_words(boosts)}, expected pairs (item ids, values)")
    rows: Sequence[Any] = (boosts,) if single else boosts
    if len(rows) != num_queries:
        raise InputError(f"boosts has {len(rows)} rows for {num_queries} queries")
    return [_checked_pair(row, number, num_items) for number, row in enumerate(rows)]


def _checked_pair(row: Any, number: int, num_items: int) -> tuple[Int64Array, Float32Array]:
    """Return the boosts of one query as item ids and values, contiguous."""
    if not isinstance(row, Sequence) or len(row) != 2:
        raise InputError(f"boosts[{number}] is not a pair (item ids, values)")
    try:
        items, values = np.asarray(row[0]), np.asarray(row[1])
    except ValueError:
        raise InputError(f"boosts[{number}] is not a pair of flat sequences") from None
    if items.size == 0:
        items = items.astype(np.int64)
    if items.ndim != 1 or items.dtype.kind not in "iu":
        raise InputError(
            f"boosts[{number}] has {items.dtype}{list(items.shape)} as items, expected item ids"
        )
    if values.ndim != 1 or values.dtype.kind not in "fiu":
        raise InputError(
            f"boosts[{number}] has {values.dtype}{list(values.shape)} as values, expected numbers"
        )
    if len(items) != len(values):
        raise InputError(f"boosts[{number}] has {len(items)} item ids and {len(values)} values")
    if values.dtype != _FLOAT32:
        with np.errstate(over="ignore"):  # infinity is refused like any other
            values = values.astype(np.float32)
    ids = _as_int64(items, f"boosts[{number}]", f"expected 0 to {num_items - 1}")
    return ids, np.require(values, np.float32, ["C", "A"])


def checked_allow(allow: Any, num_queries: int, num_items: int) -> NDArray[np.uint64] | None:
    """Return allowed items as bits, [1 or queries, words]."""
    if allow is None:
        return None
    words = -(-num_items // 64)
    if not isinstance(allow, np.ndarray) or allow.dtype not in (np.bool_, np.uint64):
        given = allow.dtype if isinstance(allow, np.ndarray) else type(allow).__name__
        raise InputError(f"allow is {given}, expected a NumPy array of bool, or of uint64 words")
    length = num_items if allow.dtype == np.bool_ else words
    if allow.shape not in ((length,), (num_queries, length)):
        raise InputError(
            f"allow has shape {list(allow.shape)}, expected [{length}] or [queries, {length}]"
        )
    rows = np.atleast_2d(allow)
    if rows.dtype == np.uint64:
        rows = rows.copy()
        if num_items % 64 and words:
            rows[:, -1] &= np.uint64((1 << num_items % 64) - 1)
        return rows
    packed = np.zeros((len(rows), words * 8), np.uint8)
    bits = np.packbits(rows, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    return packed.view(np.uint64)


def checked_floor(floor: Any, num_queries: int) -> Float32Array | None:
    """Return one floor for each query."""
    if floor is None:
        return None
    floors = np.asarray(floor)
    if floors.dtype.kind not in "fiu" or floors.shape not in ((), (num_queries,)):
        raise InputError(
            f"floor is {floors.dtype}{list(floors.shape)}, expected a score, or one for each of "
            f"{num_queries} queries"
        )
    # Rounded up: the lowest score that an item at or above the floor can have.
    rounded = floors.astype(np.float32)
    rounded = np.where(rounded < floors, np.nextafter(rounded, np.float32(np.inf)), rounded)
    if np.isnan(rounded).any():
        raise InputError("floor holds NaN, expected scores")
    return np.ascontiguousarray(np.broadcast_to(rounded, (num_queries,)), np.float32)
