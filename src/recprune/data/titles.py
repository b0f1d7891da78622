"""What items are called, for people to read: their names or titles, from a file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from recprune.data.identifiers import ExternalId, FoundIds, coerce_ids
from recprune.types import InputError, needs_extra

_ROWS_AT_ONCE = 1 << 16  # a file may name many more items than a catalogue has


class reading:  # noqa: N801 # reads like the verb that it is
    """Turn what goes wrong while a file is read into a message that names it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise InputError(f"{self._path}: cannot be read: {error.strerror}") from None
        if isinstance(error, UnicodeDecodeError):
            raise InputError(f"{self._path}: not a text in UTF-8: {error}") from None
        if isinstance(error, csv.Error):
            raise InputError(f"{self._path}: not readable as CSV: {error}") from None


def read_titles(path: Path) -> Iterator[tuple[ExternalId, str]]:
    """Return (id, title) of every row of a CSV with a header, or of a Parquet file."""
    with reading(path):
        rows = _parquet_rows(path) if path.suffix == ".parquet" else _csv_rows(path)
        yield from rows


def names_of(item_ids: FoundIds, path: Path) -> dict[ExternalId, str]:
    """Return the names that a file has of items of a catalogue; of several, the last counts."""
    names: dict[ExternalId, str] = {}
    rows = read_titles(path)
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        ids = coerce_ids(item_ids, [item for item, _ in some])
        known = (item_ids.find_all(ids) >= 0).tolist()
        for item, (_, name), is_known in zip(ids, some, known, strict=True):
            if is_known:
                names[item] = " ".join(name.split())
    return {item: name for item, name in names.items() if name}


def _csv_rows(path: Path) -> Iterator[tuple[ExternalId, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        places = _columns(path, next(rows, []))
        for number, row in enumerate(rows, 2):
            if len(row) <= max(places):
                raise InputError(f"{path}, row {number}: {len(row)} columns, expected more")
            yield row[places[0]], row[places[1]]


def _parquet_rows(path: Path) -> Iterator[tuple[ExternalId, str]]:
    with needs_extra("data"):
        import pyarrow
        import pyarrow.parquet
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        wanted = [names[place] for place in _columns(path, names)]
        for batch in file.iter_batches(columns=wanted):
            columns = [batch.column(name).to_pylist() for name in wanted]
            for external_id, name in zip(*columns, strict=True):
                yield external_id, str(name or "")
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not readable as Parquet: {error}") from None


def _columns(path: Path, header: Iterable[str]) -> tuple[int, int]:
    """Return the places of the ids and of the names."""
    names = [name.strip().casefold() for name in header]
    ids = next((names.index(name) for name in ("item_id", "item", "id") if name in names), None)
    titles = next((names.index(name) for name in ("name", "title") if name in names), None)
    if ids is None or titles is None:
        raise InputError(
            f"{path}: has the columns {', '.join(names) or 'none'}; expected item_id and name"
        )
    return ids, titles
