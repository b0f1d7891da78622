"""The interaction log as every later package sees it: compact, frozen, sorted by user and time."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from recprune._native import sort_log
from recprune.data.identifiers import ExternalId, ExternalIds, integers_or_texts, number_ids
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
    from recprune.data.frames import LogSource
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
    low_ratings: int = 0  # rows that were rated lower than asked for
    duplicates: int = 0  # rows that say again what another one says
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

    def count_duplicates(self) -> int:
        """Return how many interactions say what another one says: user, item and time."""
        starts_time = np.diff(self.times, prepend=-1) != 0
        starts_time[self.offsets[:-1][self.lengths > 0]] = True
        at_one_time = np.cumsum(starts_time)
        rows = at_one_time * np.int64(max(1, self.num_items)) + self.items
        rows.sort()
        return int(np.count_nonzero(rows[1:] == rows[:-1]))

    def select(self, rows: NDArray[np.bool_]) -> Interactions:
        """Return the log with only the interactions where `rows` is true; all ids stay."""
        kept = np.zeros(self.num_interactions + 1, np.int64)
        np.cumsum(rows, out=kept[1:])
        return Interactions(
            kept[self.offsets], self.items[rows], self.times[rows], self.user_ids, self.item_ids
        )

    def with_catalogue(self, item_ids: ExternalIds) -> Interactions:
        """Return the log over a larger catalogue, which has all of its items."""
        places = item_ids.find_all(self.item_ids.take(range(self.num_items)))
        if places.min(initial=0) < 0:
            missing = self.item_ids[int(places.argmin())]
            raise InputError(f"the catalogue does not have the item {missing!r} of the log")
        return replace(self, items=places.astype(np.int32)[self.items], item_ids=item_ids)


def read_interactions(
    log: LogSource,
    *,
    log_format: LogFormat = "auto",
    columns: Columns | None = None,
    time_format: TimeFormat = "auto",
    delimiter: str | None = None,
    header: bool = True,
    min_interactions: int = DEFAULT_MIN_INTERACTIONS,
    on_bad_rows: Literal["error", "skip"] = "error",
    min_rating: float | None = None,
    deduplicate: bool = False,
    progress: Progress = no_progress,
) -> Interactions:
    """Read a log from a file, a folder of parts, or a table in memory.

    CSV, TSV, Parquet and JSON lines are told by their names, `.gz` and `.zst` are unpacked on the
    way. Tables are frames of pandas or polars, tables of Arrow, and mappings of columns. Arguments:

    - `log_format` names a published layout instead: gowalla, tmall or movielens.
    - `columns` says which columns hold user, item and time, as `Columns(user="who", ...)`; those
      not given are detected by their usual names.
    - `time_format` is auto, seconds, milliseconds, microseconds, nanoseconds, iso8601 or yyyymmdd;
      or order, for a log without times whose rows stand in their order.
    - `delimiter` of a text file; by default the one that its first line shows.
    - `header=False` for a text file without column names: they are then called "0", "1", "2" ...
    - `min_interactions`: users with fewer are left out; 5 by default, as in the paper.
    - `on_bad_rows`: "error" raises an `InputError` that names the first bad row, "skip" leaves bad
      rows out and counts them in `left_out`.
    - `min_rating` leaves out rows with a lower rating.
    - `deduplicate` keeps the first of rows with the same user, item and time.
    - `progress` is called with short sentences on where the work stands.
    """
    with needs_extra("data"):
        from recprune.data.readers import read_columns
    if min_rating is not None and not math.isfinite(min_rating):
        raise InputError(f"min_rating is {min_rating}, expected a number")
    place = log if isinstance(log, str | os.PathLike) else "the log"
    rows = read_columns(
        log,
        log_format=log_format,
        columns=columns,
        time_format=time_format,
        delimiter=delimiter,
        header=header,
        on_bad_rows=on_bad_rows,
        min_rating=min_rating,
        progress=progress,
    )
    progress(f"sorting {len(rows.times):,} interactions")
    left_out = LeftOut(rows.bad_rows, rows.low_ratings)
    try:
        return _sorted_log(
            rows.users, rows.items, rows.times, min_interactions, deduplicate, left_out
        )
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def interactions_from_columns(
    users: pl.Series | Sequence[ExternalId] | NDArray[Any],
    items: pl.Series | Sequence[ExternalId] | NDArray[Any],
    times: pl.Series | Sequence[Any] | NDArray[Any],
    *,
    time_format: TimeFormat = "auto",
    min_interactions: int = DEFAULT_MIN_INTERACTIONS,
    deduplicate: bool = False,
) -> Interactions:
    """Build a log from columns: the user, the item and the time of each interaction.

    Columns are anything that polars takes as a series, a data frame's columns among them. Ids are
    integers or strings, categories of these, or floats that are integers; where an integer is
    beyond int64, all are strings. Times are what `read_interactions` reads too, and dates and
    datetimes.
    """
    with needs_extra("data"):
        import polars as pl

        from recprune.data.timestamps import parse_times
    if not len(users) == len(items) == len(times):
        raise InputError(f"{len(users)} users, {len(items)} items and {len(times)} times differ")
    if isinstance(times, np.ndarray) and times.dtype.kind == "M":
        times = times.astype("datetime64[us]")  # polars knows no coarser ones
    given = pl.Series(times, strict=False)
    parsed, expected = parse_times(given, time_format)
    if parsed.has_nulls():
        row = int(parsed.is_null().arg_true()[0])
        raise InputError(f"times[{row}] is {given[row]!r}, expected {expected}")
    return _sorted_log(
        _id_series(users, "users"),
        _id_series(items, "items"),
        parsed.to_numpy(),
        min_interactions,
        deduplicate,
    )


def _sorted_log(
    users: pl.Series,
    items: pl.Series,
    times: Int64Array,
    min_interactions: int,
    deduplicate: bool,
    left_out: LeftOut | None = None,
) -> Interactions:
    """Leave out what is said twice and short histories, number the ids and sort."""
    import polars as pl

    left_out = left_out or LeftOut()
    if min_interactions < 1:
        raise InputError(f"min_interactions is {min_interactions}, expected at least 1")
    if deduplicate:
        rows = pl.DataFrame({"user": users, "item": items, "time": times})
        first = rows.unique(keep="first", maintain_order=True)
        left_out = replace(left_out, duplicates=len(rows) - len(first))
        users, items, times = first["user"], first["item"], first["time"].to_numpy()
    user_ids, user_of_row = number_ids(users)
    history_lengths = np.bincount(user_of_row, minlength=len(user_ids))
    long_enough = history_lengths >= min_interactions
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
        left_out = replace(
            left_out,
            short_users=int((~long_enough).sum()),
            short_interactions=len(times) - len(user_of_row),
        )
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
    if series.dtype in (pl.Categorical, pl.Enum):
        series = series.cast(pl.String)
    if series.dtype.is_integer():
        series = integers_or_texts(series)
    elif series.dtype.is_float():
        whole = series.cast(pl.Int64, strict=False)
        broken = (whole != series).fill_null(True)
        if broken.any():
            row = int(broken.arg_true()[0])
            raise InputError(f"{name}[{row}] is {series[row]}, expected an integer or a string")
        series = whole
    if series.dtype not in (pl.Int64, pl.String) or series.has_nulls():
        raise InputError(f"{name} must be integers or strings without gaps, not {series.dtype}")
    return series
