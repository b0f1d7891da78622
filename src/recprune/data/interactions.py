"""The interaction log as every later package sees it: compact, frozen, sorted by user and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from recprune._native import sort_log
from recprune.data.identifiers import ExternalId, ExternalIds, number_ids
from recprune.types import (
    Columns,
    InputError,
    Int32Array,
    Int64Array,
    Progress,
    frozen,
    needs_extra,
    no_progress,
)

if TYPE_CHECKING:
    import polars as pl

    from recprune.data.formats import LogFormat
    from recprune.data.timestamps import TimeFormat

DEFAULT_MIN_INTERACTIONS = 5


@dataclass(frozen=True)
class BadRows:
    """Rows that were left out for one reason."""

    reason: str
    count: int
    first: str  # where the first of them stands, and its text


@dataclass(frozen=True)
class LeftOut:
    """What did not make it from the input into the log, and why."""

    bad_rows: tuple[BadRows, ...] = ()
    short_users: int = 0  # users with fewer than `min_interactions`
    short_interactions: int = 0  # and how many interactions went with them


@dataclass(frozen=True, eq=False)
class Interactions:
    """Who had what, when: histories one after the other, each oldest first.

    The history of user u is `items[offsets[u]:offsets[u + 1]]`. Equal times keep their input order;
    an item consumed twice stands there twice. Users and items are internal ids 0 … n−1, `user_ids`
    and `item_ids` give the caller's. Users may be without history and items without interactions
    (in the training part of a hold-out), so that ids stay the same from package to package.
    """

    offsets: Int64Array  # [num_users + 1]
    items: Int32Array  # [num_interactions]
    times: Int64Array  # [num_interactions], microseconds since 1970
    user_ids: ExternalIds
    item_ids: ExternalIds
    left_out: LeftOut = field(default_factory=LeftOut)

    def __post_init__(self) -> None:
        for name, dtype in (("offsets", np.int64), ("items", np.int32), ("times", np.int64)):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise InputError(
                    f"{name} is {array.dtype}[{array.ndim}-D], expected {dtype.__name__}[1-D]"
                )
            frozen(array)
        if len(self.items) != len(self.times):
            raise InputError(f"{len(self.items)} items but {len(self.times)} times")
        if len(self.offsets) != self.num_users + 1 or self.offsets[0] != 0:
            raise InputError(f"offsets must start at 0 and have {self.num_users + 1} entries")
        if self.offsets[-1] != len(self.items) or np.any(np.diff(self.offsets) < 0):
            raise InputError(f"offsets must ascend to the number of items, {len(self.items)}")
        if len(self.items) and not (0 <= self.items.min() and self.items.max() < self.num_items):
            raise InputError(f"items must be internal ids from 0 to {self.num_items - 1}")
        backwards = np.flatnonzero(self.times[1:] < self.times[:-1]) + 1
        starts_history = np.zeros(len(self.items) + 1, np.bool_)
        starts_history[self.offsets] = True
        if not starts_history[backwards].all():
            raise InputError("times must ascend within each user's history")

    def __repr__(self) -> str:
        return (
            f"Interactions({self.num_users:,} users, {self.num_items:,} items, "
            f"{self.num_interactions:,} interactions)"
        )

    @property
    def num_users(self) -> int:
        """Number of users, those without history included."""
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        """Catalogue size |I|: all items, those without interactions included."""
        return len(self.item_ids)

    @property
    def num_interactions(self) -> int:
        """Number of interactions, repeated consumption included."""
        return len(self.items)

    @property
    def lengths(self) -> Int64Array:
        """Number of interactions of every user."""
        return np.diff(self.offsets)

    def history(self, user: int) -> Int32Array:
        """Return the items of one user, oldest first."""
        if not 0 <= user < self.num_users:
            raise InputError(f"user {user} of {self.num_users}")
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    def select(self, rows: NDArray[np.bool_]) -> Interactions:
        """Return the log with only the interactions where `rows` is true; all ids stay."""
        kept = np.zeros(self.num_interactions + 1, np.int64)
        np.cumsum(rows, out=kept[1:])
        return Interactions(
            kept[self.offsets], self.items[rows], self.times[rows], self.user_ids, self.item_ids
        )


def read_interactions(
    path: str | Path,
    *,
    log_format: LogFormat = "auto",
    columns: Columns | None = None,
    time_format: TimeFormat = "auto",
    delimiter: str | None = None,
    header: bool = True,
    min_interactions: int = DEFAULT_MIN_INTERACTIONS,
    on_bad_rows: Literal["error", "skip"] = "error",
    progress: Progress = no_progress,
) -> Interactions:
    """Read a log from a file, or from a folder of parts.

    CSV, TSV, Parquet and JSON lines are told by their names, `.gz` and `.zst` are unpacked on the
    way. Arguments:

    - `log_format` names a published layout instead: gowalla, tmall or movielens.
    - `columns` says which columns hold user, item and time, as `Columns(user="who", ...)`; those
      not given are detected by their usual names.
    - `time_format` is auto, seconds, milliseconds, microseconds, nanoseconds, iso8601 or yyyymmdd.
    - `delimiter` of a text file; by default the one that its first line shows.
    - `header=False` for a text file without column names: they are then called "0", "1", "2" ...
    - `min_interactions`: users with fewer are left out; 5 by default, as in the paper.
    - `on_bad_rows`: "error" raises an `InputError` that names the first bad row, "skip" leaves bad
      rows out and counts them in `left_out`.
    - `progress` is called with short sentences on where the work stands.
    """
    with needs_extra("data"):
        from recprune.data.readers import read_columns
    log = read_columns(
        path,
        log_format=log_format,
        columns=columns,
        time_format=time_format,
        delimiter=delimiter,
        header=header,
        on_bad_rows=on_bad_rows,
        progress=progress,
    )
    progress(f"sorting {len(log.times):,} interactions")
    try:
        return _sorted_log(log.users, log.items, log.times, min_interactions, log.bad_rows)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def interactions_from_columns(
    users: pl.Series | Sequence[ExternalId] | NDArray[Any],
    items: pl.Series | Sequence[ExternalId] | NDArray[Any],
    times: pl.Series | Sequence[Any] | NDArray[Any],
    *,
    time_format: TimeFormat = "auto",
    min_interactions: int = DEFAULT_MIN_INTERACTIONS,
) -> Interactions:
    """Build a log from columns: the user, the item and the time of each interaction.

    Columns are anything that polars takes as a series, a data frame's columns among them. Ids are
    integers or strings; times are what `read_interactions` reads too, and dates and datetimes.
    """
    with needs_extra("data"):
        import polars as pl

        from recprune.data.timestamps import parse_times
    if not len(users) == len(items) == len(times):
        raise InputError(f"{len(users)} users, {len(items)} items and {len(times)} times differ")
    if isinstance(times, np.ndarray) and times.dtype.kind == "M":
        times = times.astype("datetime64[us]")  # polars knows no coarser ones
    parsed, expected = parse_times(pl.Series(times, strict=False), time_format)
    if parsed.has_nulls():
        row = int(parsed.is_null().arg_true()[0])
        raise InputError(f"times[{row}] is {times[row]!r}, expected {expected}")
    return _sorted_log(
        _id_series(users, "users"), _id_series(items, "items"), parsed.to_numpy(), min_interactions
    )


def _sorted_log(
    users: pl.Series,
    items: pl.Series,
    times: Int64Array,
    min_interactions: int,
    bad_rows: tuple[BadRows, ...] = (),
) -> Interactions:
    """Leave out short histories, number the ids and sort."""
    import polars as pl

    if min_interactions < 1:
        raise InputError(f"min_interactions is {min_interactions}, expected at least 1")
    user_ids, user_of_row = number_ids(users)
    history_lengths = np.bincount(user_of_row, minlength=len(user_ids))
    long_enough = history_lengths >= min_interactions
    left_out = LeftOut(bad_rows)
    if not long_enough.all():
        if not long_enough.any():
            raise InputError(
                f"no user has {min_interactions} interactions or more; "
                f"the longest history has {history_lengths.max()}"
            )
        kept = long_enough[user_of_row]
        renumbered = np.cumsum(long_enough, dtype=np.int32) - np.int32(1)
        user_of_row = renumbered[user_of_row[kept]]
        user_ids = user_ids.select(long_enough)
        items = items.filter(pl.Series(kept))
        left_out = LeftOut(bad_rows, int((~long_enough).sum()), len(times) - len(user_of_row))
        times = times[kept]
    item_ids, item_of_row = number_ids(items)
    offsets, sorted_items, sorted_times = sort_log(
        user_of_row, item_of_row, np.ascontiguousarray(times, np.int64), len(user_ids)
    )
    return Interactions(offsets, sorted_items, sorted_times, user_ids, item_ids, left_out)


def _id_series(values: Any, name: str) -> pl.Series:
    import polars as pl

    try:
        series = pl.Series(values)
    except (TypeError, pl.exceptions.PolarsError):
        raise InputError(f"{name} must be all integers or all strings") from None
    if series.dtype.is_integer():
        series = series.cast(pl.Int64)
    if series.dtype not in (pl.Int64, pl.String) or series.has_nulls():
        raise InputError(f"{name} must be integers or strings without gaps, not {series.dtype}")
    return series
