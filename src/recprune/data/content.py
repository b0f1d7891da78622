"""What items are, beside who had them: their texts (titles, paths) or their vectors, from a file.

Items that a model was never trained on are known by nothing else.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recprune.data.identifiers import FoundIds, coerce_ids
from recprune.types import Float32Array, InputError, Int64Array, frozen, needs_extra

with needs_extra("data"):
    import polars as pl
    import pyarrow as pa
    import pyarrow.csv as pa_csv
    import pyarrow.parquet as pq

    from recprune.data.formats import (
        Source,
        checked_column,
        delimited_head,
        find_id_column,
        find_sources,
        kind_of,
    )


@dataclass(frozen=True, eq=False)
class Content:
    """The content of some items of a catalogue: texts of several parts, or vectors."""

    items: Int64Array  # internal ids, each once
    texts: list[str] | None = None  # of each of them; parts stand in lines of their own
    vectors: Float32Array | None = None  # [items, c]
    unknown: int = 0  # rows of the file whose item the catalogue does not have

    def __post_init__(self) -> None:
        given = [part for part in (self.texts, self.vectors) if part is not None]
        if len(given) != 1 or len(given[0]) != len(self.items):
            raise InputError("content is one text for every item, or one vector")
        frozen(self.items)


def read_content(
    path: str | Path,
    item_ids: FoundIds,
    *,
    item_column: str | None = None,
    text_columns: Sequence[str] = (),
    vector_column: str | None = None,
) -> Content:
    """Read the content of items from Parquet, CSV, TSV, JSON lines, or from an `.npz` file.

    A row is an item. Which column has the ids is told by its usual names, or by `item_column`. What
    describes the item is a column of lists of numbers, or else all columns of text; `text_columns`
    or `vector_column` name them instead. An `.npz` file holds the arrays `ids` and `vectors`.
    Items whose text or vector is missing, empty or zero have no content.
    """
    if text_columns and vector_column:
        raise InputError("content is given by text columns or by a vector column, not by both")
    if Path(path).suffix.lower() == ".npz":
        if text_columns or vector_column or item_column:
            raise InputError(f"{path}: holds the arrays ids and vectors, and no columns to name")
        ids, vectors = _read_arrays(Path(path))
        return _of_vectors(path, ids, vectors, item_ids)
    frame = read_frame(path)
    names = frame.columns
    where = Path(path)
    item = find_id_column(where, names, item_column, "--content-item")
    others = [name for name in names if name != item]
    vector = vector_column
    if vector is None and not text_columns:
        lists = [name for name in others if _holds_vectors(frame[name])]
        if len(lists) > 1:
            raise InputError(f"{path}: which column has the vectors: {', '.join(lists)}? Name it")
        vector = lists[0] if lists else None
    if vector is not None:
        values = frame[checked_column(where, names, vector)]
        return _of_vectors(path, frame[item], _as_matrix(path, values), item_ids)
    chosen = [checked_column(where, names, name) for name in text_columns]
    chosen = chosen or [name for name in others if frame[name].dtype == pl.String]
    if not chosen:
        raise InputError(
            f"{path}: nothing describes the items: none of {', '.join(names)} has text or lists "
            "of numbers"
        )
    texts = frame.select(
        pl.concat_str(
            [pl.col(name).cast(pl.String) for name in chosen], separator="\n", ignore_nulls=True
        ).str.strip_chars("\n")
    ).to_series()
    return _of_texts(path, frame[item], texts, item_ids)


# Reading ------------------------------------------------------------------------------------------


def read_frame(path: str | Path) -> pl.DataFrame:
    """Read a file or a folder of parts as it is: text where a format has no types of its own."""
    try:
        parts = [_read_part(source) for source in find_sources(path)]
        return pl.concat(parts)
    except (OSError, pa.ArrowException, pl.exceptions.PolarsError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _read_part(source: Source) -> pl.DataFrame:
    kind = kind_of(source.path)
    if kind == "parquet":
        with source.path.open("rb") as file:
            return pl.DataFrame(pl.from_arrow(pq.ParquetFile(file).read()))
    if kind == "jsonl":
        with source.open() as stream:
            return pl.read_ndjson(bytes(stream.read()), infer_schema_length=None)
    delimiter, names = delimited_head(source, None, header=True)
    with source.open() as stream:
        table = pa_csv.read_csv(
            stream,
            read_options=pa_csv.ReadOptions(column_names=names, skip_rows=1),
            parse_options=pa_csv.ParseOptions(
                delimiter=delimiter,
                quote_char=False if delimiter == "\t" else '"',
                newlines_in_values=delimiter != "\t",
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
    return pl.DataFrame(pl.from_arrow(table))


def _read_arrays(path: Path) -> tuple[pl.Series, Float32Array]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            ids, vectors = arrays["ids"], arrays["vectors"]
    except KeyError as error:
        raise InputError(f"{path}: {error.args[0]}; expected ids and vectors") from None
    except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iuU":
        raise InputError(f"{path}: ids is {ids.dtype}{list(ids.shape)}, expected integers or text")
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or len(vectors) != len(ids):
        raise InputError(
            f"{path}: vectors is {vectors.dtype}{list(vectors.shape)}, expected floats "
            f"[{len(ids)}, c]"
        )
    _refuse_infinite(path, vectors)
    return pl.Series(ids), vectors.astype(np.float32)


def _holds_vectors(values: pl.Series) -> bool:
    inner = getattr(values.dtype, "inner", None)
    return isinstance(values.dtype, pl.List | pl.Array) and inner is not None and inner.is_numeric()


def _as_matrix(path: str | Path, values: pl.Series) -> Float32Array:
    """Return a column of lists as rows of one length; where the list is missing, zeros."""
    if not _holds_vectors(values):
        raise InputError(
            f"{path}: the column {values.name!r} is of type {values.dtype}, expected lists of "
            "numbers"
        )
    lists = values.cast(pl.List(pl.Float32))
    lengths = lists.list.len()  # null where the list is
    given = lengths.drop_nulls()
    width = int(given[0]) if len(given) else 0
    ragged = (lengths != width).fill_null(False)
    if ragged.any():
        row = int(ragged.arg_true()[0])
        raise InputError(
            f"{path}: row {row + 1}: a vector of {lengths[row]} numbers, the first has {width}"
        )
    found = np.zeros((len(values), width), np.float32)
    numbers = lists.drop_nulls().explode().to_numpy()  # a null among them becomes NaN
    if width:
        found[lists.is_not_null().to_numpy()] = numbers.reshape(-1, width)
    _refuse_infinite(path, found)
    return found


def _refuse_infinite(path: str | Path, vectors: Float32Array) -> None:
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise InputError(
            f"{path}: row {int(finite.argmin()) + 1}: the vector holds NaN or infinity"
        )


# Whose content it is ------------------------------------------------------------------------------


def _of_texts(path: str | Path, ids: pl.Series, texts: pl.Series, item_ids: FoundIds) -> Content:
    items = find_items(path, ids, item_ids)
    rows = np.flatnonzero((items >= 0) & (texts != "").fill_null(False).to_numpy())
    return Content(items[rows], texts[rows].to_list(), None, int((items < 0).sum()))


def _of_vectors(
    path: str | Path, ids: pl.Series, vectors: Float32Array, item_ids: FoundIds
) -> Content:
    items = find_items(path, ids, item_ids)
    rows = np.flatnonzero((items >= 0) & vectors.any(axis=1))
    return Content(items[rows], None, vectors[rows], int((items < 0).sum()))


def find_items(path: str | Path, ids: pl.Series, item_ids: FoundIds) -> Int64Array:
    """Return the internal id of every row, −1 where the catalogue has no such item.

    An item is missing in no row, and is in one row only; `path` says in an error where the rows
    came from.
    """
    missing = ids.is_null() if ids.dtype != pl.String else ids.is_null() | (ids == "")
    if missing.any():
        raise InputError(f"{path}: row {int(missing.arg_true()[0]) + 1}: the item is missing")
    found = item_ids.find_all(coerce_ids(item_ids, ids.to_list()))
    known = np.flatnonzero(found >= 0)
    _, first, inverse = np.unique(found[known], return_index=True, return_inverse=True)
    again = np.flatnonzero(first[inverse] != np.arange(len(known)))
    if len(again):
        row = int(known[again[0]])
        earlier = int(known[first[inverse[again[0]]]])
        raise InputError(
            f"{path}: row {row + 1}: the item {ids[row]!r} is described twice, first in row "
            f"{earlier + 1}"
        )
    return found
