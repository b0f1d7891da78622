"""Which rows make which part of a batch: divided from the metadata of Parquet files alone.

So every run and every engine has the same parts, however large the input. A plan also says of what
it was made, so that another input, recommender or setting is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from recprune.batch.frozen_catalogue import AskedAt, FrozenCatalogue
from recprune.batch.names_file import NamesFile
from recprune.data.identifiers import IntegerIds
from recprune.recommender.recommender import Recommender
from recprune.recommender.saving import KIND
from recprune.search.checks import MAX_ITEMS, checked_count, checked_k
from recprune.storage import read_manifest
from recprune.types import (
    InputError,
    Json,
    Progress,
    StorageError,
    needs_extra,
    no_progress,
)

if TYPE_CHECKING:
    import pyarrow as pa

_VERSION = 1


@dataclass(frozen=True)
class BatchSettings:
    """What decides the output, beside the recommender and the histories."""

    k: int = 10
    exclude_seen: bool | None = None  # None: unless the model has learnt what is taken again
    user_column: str = "user_id"
    history_column: str = "history"
    rows_per_part: int = 4096
    where: str | None = None  # a condition on the attributes of items
    at_most: tuple[str, int] | None = None  # a column, and how many may have the same value in it
    times_column: str = "times"  # of histories, in seconds since 1970, where all files have it

    def __post_init__(self) -> None:
        for name in ("k", "rows_per_part"):
            if not 1 <= checked_count(getattr(self, name), name) < MAX_ITEMS:
                raise InputError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if self.user_column == self.history_column:
            raise InputError(f"users and histories are both said to be in {self.user_column!r}")

    def to_json(self) -> Json:
        """Return the settings, without filters that are not there: older runs did not know any."""
        settings = json.loads(json.dumps(asdict(self)))  # as it is read back: lists, not tuples
        left_out = {name for name in ("where", "at_most") if settings[name] is None}
        left_out.add("times_column")  # which the plan names, where there is such a column
        return {name: value for name, value in settings.items() if name not in left_out}


@dataclass(frozen=True)
class InputFile:
    """A Parquet file, and what changes if it is replaced by another one."""

    path: str
    bytes: int
    modified_ns: int  # while a run reads it; a copy has another one, and is the same file
    footer_sha256: str
    row_groups: tuple[int, ...]  # rows in each


@dataclass(frozen=True)
class Piece:
    """Some rows of a row group."""

    file: InputFile
    row_group: int
    first: int
    rows: int


@dataclass(frozen=True)
class BatchPlan:
    """Which rows make which part. Part p has the rows from p × rows_per_part on, over all files."""

    recommender: str
    recommender_sha256: str  # of its manifest, which has those of all arrays
    files: tuple[InputFile, ...]
    settings: BatchSettings
    catalogue: FrozenCatalogue | None = None  # None: the items of the training
    times_column: str | None = None  # None: nothing says when the items of histories were
    names: NamesFile | None = None  # of the items, which then stand in the output

    @cached_property
    def _row_groups(self) -> list[tuple[InputFile, int]]:
        return [(file, group) for file in self.files for group in range(len(file.row_groups))]

    @cached_property
    def _starts(self) -> list[int]:
        """The first row of every row group, and the number of all rows."""
        sizes = (rows for file in self.files for rows in file.row_groups)
        return list(accumulate(sizes, initial=0))

    @property
    def num_rows(self) -> int:
        """Rows of all files: one for each user."""
        return self._starts[-1]

    @property
    def num_parts(self) -> int:
        """Parts, all of the same size but the last."""
        return -(-self.num_rows // self.settings.rows_per_part)

    def rows_of(self, part: int) -> int:
        first = part * self.settings.rows_per_part
        return min(self.settings.rows_per_part, self.num_rows - first)

    def pieces(self, part: int) -> list[Piece]:
        """Return where the rows of a part are, in order."""
        row = part * self.settings.rows_per_part
        end = row + self.rows_of(part)
        found = []
        while row < end:
            place = bisect_right(self._starts, row) - 1  # the last to begin here: not an empty one
            file, row_group = self._row_groups[place]
            rows = min(end, self._starts[place + 1]) - row
            found.append(Piece(file, row_group, row - self._starts[place], rows))
            row += rows
        return found

    def to_json(self) -> Json:
        """Return what the output depends on: no paths or times, so that files may be moved."""
        files = [asdict(file) | {"path": Path(file.path).name} for file in self.files]
        for file in files:
            del file["modified_ns"]
        planned = {
            "kind": "batch plan",
            "version": _VERSION,
            "settings": self.settings.to_json(),
            "recommender": self.recommender_sha256,
            "histories": json.loads(json.dumps(files)),  # as it is read back: lists, not tuples
        }
        if self.catalogue is not None:
            planned["catalogue"] = self.catalogue.to_json()
        if self.times_column is not None:
            planned["times"] = self.times_column
        if self.names is not None:
            planned["names"] = self.names.sha256
        return planned

    @contextmanager
    def opened(self) -> Iterator[AskedAt]:
        """Load what is asked, as it was when the plan was made."""
        recommender = Recommender.load(self.recommender)
        # After loading: a folder that was swapped in meanwhile is noticed too.
        if recommender_checksum(self.recommender) != self.recommender_sha256:
            raise StorageError(f"{self.recommender}: another recommender than the plan was made of")
        if self.catalogue is None:
            yield AskedAt(recommender, None)
            return
        with self.catalogue.opened(recommender) as asked:
            yield asked


def make_plan(
    recommender: str | Path,
    histories: str | Path,
    settings: BatchSettings | None = None,
    progress: Progress = no_progress,
    *,
    catalogue: FrozenCatalogue | None = None,
    names: str | Path | None = None,
) -> BatchPlan:
    """Look at the recommender and at the metadata of the histories, and divide the work.

    `progress` is called with files that are not read. With a `catalogue`, the items that were there
    when it was frozen are recommended. `names` is a file of what items are called.
    """
    settings = settings or BatchSettings()
    loaded = Recommender.load(recommender)
    checked_k(settings.k, loaded.index.num_items)
    paths = _parquet_files(Path(histories), progress)
    files = []
    first_type = None
    without_times: list[Path] = []
    for path in paths:
        file, user_type, has_times = _look_at(
            path, settings, isinstance(loaded.item_ids, IntegerIds)
        )
        if not has_times:
            without_times.append(path)
        if first_type not in (None, user_type):
            raise InputError(
                f"{path}: {settings.user_column!r} is {user_type}, in {paths[0]} {first_type}"
            )
        first_type = user_type
        files.append(file)
    if without_times and len(without_times) < len(paths):
        raise InputError(
            f"{without_times[0]}: has no times in {settings.times_column!r}, as other files have: "
            "histories are with or without"
        )
    named = None if names is None else NamesFile.at(names)
    with ExitStack() as stack:
        asked = AskedAt(loaded, None)
        if catalogue is not None:
            asked = stack.enter_context(catalogue.opened(loaded))
        # Refuses what is wrong.
        asked.recommender.recommend(
            [], 1, where=settings.where, at_most=settings.at_most, index=asked.snapshot
        )
        if named is not None and not named.read(asked.ids):
            progress(f"{names}: names no item of the catalogue")
    return BatchPlan(
        os.path.realpath(recommender),
        recommender_checksum(recommender),
        tuple(files),
        settings,
        catalogue,
        None if without_times else settings.times_column,
        named,
    )


def recommender_checksum(folder: str | Path) -> str:
    """Return the checksum of a saved recommender, as its manifest has it."""
    return str(read_manifest(folder, KIND)["sha256"])


def _parquet_files(source: Path, progress: Progress) -> list[Path]:
    """Return the Parquet files to read; refuse, or report, what else may hold histories."""
    if not source.is_dir():
        if not source.exists():
            raise InputError(f"{source}: no such file or folder")
        return [source]
    # Names that begin with a dot or an underscore are of files that are still being written.
    entries = sorted(path for path in source.iterdir() if not path.name.startswith((".", "_")))
    for folder in filter(Path.is_dir, entries):
        below = next(folder.rglob("*.parquet"), None)
        if below is not None:
            raise InputError(
                f"{below}: in a folder below {source}, of which only the files are read: "
                "put them together, or give one folder after the other"
            )
    files = [path for path in entries if not path.is_dir()]
    found = [path for path in files if path.suffix == ".parquet"]
    if not found:
        raise InputError(f"{source}: has no Parquet files (*.parquet)")
    if len(found) < len(files):
        progress(f"{source}: {len(files) - len(found)} files are not named *.parquet: not read")
    return found


def _look_at(
    path: Path, settings: BatchSettings, integers: bool
) -> tuple[InputFile, pa.DataType, bool]:
    """Return a file's sizes, the type of its users, and whether it says when items were.

    What cannot hold histories is refused.
    """
    with needs_extra("data"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        state = path.stat()
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        with path.open("rb") as raw:
            raw.seek(-8, os.SEEK_END)
            length = int.from_bytes(raw.read(4), "little")
            raw.seek(-8 - length, os.SEEK_END)
            footer = hashlib.sha256(raw.read(length)).hexdigest()
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not readable as Parquet: {error}") from None
    for column in (settings.user_column, settings.history_column):
        if schema.get_all_field_indices(column) == []:
            raise InputError(f"{path}: has no column {column!r}, but {', '.join(schema.names)}")
    users = schema.field(settings.user_column).type
    if not (pa.types.is_integer(users) or _is_text(users)):
        raise InputError(f"{path}: {settings.user_column!r} is {users}, expected ids")
    histories = schema.field(settings.history_column).type
    items = histories.value_type if _is_list(histories) else None
    fits = items is not None and (
        pa.types.is_null(items) or (pa.types.is_integer(items) if integers else _is_text(items))
    )
    if not fits:
        expected = "integers" if integers else "strings"
        raise InputError(
            f"{path}: {settings.history_column!r} is {histories}, expected lists of {expected}, "
            "as the ids of the catalogue are"
        )
    where = os.path.realpath(path)
    file = InputFile(where, state.st_size, state.st_mtime_ns, footer, rows)
    return file, users, _has_times(schema, settings.times_column)


def _has_times(schema: pa.Schema, column: str) -> bool:
    import pyarrow as pa

    if schema.get_all_field_indices(column) == []:
        return False
    kind = schema.field(column).type
    return _is_list(kind) and bool(
        pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)
    )


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(plain) or pa.types.is_large_string(plain))


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
