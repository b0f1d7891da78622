"""One part of a batch: its rows are read a few at a time, answered, and put in place as one file.

A row without a known item in its history gets the most popular ones, as from
`Recommender.recommend`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recprune.batch.plan import BatchPlan, Piece
from recprune.data.identifiers import ExternalId, IntegerIds
from recprune.recommender.recommender import Recommendations
from recprune.storage import sha256_of, writing_file
from recprune.types import InputError, StorageError

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 512  # read, encoded and searched together: memory stays small, batches full
_READ_BYTES = 1 << 20  # of a column at a time; a row group may be larger than memory
_STAGES = {  # of a batch, and those of `recommend` that they are made of
    "ids": ("look up", "answer"),
    "encode": ("encode",),
    "search": ("filter", "sub-item scores", "search"),
}


@dataclass(frozen=True)
class PartReport:
    """A part that is on disk, and what it took."""

    part: int
    rows: int
    by_popularity: int  # rows without an item of the catalogue in their history
    bytes: int
    sha256: str
    seconds: dict[str, float]  # in each stage: ids, encode, search, io


def part_name(part: int) -> str:
    return f"part-{part:05}.parquet"


def note_name(part: int) -> str:
    """Return the name of the file with a part's checksum, kept until the manifest has them all."""
    return f".part-{part:05}.json"


def noted_sha256(folder: Path, part: int) -> str | None:
    """Return the checksum that a part was written with; None if there is none."""
    try:
        return str(json.loads((folder / note_name(part)).read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finished_part(
    plan: BatchPlan, folder: Path, part: int, expected_sha256: str | None
) -> PartReport | None:
    """Return the report of a part that is on disk as it was written; None: it has to be made."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / part_name(part)
    rows = plan.rows_of(part)
    try:
        digest = sha256_of(path)
        if digest != expected_sha256:
            return None
        with pq.ParquetFile(path) as file:
            popular = int(file.read(["by_popularity"]).column(0).to_numpy().sum())
        return PartReport(part, rows, popular, path.stat().st_size, digest, {})
    except (OSError, pa.ArrowException):
        return None


class PartWriter:
    """Answers parts. Loads the recommender once for each process."""

    def __init__(self, plan: BatchPlan, out: str | Path) -> None:
        self._plan = plan
        self._out = Path(out)
        self._stack = ExitStack()  # for as long as the process lives
        self._asked = self._stack.enter_context(plan.opened())
        self._reader = _Reader(plan)
        self._names: dict[ExternalId, str] | None = None
        if plan.names is not None:
            self._names = plan.names.read(self._asked.ids)

    def write(self, part: int) -> PartReport:
        """Answer all rows of a part and put its file in place."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        begun = time.perf_counter()
        seconds = dict.fromkeys(("ids", "encode", "search", "io"), 0.0)
        pieces = self._plan.pieces(part)
        table = pa.Table.from_batches(
            self._answer(rows, seconds) for piece in pieces for rows in self._reader.read(piece)
        )
        path = self._out / part_name(part)
        try:
            with writing_file(path) as temporary:
                pq.write_table(table, temporary)
                digest, size = sha256_of(temporary), temporary.stat().st_size
                # Before the part itself is there: without a checksum it would be made again.
                with writing_file(self._out / note_name(part)) as note:
                    note.write_text(json.dumps({"sha256": digest}), encoding="utf-8")
        except pa.ArrowException as error:
            raise StorageError(f"{path}: cannot be written: {error}") from None
        popular = int(table.column("by_popularity").to_numpy().sum())
        seconds["io"] = time.perf_counter() - begun - sum(seconds.values())  # all the rest
        return PartReport(part, table.num_rows, popular, size, digest, seconds)

    def _answer(self, rows: pa.RecordBatch, seconds: dict[str, float]) -> pa.RecordBatch:
        """Return the answers to some rows; add to `seconds` what they took."""
        settings = self._plan.settings
        recommender, snapshot = self._asked
        histories = _as_lists(rows.column(settings.history_column))
        found = recommender.recommend(
            histories,
            min(settings.k, self._asked.most),  # more would only be padding
            exclude_seen=settings.exclude_seen,
            where=settings.where,
            at_most=settings.at_most,
            times=self._times(rows, histories),
            index=snapshot,
        )
        for stage, names in _STAGES.items():
            seconds[stage] += sum(found.milliseconds.get(name, 0.0) for name in names) / 1000.0
        integers = isinstance(recommender.item_ids, IntegerIds)
        return _as_rows(rows.column(settings.user_column), found, integers, self._names)

    def _times(
        self, rows: pa.RecordBatch, histories: list[list[ExternalId]]
    ) -> list[list[float]] | None:
        """Return when the items of histories were, a moment for each; None where nothing says."""
        column = self._plan.times_column
        if column is None:
            return None
        times = [moments or [] for moments in rows.column(column).to_pylist()]
        for row, (moments, history) in enumerate(zip(times, histories, strict=True)):
            if len(moments) != len(history):
                user = rows.column(self._plan.settings.user_column)[row].as_py()
                raise InputError(
                    f"user {user!r} has {len(moments)} entries in {column!r}, but "
                    f"{len(history)} items"
                )
        return times


def _as_rows(
    users: pa.Array,
    found: Recommendations,
    integers: bool,
    names: Mapping[ExternalId, str] | None,
) -> pa.RecordBatch:
    import pyarrow as pa

    # An answer by popularity is exact: no search has left anything out.
    exact = np.ones(len(users), np.bool_)
    if found.stats is not None:
        exact[~found.by_popularity] = found.stats.exact
    counts = [len(items) for items in found.items]
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    scores = np.concatenate([row[:count] for row, count in zip(found.scores, counts, strict=True)])
    columns = {
        "user_id": users,
        "items": pa.array(found.items, pa.list_(pa.int64() if integers else pa.string())),
        "scores": pa.ListArray.from_arrays(offsets, pa.array(scores, pa.float32())),
        "exact": pa.array(exact),
        "by_popularity": pa.array(found.by_popularity),
        "unknown": pa.array([len(unknown) for unknown in found.unknown], pa.int64()),
    }
    if names is not None:  # null where the file has none
        called = [[names.get(item) for item in items] for items in found.items]
        columns["names"] = pa.array(called, pa.list_(pa.string()))
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


class _Reader:
    """Reads rows. Keeps its place: a later part of the same row group goes on from there."""

    def __init__(self, plan: BatchPlan) -> None:
        self._columns = [plan.settings.user_column, plan.settings.history_column]
        if plan.times_column is not None:
            self._columns.append(plan.times_column)
        self._place: tuple[str, int] | None = None
        self._file: Any = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None  # read, but not asked for yet
        self._row = 0  # of the row group, where `_rest` begins

    def read(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a piece, a few at a time."""
        import pyarrow as pa

        where = f"{piece.file.path}, row group {piece.row_group}"
        try:
            if self._place != (piece.file.path, piece.row_group) or piece.first < self._row:
                self._open(piece)
            end = piece.first + piece.rows
            while self._row < end:
                batch = self._rest if self._rest is not None else next(self._batches, None)
                if batch is None:
                    raise InputError(f"{where}: ends after {self._row} rows, expected more")
                skipped = min(batch.num_rows, max(0, piece.first - self._row))
                taken = min(batch.num_rows - skipped, end - self._row - skipped)
                self._row += skipped + taken
                whole = skipped + taken == batch.num_rows
                self._rest = None if whole else batch.slice(skipped + taken)
                if taken:
                    yield batch.slice(skipped, taken)
        except (OSError, pa.ArrowException) as error:
            self._place = None
            raise InputError(f"{where}: cannot be read: {error}") from None

    def _open(self, piece: Piece) -> None:
        import pyarrow.parquet as pq

        if self._file is not None:
            self._file.close()
        state = Path(piece.file.path).stat()
        if (state.st_size, state.st_mtime_ns) != (piece.file.bytes, piece.file.modified_ns):
            raise InputError(f"{piece.file.path}: was changed after the plan was made")
        self._file = pq.ParquetFile(
            piece.file.path,
            buffer_size=_READ_BYTES,
            pre_buffer=False,
            page_checksum_verification=True,  # where the file has them
        )
        self._batches = self._file.iter_batches(
            _ROWS_AT_ONCE, row_groups=[piece.row_group], columns=self._columns, use_threads=False
        )
        self._rest, self._row = None, 0
        self._place = (piece.file.path, piece.row_group)


def _as_lists(histories: pa.Array) -> list[list[ExternalId]]:
    """Return histories as lists, empty for null. A null, or half a character, is no item's id."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.list_value_length(histories).fill_null(0).to_pylist()
    values = histories.flatten()  # without what a null history may hide
    if isinstance(values, pa.DictionaryArray):
        values = values.dictionary_decode()
    try:
        flat = values.to_pylist()
    except UnicodeDecodeError:
        flat = [
            None if raw is None else raw.decode(errors="surrogateescape")
            for raw in values.cast(pa.large_binary()).to_pylist()
        ]
    ends = list(accumulate(lengths))
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]
