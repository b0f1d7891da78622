"""The C++ core against slow Python twins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from recprune import InputError, build_posting_lists, items_sharing_most
from recprune._native import add_rows, sort_log
from recprune.types import CodeArray


@given(
    codes=st.one_of(
        npst.arrays(np.uint8, npst.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=40)),
        npst.arrays(
            np.uint16,
            npst.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=40),
            elements=st.integers(0, 300),
        ),
    ).filter(lambda codes: codes.shape[1] > 0),
    threads=st.integers(1, 4),
)
def test_posting_lists_hold_each_item_once_per_split(codes: CodeArray, threads: int) -> None:
    num_sub_items = 301
    lists = build_posting_lists(codes, num_sub_items, threads=threads)
    for split in range(codes.shape[1]):
        for sub_item in range(num_sub_items):
            expected = np.flatnonzero(codes[:, split] == sub_item)
            assert np.array_equal(lists.posting_list(split, sub_item), expected)


def test_posting_lists_take_codes_that_are_not_contiguous() -> None:
    codes = np.arange(24, dtype=np.uint8).reshape(6, 4)
    lists = build_posting_lists(codes[:, ::2], 24)
    assert lists.posting_list(1, 10).tolist() == [2]


def test_a_code_without_posting_list_is_named() -> None:
    codes = np.zeros((5, 3), np.uint8)
    codes[4, 1] = 9
    with pytest.raises(InputError, match="split 1, row 4 has value 9, expected 0 to 8"):
        build_posting_lists(codes, 9, threads=2)


@pytest.mark.parametrize(
    "codes", [np.zeros(3, np.uint8), np.zeros((3, 2), np.int64), np.zeros((3, 0), np.uint8)]
)
def test_codes_of_a_wrong_shape_or_type_are_refused(codes: CodeArray) -> None:
    with pytest.raises(InputError, match="codes"):
        build_posting_lists(codes, 4)


def test_neighbours_by_hand() -> None:
    codes = np.array([[0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 1, 1], [1, 1, 1]], np.uint8)
    lists = build_posting_lists(codes, 2)
    items, shared = items_sharing_most(lists, codes, 0, 10)
    assert items.tolist() == [1, 2, 3]  # item 4 shares nothing
    assert shared.tolist() == [2, 2, 1]
    with pytest.raises(InputError, match="item 5 of 5"):
        items_sharing_most(lists, codes, 5, 1)
    with pytest.raises(InputError, match="k is -1"):
        items_sharing_most(lists, codes, 0, -1)
    with pytest.raises(InputError, match="split 0, sub-item id 2: expected splits 0 to 2"):
        lists.posting_list(0, 2)


@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), max_size=60),
)
def test_the_order_of_a_log_is_python_s_stable_sort(rows: list[tuple[int, int]]) -> None:
    users = np.array([user for user, _ in rows], np.int32)
    times = np.array([time for _, time in rows], np.int64)
    offsets, order, sorted_times = sort_log(users, np.arange(len(rows), dtype=np.int32), times, 6)
    assert order.tolist() == sorted(range(len(rows)), key=lambda row: rows[row])
    assert np.array_equal(sorted_times, times[order])
    assert np.array_equal(np.diff(offsets), np.bincount(users, minlength=6))


def test_sorting_refuses_users_that_do_not_exist() -> None:
    items, times = np.zeros(2, np.int32), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="row 1 has value -1, expected 0 to 0"):
        sort_log(np.array([0, -1], np.int32), items, times, 1)
    with pytest.raises(ValueError, match="differ in length"):
        sort_log(np.zeros(3, np.int32), items, times, 1)


@pytest.mark.parametrize("width", [1, 15, 16, 40])
@pytest.mark.parametrize("count", [1, 9])
def test_rows_are_added_in_order(width: int, count: int) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((30, width), np.float32)
    places = rng.integers(0, 30, (7, count))
    sums = np.full((7, width), np.nan, np.float32)
    add_rows(table, places, sums)
    expected = np.zeros((7, width), np.float32)
    for column in places.T:
        expected += table[column]
    assert np.array_equal(sums, expected)


def test_places_without_a_row_and_other_shapes_are_refused() -> None:
    table, sums = np.zeros((3, 2), np.float32), np.zeros((1, 2), np.float32)
    for place in (-1, 3, 2**62):
        with pytest.raises(ValueError, match=f"place {place}, expected 0 to 2"):
            add_rows(table, np.array([[0, place]]), sums)
    for places in (np.zeros((1, 0), np.int64), np.zeros((2, 1), np.int64)):
        with pytest.raises(ValueError, match="do not fit"):
            add_rows(table, places, sums)
    with pytest.raises(ValueError, match="do not fit"):
        add_rows(table, np.zeros((1, 1), np.int64), np.zeros((1, 3), np.float32))
