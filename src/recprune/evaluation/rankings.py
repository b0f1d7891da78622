"""Rankings as files: what any other program recommends, to be judged beside our own, and back.

A row is one item that is recommended to one user, in external ids, with its rank or its score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import ExternalIds, coerce_ids
from recprune.storage import writing_file
from recprune.types import Float64Array, InputError, Int64Array, StorageError, needs_extra

with needs_extra("data"):
    import polars as pl

    from recprune.data.content import read_frame
    from recprune.data.formats import find_column

_RUN = "run"  # the column that tells several rankings in one file apart
_ROW = "number of the row"  # in the file, from 0


@dataclass(frozen=True, eq=False)
class ReadRanking:
    """What a file recommends to some users."""

    ids: Int64Array  # [users, k], best first, −1 where there are fewer
    missing: Int64Array  # the users without a row, by their places
    shorter: int  # users with a row, but with fewer than k
    others: int  # rows of users that were not asked for


def read_ranking(
    path: str | Path,
    k: int,
    users: NDArray[np.integer],
    user_ids: ExternalIds,
    item_ids: ExternalIds,
    *,
    run: str | None = None,
) -> ReadRanking:
    """Read the first k items of each of `users` from Parquet, CSV, TSV or JSON lines.

    The file has a user and an item column and either `rank`, whose smallest is best, or `score`,
    whose largest is best, ties by item id; where it has both, `rank` decides. Of a file with
    several runs, told apart by the column `run`, the one called `run` is read. Users of the log
    that are not asked for are passed over; users and items that the log does not have are errors.
    """
    frame = _of_run(path, read_frame(path).with_row_index(_ROW), run)
    where, names = Path(path), frame.columns[1:]
    user_column = find_column(where, names, "user", None)
    item_column = find_column(where, names, "item", None)
    order = next((name for name in ("rank", "score") if name in names), None)
    if order is None:
        raise InputError(f"{path}: has the columns {', '.join(names)}; expected rank or score")
    found_users = _find(path, frame, user_column, user_ids, "user")
    items = _find(path, frame, item_column, item_ids, "item")
    values = _numbers(path, frame, order)
    place_of_user = np.full(len(user_ids), -1, np.int64)
    place_of_user[users] = np.arange(len(users))
    places = place_of_user[found_users]
    asked = np.flatnonzero(places >= 0)
    if not len(asked):
        raise InputError(f"{path}: none of its {len(frame):,} rows is of a test user")
    by_rank = order == "rank"
    # User by user, best first, ties by item.
    keys = (items[asked], values[asked] if by_rank else -values[asked], places[asked])
    rows = asked[np.lexsort(keys)]
    _refuse_twice(path, frame, rows, places, items, (user_column, item_column), "item")
    if by_rank:
        _refuse_twice(path, frame, rows, places, values, (user_column, order), "rank")
    counts = np.bincount(places[rows], minlength=len(users))
    rank = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = rank < k
    ids = np.full((len(users), k), -1, np.int64)
    ids[places[rows[first]], rank[first]] = items[rows[first]]
    shorter = int(np.count_nonzero((counts > 0) & (counts < k)))
    return ReadRanking(ids, np.flatnonzero(counts == 0), shorter, len(frame) - len(asked))


def write_rankings(
    path: str | Path,
    rankings: Mapping[str, Int64Array],
    users: NDArray[np.integer],
    user_ids: ExternalIds,
    item_ids: ExternalIds,
) -> None:
    """Write the rankings of several runs over the same users, for `read_ranking`, as Parquet."""
    names = user_ids.take(users.tolist())
    parts = []
    for run, ids in rankings.items():
        rows, ranks = np.nonzero(ids >= 0)
        columns = {
            _RUN: pl.repeat(run, len(rows), eager=True),
            "user_id": pl.Series(names).gather(rows),
            "item_id": pl.Series(item_ids.take(ids[rows, ranks].tolist())),
            "rank": pl.Series(ranks + 1, dtype=pl.Int32),
        }
        parts.append(pl.DataFrame(columns))
    try:
        with writing_file(path) as temporary:
            pl.concat(parts).write_parquet(temporary)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from None


def _of_run(path: str | Path, frame: pl.DataFrame, run: str | None) -> pl.DataFrame:
    """Return the rows of one run. Of a file with one run it is that, whatever it is called."""
    if _RUN not in frame.columns:
        return frame
    runs = frame[_RUN].cast(pl.String)
    there = runs.drop_nulls().unique(maintain_order=True).to_list()
    if len(there) <= 1:
        return frame
    if run not in there:
        raise InputError(f"{path}: has no run {run!r}; its runs are {', '.join(there)}")
    return frame.filter(runs == run)


def _find(
    path: str | Path, frame: pl.DataFrame, column: str, ids: ExternalIds, role: str
) -> Int64Array:
    """Return internal ids; what the log does not have is named."""
    given = frame[column]
    if given.null_count():
        row = frame[_ROW][int(given.is_null().arg_true()[0])]
        raise InputError(f"{path}: row {row + 1}: the {role} is missing")
    distinct = given.unique(maintain_order=True)
    found = ids.find_all(coerce_ids(ids, distinct.to_list()))
    unknown = distinct.filter(pl.Series(found < 0))
    if len(unknown):
        row = frame[_ROW][int((given == unknown[0]).arg_true()[0])]
        many = f", as are {len(unknown) - 1:,} others" if len(unknown) > 1 else ""
        raise InputError(
            f"{path}: row {row + 1}: the {role} {unknown[0]!r} is not in the prepared log{many}"
        )
    numbers = pl.DataFrame({"id": distinct, "found": found})
    joined = pl.DataFrame({"id": given}).join(numbers, on="id", how="left", maintain_order="left")
    return joined["found"].to_numpy()


def _numbers(path: str | Path, frame: pl.DataFrame, column: str) -> Float64Array:
    given = frame[column].cast(pl.Float64, strict=False).fill_null(float("nan"))
    values: Float64Array = given.to_numpy()
    wrong = ~np.isfinite(values)
    if wrong.any():
        place = int(wrong.argmax())
        raise InputError(
            f"{path}: row {frame[_ROW][place] + 1}: the {column} is {frame[column][place]!r}, "
            "expected a number"
        )
    return values


def _refuse_twice(
    path: str | Path,
    frame: pl.DataFrame,
    rows: Int64Array,
    places: Int64Array,
    values: NDArray[np.generic],
    columns: tuple[str, str],
    what: str,
) -> None:
    """Refuse two rows of a user with the same value."""
    order = rows[np.lexsort((rows, values[rows], places[rows]))]
    same = (np.diff(places[order]) == 0) & (values[order][1:] == values[order][:-1])
    if same.any():
        first, again = (int(order[same.argmax() + step]) for step in (0, 1))
        user, value = (frame[name][again] for name in columns)
        raise InputError(
            f"{path}: rows {frame[_ROW][first] + 1} and {frame[_ROW][again] + 1} both give the "
            f"user {user!r} the {what} {value!r}"
        )
