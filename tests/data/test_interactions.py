from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recprune import (
    InputError,
    IntegerIds,
    Interactions,
    interactions_from_columns,
    log_statistics,
)
from tests.conftest import log_of

ROWS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=80
)


@given(ROWS, st.integers(1, 6))
def test_the_log_is_the_input_sorted_stably_without_short_users(
    rows: list[tuple[int, int, int]], min_interactions: int
) -> None:
    counts = np.bincount([user for user, _, _ in rows])
    kept = [row for row in rows if counts[row[0]] >= min_interactions]
    columns = (
        [row[0] for row in rows],
        [row[1] for row in rows],
        np.array([row[2] for row in rows]),
    )
    if not kept:
        with pytest.raises(InputError, match=f"the longest history has {counts.max()}"):
            interactions_from_columns(
                *columns, time_format="seconds", min_interactions=min_interactions
            )
        return
    log = interactions_from_columns(
        *columns, time_format="seconds", min_interactions=min_interactions
    )
    kept.sort(key=lambda row: (row[0], row[2]))
    flat = [
        (log.user_ids[user], log.item_ids[item], time // 1_000_000)
        for user in range(log.num_users)
        for item, time in zip(
            log.history(user).tolist(),
            log.times[log.offsets[user] : log.offsets[user + 1]].tolist(),
            strict=True,
        )
    ]
    assert flat == kept
    assert log.num_items == len({item for _, item, _ in kept})
    assert log.left_out.short_interactions == len(rows) - len(kept)
    assert log.left_out.short_users == len(np.flatnonzero(counts)) - log.num_users


def test_internal_ids_do_not_depend_on_the_order_of_rows() -> None:
    rows = [("b", "x", 3), ("a", "y", 1), ("a", "x", 2)]
    one, other = log_of(*rows), log_of(*reversed(rows))
    for log in (one, other):
        assert [log.user_ids[k] for k in range(2)] == ["a", "b"]
        assert log.history(0).tolist() == [1, 0]
    assert np.array_equal(one.items, other.items)


def test_types_are_compact_and_frozen() -> None:
    log = log_of((1, 2, 3), (1, 5, 4))
    assert [str(a.dtype) for a in (log.offsets, log.items, log.times)] == [
        "int64",
        "int32",
        "int64",
    ]
    with pytest.raises(ValueError, match="read-only"):
        log.items[0] = 1
    with pytest.raises(AttributeError):
        log.items = log.items  # type: ignore[misc]


def test_select_keeps_all_ids() -> None:
    log = log_of((1, 10, 1), (1, 20, 2), (2, 20, 1))
    selected = log.select(np.array([False, True, False]))
    assert (selected.num_users, selected.num_items) == (2, 2)
    assert selected.offsets.tolist() == [0, 1, 1]
    assert selected.items.tolist() == [1]


def with_arrays(offsets: list[int], items: list[int], times: list[int]) -> Interactions:
    return Interactions(
        np.array(offsets, np.int64),
        np.array(items, np.int32),
        np.array(times, np.int64),
        IntegerIds(np.array([4, 5])),
        IntegerIds(np.array([7, 8, 9])),
    )


def test_inconsistent_arrays_are_refused() -> None:
    assert with_arrays([0, 1, 2], [0, 2], [5, 4]).num_interactions == 2
    for broken, message in [
        (([0, 2], [0, 2], [5, 5]), "offsets must start at 0 and have 3 entries"),
        (([0, 3, 2], [0, 2], [5, 5]), "offsets must ascend"),
        (([0, 1, 3], [0, 2], [5, 5]), "offsets must ascend to the number of items, 2"),
        (([0, 1, 2], [0, 3], [5, 5]), "items must be internal ids from 0 to 2"),
        (([0, 1, 2], [0, -1], [5, 5]), "items must be internal ids"),
        (([0, 1, 2], [0, 1], [5, 5, 5]), "2 items but 3 times"),
        (([0, 2, 2], [0, 1], [5, 4]), "times must ascend within"),
    ]:
        with pytest.raises(InputError, match=message):
            with_arrays(*broken)
    with pytest.raises(InputError, match="items is int64"):
        Interactions(
            np.array([0, 1]),
            np.array([0]),
            np.array([0]),
            IntegerIds(np.array([1])),
            IntegerIds(np.array([1])),
        )
    with pytest.raises(InputError, match="user 2 of 2"):
        with_arrays([0, 1, 2], [0, 2], [5, 4]).history(2)


def test_columns_that_do_not_fit_are_refused() -> None:
    times = [0, 0]
    with pytest.raises(InputError, match="2 users, 1 items and 2 times differ"):
        interactions_from_columns([1, 2], [1], times)
    with pytest.raises(InputError, match=r"users\[0\] is 1.5, expected an integer or a string"):
        interactions_from_columns(np.array([1.5, 2.0]), [1, 2], times)
    with pytest.raises(InputError, match="items must be integers or strings without gaps"):
        interactions_from_columns([1, 2], ["a", None], times)  # type: ignore[list-item]
    with pytest.raises(InputError, match="min_interactions is 0"):
        interactions_from_columns([1, 2], [1, 2], times, min_interactions=0)
    with pytest.raises(InputError, match="users must be all integers or all strings"):
        interactions_from_columns([1, "a"], [1, 2], times)
    with pytest.raises(InputError, match=r"times\[1\] is nan, expected unix seconds"):
        interactions_from_columns([1, 2], [1, 2], [1.5, float("nan")])


@pytest.mark.parametrize(
    "times",
    [
        [1577836800, 1577836801],
        np.array(["2020-01-01T00:00:00", "2020-01-01T00:00:01"], "datetime64[s]"),
        np.array(["2020-01-01T00:00:00", "2020-01-01T00:00:01"], "datetime64[ns]"),
        np.array([1577836800, 1577836801]) * 10**9,
        pl.Series(["2020-01-01", "2020-01-01T00:00:01Z"]),
    ],
)
def test_columns_take_times_of_every_kind(times: Any) -> None:
    log = interactions_from_columns(["a", "a"], [1, 2], times, min_interactions=1)
    assert log.times.tolist() == [1577836800000000, 1577836801000000]


def test_short_users_are_left_out_of_columns_of_any_kind() -> None:
    for times in (list(range(6)), pl.Series(range(6)), np.arange(6)):
        log = interactions_from_columns(["a"] * 5 + ["b"], ["x"] * 6, times)
        assert log.num_users == 1
        assert repr(log) == "Interactions(1 users, 1 items, 5 interactions)"


def test_statistics_by_hand() -> None:
    # User 1 has items a b a a, user 2 has a, user 3 has c: popularity a 4, b 1, c 1.
    log = log_of((1, "a", 0), (1, "b", 1), (1, "a", 2), (1, "a", 3), (2, "a", 4), (3, "c", 60))
    statistics = log_statistics(log)
    assert (statistics.users, statistics.items, statistics.interactions) == (3, 3, 6)
    assert statistics.average_length == 2.0
    assert statistics.median_length == 1.0
    assert statistics.longest == 4
    assert statistics.repeat_share == pytest.approx(2 / 6)
    assert statistics.top_1_percent_share == pytest.approx(4 / 6)
    assert statistics.single_items_share == pytest.approx(2 / 3)
    # Mean absolute difference of (1, 1, 4) over twice the mean: (0+3+3+0+3+3)/9 / (2 · 2).
    assert statistics.gini == pytest.approx(1 / 3)
    assert statistics.first_time == "1970-01-01T00:00:00+00:00"
    assert statistics.last_time == "1970-01-01T00:01:00+00:00"


def test_statistics_need_an_interaction() -> None:
    log = log_of((1, 2, 3)).select(np.array([False]))
    with pytest.raises(InputError, match="no interactions"):
        log_statistics(log)
