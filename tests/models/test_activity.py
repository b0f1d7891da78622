"""How often anyone had an item lately: counted by hand, and never from what comes later."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recprune import assign_random
from recprune.models.activity import ACTIVITY_BUCKETS, Activity, measure_activity
from recprune.models.repeats import FIRST_ACTIVITY, own_items
from recprune.preparation.prepared import MICROSECONDS, Prepared
from recprune.types import StorageError, Timeline
from tests.preparation.test_prepared import prepared_of

NUM_ITEMS = 9


def log_with_times(seed: int = 0, num_users: int = 30) -> Prepared:
    """Histories of random items; many events share a second."""
    rng = np.random.default_rng(seed)
    histories = [
        rng.integers(0, NUM_ITEMS - 1, rng.integers(3, 40)).tolist() for _ in range(num_users)
    ]
    codes = assign_random(NUM_ITEMS, num_splits=2, num_sub_items=4).codes
    prepared = prepared_of(histories, codes, 4)
    times = rng.integers(1_000, 1_400, len(prepared.items)) * MICROSECONDS
    for first, last in zip(prepared.offsets[:-1], prepared.offsets[1:], strict=True):
        times[first:last] = np.sort(times[first:last])
    return replace(prepared, times=times)


def bucket_by_hand(weights: list[float]) -> int:
    if not weights:
        return 0
    return min(max(math.floor(2 * math.log2(sum(weights))) + 17, 1), ACTIVITY_BUCKETS - 1)


@pytest.mark.parametrize("seed", range(3))
def test_events_of_ended_periods_count_and_older_ones_weigh_less(seed: int) -> None:
    prepared = log_with_times(seed)
    assert prepared.times is not None
    activity = measure_activity(prepared)
    trains = prepared.in_training()
    items, seconds = prepared.items[trains], prepared.times[trains] // MICROSECONDS
    ends = activity.ends.tolist()
    assert ends == sorted(set(ends))
    assert ends[-1] == seconds.max()
    assert 40 < len(ends) <= 64  # some end in the same second
    periods = np.searchsorted(ends, seconds)  # an event at the end of a period is in it
    passed = [int((seconds <= end).sum()) for end in ends]
    everything = np.arange(NUM_ITEMS)
    for now in (999, 1_000, 1_100, *ends, *(end + 1 for end in ends), 2_000):
        ended = sum(end < now for end in ends)
        expected = [
            bucket_by_hand(
                [
                    math.exp(-8 * (passed[ended - 1] - passed[period]) / len(items))
                    for period in periods[items == item]
                    if period < ended
                ]
            )
            for item in range(NUM_ITEMS)
        ]
        assert activity.at(everything, now).tolist() == expected
    assert activity.at(everything, None).tolist() == expected  # what is served
    assert activity.latest().at(everything, 5).tolist() == expected
    assert expected[-1] == 0  # nobody had the last item
    early = activity.until(1_200)
    assert early.at(everything, None).tolist() == activity.at(everything, 1_200).tolist()
    assert early.at(everything, 1_050).tolist() == activity.at(everything, 1_050).tolist()


def test_what_is_held_out_does_not_count() -> None:
    prepared = log_with_times()
    held_out = ~prepared.in_training()
    other = prepared.items.copy()
    other[held_out] = NUM_ITEMS - 1
    before, after = measure_activity(prepared), measure_activity(replace(prepared, items=other))
    assert np.array_equal(before.buckets, after.buckets)


def test_without_times_nothing_is_known() -> None:
    activity = measure_activity(replace(log_with_times(), times=None))
    assert not activity.at(np.arange(NUM_ITEMS), None).any()
    assert not activity.at(np.arange(NUM_ITEMS), 10**9).any()


@pytest.mark.parametrize("moments", [1, 7])
def test_times_that_hardly_tell_events_apart_say_nothing(moments: int) -> None:
    """What is served would else be unlike all that training looked up."""
    prepared = log_with_times()
    assert prepared.times is not None
    coarse = np.sort(np.arange(len(prepared.items)) % moments) * MICROSECONDS
    activity = measure_activity(replace(prepared, times=coarse))
    assert len(activity.ends) == 0
    assert not activity.at(np.arange(NUM_ITEMS), None).any()


def test_many_events_and_old_ones_stay_within_the_buckets() -> None:
    codes = assign_random(3, num_splits=2, num_sub_items=2).codes
    prepared = prepared_of([[1] + [0] * 40_000], codes, 2)
    seconds = np.concatenate([[0], np.arange(40_000)])
    activity = measure_activity(replace(prepared, times=seconds * MICROSECONDS))
    assert activity.at(np.arange(3), None).tolist() == [ACTIVITY_BUCKETS - 1, 1, 0]


def test_the_repeat_head_looks_it_up_for_own_items() -> None:
    activity = Activity(np.array([10]), np.array([[0] * 5, [1, 2, 3, 4, 5]], np.uint8))
    history = np.array([3, 1, 3], np.int32)
    for now, expected in ((10, [0, 0]), (11, [4, 2])):
        own = own_items(history, 10, Timeline(np.array([1, 2, 3]), now), activity)
        found = dict(zip(own.items.tolist(), own.buckets[:, 4].tolist(), strict=True))
        assert found == {3: FIRST_ACTIVITY + expected[0], 1: FIRST_ACTIVITY + expected[1]}
    assert own_items(history, 10).buckets.shape == (2, 4)
    without_times = own_items(history, 10, None, activity)  # then the last that is known
    assert sorted(without_times.buckets[:, 4].tolist()) == [FIRST_ACTIVITY + 2, FIRST_ACTIVITY + 4]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(4, np.uint8), "activity is uint8[4], expected uint8[5]"),
        (np.zeros((1, 5), np.uint8), "activity is uint8[1, 5], expected uint8[5]"),
        (np.zeros(5, np.int64), "activity is int64[5], expected uint8[5]"),
        (np.array([0, 1, 33, 2, 3], np.uint8), "activity has a bucket 33, expected less than 33"),
    ],
)
def test_what_a_file_says_is_checked(array: Any, message: str) -> None:
    with pytest.raises(StorageError) as refused:
        Activity.from_array(array, 5)
    assert str(refused.value) == message
