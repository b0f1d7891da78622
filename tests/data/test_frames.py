from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from recprune import Columns, InputError, Interactions, interactions_from_columns, read_interactions

ROWS = {
    "user_id": [2, 1, 2, 1, 2],
    "item_id": ["b", "a", "a", "c", "b"],
    "timestamp": [40, 30, 20, 10, 40],
    "rating": [5.0, 1.0, 3.5, 4.0, 5.0],
}


def _as_pandas() -> Any:
    return pd.DataFrame(ROWS, index=[9, 8, 7, 6, 5])


TABLES: dict[str, Callable[[], Any]] = {
    "pandas": _as_pandas,
    "polars": lambda: pl.DataFrame(ROWS),
    "lazy": lambda: pl.LazyFrame(ROWS),
    "arrow": lambda: pa.table(ROWS),
    "record batch": lambda: pa.table(ROWS).to_batches()[0],
    "mapping": lambda: ROWS,
    "categories": lambda: _as_pandas().astype({"item_id": "category"}),
    "floats": lambda: _as_pandas().astype({"user_id": "float64"}),
    "integer categories": lambda: _as_pandas().astype({"user_id": "category"}),
}


def rows_of(log: Interactions) -> list[tuple[Any, Any, int]]:
    return [
        (log.user_ids[user], log.item_ids[int(log.items[row])], int(log.times[row]))
        for user in range(log.num_users)
        for row in range(log.offsets[user], log.offsets[user + 1])
    ]


@pytest.fixture
def expected(tmp_path: Path) -> list[tuple[Any, Any, int]]:
    path = tmp_path / "log.csv"
    pl.DataFrame(ROWS).write_csv(path)
    return rows_of(read_interactions(path, min_interactions=1))


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_read_as_a_file_of_the_same_rows(
    kind: str, expected: list[tuple[Any, Any, int]]
) -> None:
    assert rows_of(read_interactions(TABLES[kind](), min_interactions=1)) == expected
    assert expected[0] == (1, "c", 10_000_000)


def test_columns_are_named_as_for_files() -> None:
    frame = _as_pandas().rename(columns={"user_id": 0, "item_id": 1, "timestamp": 2})
    columns = Columns(user="0", item="1", time="2")
    assert read_interactions(frame, columns=columns, min_interactions=1).num_interactions == 5
    with pytest.raises(InputError, match="the log: no column 'wen'; its columns are 0, 1, 2"):
        read_interactions(frame, columns=Columns(user="0", item="1", time="wen"))
    with pytest.raises(InputError, match="log_format, delimiter and header are of files"):
        read_interactions(frame, delimiter=",")


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(InputError, match="the log is an int, expected a path, a frame of pandas"):
        read_interactions(17)
    with pytest.raises(InputError, match="the log is a Series, expected"):
        read_interactions(pd.Series([1, 2]))
    mixed = pd.DataFrame({"user_id": [1, "b"], "item_id": [1, 2], "timestamp": [1, 2]})
    with pytest.raises(InputError, match="the log cannot be read: .*user_id"):
        read_interactions(mixed)


def test_a_bad_row_is_named_by_its_position_not_by_a_label() -> None:
    frame = pd.DataFrame(
        {"user_id": [1, 1, 2], "item_id": [1.0, 2.0, np.nan], "timestamp": [1, 2, 3]},
        index=[30, 20, 10],
    )
    with pytest.raises(InputError, match="the log: row 3: the item is missing"):
        read_interactions(frame)
    left = read_interactions(frame, min_interactions=1, on_bad_rows="skip")
    assert left.num_interactions == 2
    times = pd.Series([1.0, np.nan, 3.0], index=[30, 20, 10])
    with pytest.raises(InputError, match=r"times\[1\] is "):
        interactions_from_columns(frame["user_id"], frame["user_id"], times)


def test_floats_that_are_integers_are_these_integers(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user,item,time\n17.0,a,1\n4.0,b,2\n")
    log = read_interactions(path, min_interactions=1)
    assert [log.user_ids[place] for place in range(2)] == [4, 17]
    path.write_text("user,item,time\n17.0,a,1\n4.5,b,2\n")
    log = read_interactions(path, min_interactions=1)
    assert [log.user_ids[place] for place in range(2)] == ["17.0", "4.5"]  # names of something
    users = np.array([17.0, 4.0])
    again = interactions_from_columns(users, ["a", "b"], [1, 2], min_interactions=1)
    assert [again.user_ids[place] for place in range(2)] == [4, 17]
    series = pl.Series(["x", "y"], dtype=pl.Categorical)
    assert interactions_from_columns(series, [1, 2], [1, 2], min_interactions=1).user_ids[1] == "y"


def test_the_order_of_rows_stands_for_times(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "1.csv").write_text("user,item\n1,9\n2,8\n1,7\n")
    (parts / "2.csv").write_text("user,item\n2,6\n1,5\n")
    with pytest.raises(InputError, match="which column is the time.*--time-format order"):
        read_interactions(parts)
    log = read_interactions(parts, time_format="order", min_interactions=1)
    assert rows_of(log) == [(1, 9, 0), (1, 7, 2), (1, 5, 4), (2, 8, 1), (2, 6, 3)]
    with pytest.raises(InputError, match="the column 'when': which has times"):
        read_interactions(parts, time_format="order", columns=Columns(time="when"))


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_low_ratings_are_left_out_and_counted(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"log.{kind}"
    frame = pl.DataFrame(ROWS)
    writers: dict[str, Callable[[Path], None]] = {
        "csv": frame.write_csv,
        "parquet": frame.write_parquet,
        "jsonl": frame.write_ndjson,
    }
    writers[kind](path)
    log = read_interactions(path, min_rating=4, min_interactions=1)
    assert log.left_out.low_ratings == 2
    assert [row[:2] for row in rows_of(log)] == [(1, "c"), (2, "b"), (2, "b")]
    with pytest.raises(InputError, match="no usable row, 5 rated below 6"):
        read_interactions(path, min_rating=6)
    with pytest.raises(InputError, match="which column is the rating"):
        read_interactions(frame.drop("rating"), min_rating=4)
    with pytest.raises(InputError, match="goes with a lowest rating"):
        read_interactions(path, columns=Columns(rating="rating"))


def test_a_rating_that_is_no_number_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user,item,time,stars\n1,2,3,5\n1,2,4,good\n")
    with pytest.raises(InputError, match="line 3: the rating is not a number: '1,2,4,good'"):
        read_interactions(path, min_rating=1)
    assert read_interactions(path, min_interactions=2).num_interactions == 2  # not asked for


def test_duplicates_are_counted_and_left_out_where_that_is_asked_for() -> None:
    log = read_interactions(ROWS, min_interactions=1)
    assert (log.count_duplicates(), log.left_out.duplicates) == (1, 0)
    once = read_interactions(ROWS, min_interactions=1, deduplicate=True)
    assert (once.count_duplicates(), once.left_out.duplicates) == (0, 1)
    assert rows_of(once) == sorted(set(rows_of(log)), key=rows_of(log).index)


def test_duplicates_are_those_of_a_plain_count() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        users, items, times = (rng.integers(0, high, 60) for high in (4, 5, 6))
        log = interactions_from_columns(
            users, items, times, time_format="seconds", min_interactions=1
        )
        rows = list(zip(users.tolist(), items.tolist(), times.tolist(), strict=True))
        assert log.count_duplicates() == len(rows) - len(set(rows))


def test_ids_beyond_int64_are_strings_in_columns_too() -> None:
    users = np.array([2**64 - 1, 5], np.uint64)
    for items in (np.array([2**63, 2], np.uint64), [2**63, 2]):
        log = interactions_from_columns(
            users, items, [3, 4], time_format="seconds", min_interactions=1
        )
        assert rows_of(log) == [
            ("18446744073709551615", "9223372036854775808", 3_000_000),
            ("5", "2", 4_000_000),
        ]
        table = {"user_id": users, "item_id": items, "timestamp": [3, 4]}
        assert rows_of(read_interactions(table, min_interactions=1)) == rows_of(log)
    small = interactions_from_columns(
        users // 2**62, [1, 2], [3, 4], time_format="seconds", min_interactions=1
    )
    assert list(small.user_ids.take([0, 1])) == [0, 3]


def test_a_plan_that_cannot_be_carried_out_is_refused() -> None:
    with pytest.raises(InputError, match='the log cannot be read: unable to find column "nope"'):
        read_interactions(pl.LazyFrame(ROWS).with_columns(pl.col("nope")))
