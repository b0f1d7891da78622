"""The items by the caller's names for them: ids, titles, and a search over both."""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import (
    ExternalId,
    IntegerIds,
    StringIds,
    coerce_ids,
    find_rows,
)
from recprune.types import InputError, Int64Array, needs_extra


@dataclass(frozen=True)
class RowNumbers:
    """The ids of an index without any: an item is its row."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, internal_id: int) -> int:
        return internal_id

    def find_all(self, external_ids: Sequence[object]) -> Int64Array:
        """Return the internal ids, −1 where there is none."""
        return find_rows(self.count, external_ids)


class Catalogue:
    """Items, their names, and how popular they are. Safe to share between threads."""

    def __init__(
        self,
        ids: IntegerIds | StringIds | RowNumbers,
        popularity: Int64Array | None,
        names_file: Path | None,
    ) -> None:
        """Names are read from a file with a column of ids and a column of names."""
        self.ids = ids
        self.popularity = popularity
        self._names = _Names(self._named(names_file)) if names_file else None
        self._search_text: _SearchText | None = None
        self._lock = threading.Lock()

    @property
    def has_names(self) -> bool:
        return self._names is not None

    def coerce(self, external_ids: Iterable[ExternalId]) -> list[ExternalId]:
        """Return ids in the type that the catalogue has: what is a number may be given as text."""
        return coerce_ids(self.ids, external_ids)

    def find_all(self, external_ids: Iterable[ExternalId]) -> Int64Array:
        """Return the internal ids, −1 where there is none; numbers may be given as text."""
        return self.ids.find_all(self.coerce(external_ids))

    def find(self, external_id: ExternalId) -> int:
        """Do as `find_all` does, for one."""
        return int(self.find_all([external_id])[0])

    def external_id(self, item: int) -> ExternalId:
        """Return what the caller calls an item."""
        return self.ids[item]

    def name(self, item: int) -> str | None:
        return self._names.get(item) if self._names else None

    def search(self, words: str, most: int) -> list[int]:
        """Return items whose id or name contains the words, popular ones first.

        The text that is searched is built when it is first needed: a service whose names are
        not searched does not pay for it.
        """
        with self._lock:
            if self._search_text is None:
                self._search_text = _SearchText(self)
        exact = self.find(words)
        found = self._search_text.find(words, most)
        return ([exact] + [item for item in found if item != exact])[:most] if exact >= 0 else found

    def item_set(self, path: Path) -> NDArray[np.uint64]:
        """Read a file with an id a line: which items these are, as bits; unknown ones are not."""
        with _reading(path), path.open(encoding="utf-8-sig") as file:
            found = self.find_all([line.strip() for line in file if line.strip()])
        return self.bits(found[found >= 0])

    def bits(self, items: Int64Array) -> NDArray[np.uint64]:
        """Return a set of items as bits over the catalogue."""
        words = np.zeros(-(-len(self.ids) // 64), np.uint64)
        chosen = items.astype(np.uint64)
        np.bitwise_or.at(words, chosen // np.uint64(64), np.uint64(1) << chosen % np.uint64(64))
        return words

    def _named(self, path: Path) -> list[str]:
        """Return the names of all items, empty where the file has none."""
        names = [""] * len(self.ids)
        rows = list(_rows(path))
        found = self.find_all([external_id for external_id, _ in rows])
        for item, (_, name) in zip(found.tolist(), rows, strict=True):
            if item >= 0:
                names[item] = " ".join(name.split())
        return names


class _Names:
    """Texts by item, in one pool: a million of them are two arrays and not a million objects."""

    def __init__(self, names: list[str]) -> None:
        encoded = [name.encode("utf-8", "replace") for name in names]
        self._offsets = np.zeros(len(names) + 1, np.int64)
        np.cumsum([len(name) for name in encoded], out=self._offsets[1:])
        self._pool = b"".join(encoded)

    def get(self, item: int) -> str | None:
        """Return the name, or None where it is empty."""
        return self._pool[self._offsets[item] : self._offsets[item + 1]].decode() or None


class _SearchText:
    """One line an item, popular ones first, so that the first matches are the best."""

    def __init__(self, catalogue: Catalogue) -> None:
        count = len(catalogue.ids)
        popularity = catalogue.popularity
        self._order = (
            np.argsort(-popularity, kind="stable") if popularity is not None else np.arange(count)
        ).astype(np.int32)
        lines = [
            f"{catalogue.external_id(item)} {catalogue.name(item) or ''}".replace("\n", " ")
            for item in self._order.tolist()
        ]
        # Folded and encoded as one text: a million small ones would take seconds.
        self._text = ("\n" + "\n".join(lines) + "\n").casefold().encode("utf-8", "replace")
        ends = np.frombuffer(self._text, np.uint8) == ord("\n")
        self._starts = np.flatnonzero(ends)  # of a line, and the end of the last one

    def find(self, words: str, most: int) -> list[int]:
        wanted = " ".join(words.split()).casefold().encode("utf-8", "replace")
        found: list[int] = []
        place = self._text.find(wanted) if wanted and len(self._order) else -1
        while place >= 0 and len(found) < most:
            line = int(np.searchsorted(self._starts, place, side="right")) - 1
            found.append(int(self._order[line]))
            place = self._text.find(wanted, int(self._starts[line + 1]))
        return found


class _reading:  # noqa: N801 # reads like the verb that it is
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


def _rows(path: Path) -> Iterator[tuple[ExternalId, str]]:
    """Return (id, name) of every row of a CSV with a header, or of a Parquet file."""
    with _reading(path):
        rows = _parquet_rows(path) if path.suffix == ".parquet" else _csv_rows(path)
        yield from rows


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
