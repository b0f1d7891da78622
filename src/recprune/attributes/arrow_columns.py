"""Columns of attributes from Arrow: a table, a frame that speaks Arrow, a file read as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recprune.attributes.column import NO_VALUE, AttributeColumn, Kind, code_type
from recprune.data.identifiers import FoundIds, StringIds, number_texts
from recprune.types import InputError, Int64Array, needs_extra, type_in_words

with needs_extra("data"):
    import polars as pl
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from recprune.attributes.text_tables import (
        TEXT_SUFFIXES,
        is_text_table,
        read_delimited,
        read_json_lines,
    )
    from recprune.data.content import find_items
    from recprune.data.formats import checked_column, find_id_column, find_sources, kind_of

_BOOLEANS = np.array([0, 1], np.uint8)
_ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")


class ItemRows(NamedTuple):
    """Rows of a table, one for each of some items."""

    items: Int64Array  # internal ids, ascending
    rows: Int64Array  # of the table, one for each of them
    table: pa.Table  # without the column of ids
    unknown: int  # rows whose item the catalogue does not have
    source: str  # where they came from, for messages


def read_table(path: str | Path, item_column: str | None = None) -> pa.Table:
    """Read a file of Parquet or Arrow, or of text, where the column of ids is read as ids are."""
    file = Path(path)
    try:
        if is_text_table(file):
            if file.is_dir():
                raise InputError(f"{path}: is a folder, expected a file")
            (source,) = find_sources(file)
            lines = kind_of(file) == "jsonl"
            return (read_json_lines if lines else read_delimited)(source, item_column)
        if file.suffix.lower() in (".parquet", ".pq"):
            return pq.ParquetFile(file).read()
        if file.suffix.lower() in _ARROW_SUFFIXES:
            with pa.memory_map(str(file)) as source:
                return pa.ipc.open_file(source).read_all()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    expected = ", ".join((".parquet", *_ARROW_SUFFIXES, *TEXT_SUFFIXES))
    raise InputError(f"{path}: expected a file whose name ends with one of {expected}")


def item_rows(
    given: Any,
    item_ids: FoundIds,
    item_column: str | None = None,
    columns: Sequence[str] | None = None,
    source: str = "attributes",
) -> ItemRows:
    """Return what a table, a frame or a mapping of columns says of the items of a catalogue."""
    try:
        table = given if isinstance(given, pa.Table) else pa.table(given)
    except (TypeError, ValueError, pa.ArrowException) as error:
        kind = type_in_words(given)
        raise InputError(f"{source} is {kind}, which is no table of Arrow's: {error}") from None
    names, place = table.column_names, Path(source)
    ids = find_id_column(place, names, item_column, "--item-column")
    chosen = names if columns is None else columns
    chosen = [checked_column(place, names, name) for name in chosen if name != ids]
    items = find_items(source, pl.Series(pl.from_arrow(table.column(ids))), item_ids)
    rows = np.flatnonzero(items >= 0)
    rows = rows[np.argsort(items[rows], kind="stable")]
    return ItemRows(items[rows], rows, table.select(chosen), int((items < 0).sum()), source)


def column_of(rows: ItemRows, name: str, like: AttributeColumn | None = None) -> AttributeColumn:
    """Return a column of a table, a row an item; `like` is one whose type it has to have."""
    refuse = _refusing(f"{rows.source}: the column {name!r}")
    try:
        array = _plain(rows.table.column(name).combine_chunks())
        array.validate(full=True)  # text, for one, may be no text
        whole = _column(array, refuse, like)
    except pa.ArrowException as error:
        raise refuse(f"cannot be read: {error}") from None
    return whole.take(rows.rows).with_used_values()


def _column(
    array: pa.Array, refuse: Callable[[str], InputError], like: AttributeColumn | None
) -> AttributeColumn:
    is_list = _is_list(array.type)
    if like is not None and pa.types.is_null(array.type):
        offsets = np.arange(len(array) + 1) if like.is_list else None
        return replace(_without_values(len(array), like), offsets=offsets)
    if like is not None and is_list != like.is_list:
        raise refuse(f"is {array.type}, expected {like.described}")
    return _lists(array, refuse, like) if is_list else _scalars(array, refuse, like)


def for_all_items(rows: AttributeColumn, items: Int64Array, num_items: int) -> AttributeColumn:
    """Return a column of the whole catalogue from the rows of some items, which ascend."""
    none = np.zeros(num_items, rows.codes.dtype)
    offsets = np.arange(num_items + 1) if rows.is_list else None
    empty = AttributeColumn(rows.kind, rows.values, none, offsets)
    return empty.with_items(items, rows, num_items)


def _refusing(place: str) -> Callable[[str], InputError]:
    return lambda message: InputError(f"{place} {message}")


def _plain(array: pa.Array) -> pa.Array:
    """Return an array as of values that lie one after the other, which not all of Arrow's do."""
    if isinstance(array, pa.ChunkedArray):  # as a table without rows has it
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_dictionary(array.type):
        values = _plain(array.dictionary)
        return pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode()
    return array.cast(pa.large_string()) if pa.types.is_string_view(array.type) else array


def _is_list(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in lists)


def _kind_of(kind: pa.DataType) -> Kind | None:
    """Return which kind of attribute a type of Arrow's is; None where it is none."""
    kinds: Mapping[Kind, tuple[Callable[[pa.DataType], bool], ...]] = {
        "text": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        "integer": (pa.types.is_integer,),
        "number": (pa.types.is_floating, pa.types.is_decimal),
        "boolean": (pa.types.is_boolean,),
        "time": (pa.types.is_timestamp, pa.types.is_date),
    }
    return next(
        (one for one, tests in kinds.items() if any(is_one(kind) for is_one in tests)), None
    )


def _scalars(
    array: pa.Array, refuse: Callable[[str], InputError], like: AttributeColumn | None
) -> AttributeColumn:
    if like is not None and pa.types.is_null(array.type):  # as Arrow has it where there is nothing
        return _without_values(len(array), like)
    kind = _kind_of(array.type)
    if kind is None:
        raise refuse(
            f"is {array.type}, expected text, numbers, booleans, times or lists of these: leave it "
            "out by naming the columns to take"
        )
    if like is not None and kind != like.kind:
        if (kind, like.kind) != ("integer", "number"):
            raise refuse(f"is {array.type}, expected {like.kind}")
        kind = like.kind
    is_valid = array.is_valid().to_numpy(zero_copy_only=False)
    given = array.drop_null()
    values: StringIds | NDArray[Any]
    places: NDArray[Any]
    if kind == "text":
        values, places = number_texts(pl.Series(pl.from_arrow(given), dtype=pl.String))
    elif kind == "boolean":
        values, places = _BOOLEANS.copy(), given.cast(pa.uint8()).to_numpy().astype(np.int32)
    else:
        numbers = _numbers(given, kind, like)
        is_number = ~np.isnan(numbers)
        is_valid = is_valid.copy()
        is_valid[is_valid] = is_number  # what is no number is no value
        values, places = np.unique(numbers[is_number], return_inverse=True)
    codes = np.full(len(array), NO_VALUE, code_type(len(values)))
    codes[is_valid] = places + 1
    return AttributeColumn(kind, values, codes)


def _without_values(count: int, like: AttributeColumn) -> AttributeColumn:
    return AttributeColumn(like.kind, like.values, np.zeros(count, like.codes.dtype))


def _numbers(array: pa.Array, kind: Kind, like: AttributeColumn | None) -> NDArray[Any]:
    """Return integers, numbers or times without nulls in the type that they are kept in."""
    if kind == "integer":
        return np.asarray(array.cast(pa.int64()).to_numpy())
    if kind == "time":
        # Finer than microseconds is rounded down; what microseconds cannot hold is refused.
        if pa.types.is_timestamp(array.type) and array.type.unit == "ns":
            return np.asarray(array.cast(pa.int64()).to_numpy()) // 1000
        moments = array.cast(pa.timestamp("us", getattr(array.type, "tz", None)))
        return np.asarray(moments.cast(pa.int64()).to_numpy())
    narrow = pa.types.is_float32(array.type) or pa.types.is_float16(array.type)
    if like is not None and isinstance(like.values, np.ndarray):
        narrow = like.values.dtype == np.float32
    if pa.types.is_decimal(array.type):
        # By Python, which returns the nearest float64, as it does of a literal; Arrow may not.
        encoded = array.dictionary_encode()
        nearest = np.array([float(one) for one in encoded.dictionary.to_pylist()], np.float64)
        numbers = nearest[encoded.indices.to_numpy()]
    else:
        numbers = array.cast(pa.float64(), safe=False).to_numpy()
    with np.errstate(over="ignore"):
        return np.asarray(numbers.astype(np.float32 if narrow else np.float64))


def _lists(
    array: pa.Array, refuse: Callable[[str], InputError], like: AttributeColumn | None
) -> AttributeColumn:
    lists = array.cast(pa.large_list(array.type.value_type))
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy()
    elements = _scalars(_plain(lists.flatten()), refuse, like)
    owners = np.repeat(np.arange(len(lists)), lengths)
    # An element without a value is none; a list that is not there has the one code that says so.
    has_value = elements.codes != NO_VALUE
    without = np.flatnonzero(~lists.is_valid().to_numpy(zero_copy_only=False))
    owners = np.concatenate([owners[has_value], without])
    none = np.full(len(without), NO_VALUE, elements.codes.dtype)
    codes = np.concatenate([elements.codes[has_value], none])
    codes = codes[np.argsort(owners, kind="stable")]
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(np.bincount(owners, minlength=len(lists)), out=offsets[1:])
    return AttributeColumn(elements.kind, elements.values, codes, offsets)
