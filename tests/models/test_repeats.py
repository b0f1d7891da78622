"""The repeat head: features of events by brute force, and boosts from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recprune import InputError
from recprune.models.repeats import (
    FAST_BUCKETS,
    FAST_DECAY,
    FIRST_ACTIVITY,
    FIRST_AGE,
    FIRST_FAST,
    FIRST_SLOW,
    NEVER,
    RECENCY_BUCKETS,
    SLOW_BUCKETS,
    SLOW_DECAY,
    RepeatBoosts,
    decayed_bucket,
    event_features,
    own_items,
    recency_bucket,
)
from recprune.models.settings import Settings
from recprune.models.situations import (
    FIRST_GAP,
    FIRST_SITTING,
    FIRST_TENTH,
    NUM_SITUATIONS,
    UNKNOWN_SITTING,
    situation,
)
from recprune.models.timelines import AGE_BOUNDS, UNKNOWN_AGE, age_buckets
from recprune.types import Float32Array, Int64Array, Timeline

EIGHT_SECONDS = AGE_BOUNDS.tolist().index(8) + 1  # the bucket that begins there
HISTORIES = st.lists(st.lists(st.integers(0, 5), max_size=20), max_size=4)


@given(HISTORIES)
def test_features_are_what_they_say(histories: list[list[int]]) -> None:
    items = np.array([item for history in histories for item in history], np.int32)
    offsets = np.cumsum([0, *map(len, histories)])
    features = event_features(items, offsets)
    place = 0
    for history in histories:
        for at, item in enumerate(history):
            later = [after - at for after in range(at + 1, len(history)) if history[after] == item]
            before = [at - earlier for earlier in range(at + 1) if history[earlier] == item]
            assert features.until_next[place] == (later[0] if later else NEVER)
            for decay, found in ((30.0, features.fast), (300.0, features.slow)):
                decayed = sum(math.exp(-ago / decay) for ago in before)
                # A sum in another order may fall just beside a bound.
                near = [4 * math.log2(max(1.0, decayed * (1 + slip))) for slip in (-1e-9, 1e-9)]
                assert found[place] in [int(value) for value in near]
            place += 1


def test_buckets_are_fine_for_small_numbers_and_coarse_for_large_ones() -> None:
    assert recency_bucket(np.arange(9)).tolist() == list(range(9))
    assert recency_bucket(np.array([11, 12, 16, 23, 32])).tolist() == [8, 9, 10, 11, 12]
    assert recency_bucket(np.array([10**9])).tolist() == [RECENCY_BUCKETS - 1]
    assert decayed_bucket(np.array([1.0, 1.18, 1.19, 2.0, 4.0]), 20).tolist() == [0, 0, 1, 4, 8]
    assert decayed_bucket(np.array([1e9]), 20).tolist() == [19]
    # The most that can come about: an item at every event, for ever.
    for decay, most in ((FAST_DECAY, FAST_BUCKETS), (SLOW_DECAY, SLOW_BUCKETS)):
        limit = 1.0 / (1.0 - math.exp(-1.0 / decay))
        assert int(4.0 * math.log2(limit)) == most - 1


def test_every_item_of_a_history_stands_once_with_its_last_event() -> None:
    history = np.array([4, 7, 4, 9, 7, 7], np.int32)
    own = own_items(history, 10)
    assert own.items.tolist() == [4, 9, 7]
    assert own.buckets[:, 0].tolist() == [3, 2, 0]
    slowly = own.buckets[:, 2] - FIRST_SLOW
    assert slowly.tolist() == [3, 0, 6]  # twice, once, three times, and a little forgotten
    # Only what came among the last three events; what is counted is the whole history all the same.
    recent = own_items(history, 3)
    assert recent.items.tolist() == [9, 7]
    assert recent.buckets[1, 2] - FIRST_SLOW == 6
    assert len(own_items(np.empty(0, np.int32), 5).items) == 0


def test_a_boost_is_the_sum_of_the_numbers_of_four_buckets() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((FIRST_ACTIVITY, 4 + NUM_SITUATIONS)).astype(np.float32)
    bias = rng.standard_normal(FIRST_ACTIVITY).astype(np.float32)
    states = rng.standard_normal((2, 4)).astype(np.float32)
    histories = [np.array([3, 3, 5], np.int32), np.array([8], np.int32)]
    boosts = RepeatBoosts(weight, bias, 10, 1.0, not_asked)(states, histories)
    assert [items.tolist() for items, _ in boosts] == [[3, 5], [8]]
    numbers = states.astype(np.float64) @ weight[:, :4].T + bias
    untimed = [FIRST_GAP + UNKNOWN_AGE, UNKNOWN_SITTING]
    # Three events of two items: 6 of 10 are different ones; one event, of an item of its own.
    situations = [[2, FIRST_TENTH + 6, *untimed], [0, FIRST_TENTH + 9, *untimed]]
    numbers += np.stack([weight[:, 4 + np.array(rows)].sum(1) for rows in situations])
    # Item 3 came one event ago, twice: its decayed counts are 1.967 and 1.997.
    known = numbers[0, 1] + numbers[0, FIRST_FAST + 3] + numbers[0, FIRST_SLOW + 3]
    unknown_age = numbers[:, FIRST_AGE + UNKNOWN_AGE]
    assert boosts[0][1][0] == pytest.approx(known + unknown_age[0], abs=1e-5)
    once = numbers[1, 0] + numbers[1, FIRST_FAST] + numbers[1, FIRST_SLOW]
    assert boosts[1][1][0] == pytest.approx(once + unknown_age[1], abs=1e-5)
    assert boosts[0][1].dtype == np.float32
    # Asked nine seconds after its last event: 8 to below 11.
    timeline = Timeline(np.array([0, 100, 105]), 109)
    timed = RepeatBoosts(weight, bias, 10, 1.0, not_asked)(states, histories, [timeline, None])
    # The newest event is four seconds old, and the only one of its time.
    four_seconds = int(age_buckets(np.array([4]))[0])
    known_times = [2, FIRST_TENTH + 6, FIRST_GAP + four_seconds, FIRST_SITTING]
    now = states[0].astype(np.float64) @ weight[:, :4].T + bias
    now += weight[:, 4 + np.array(known_times)].sum(1)
    buckets = [1, FIRST_FAST + 3, FIRST_SLOW + 3, FIRST_AGE + EIGHT_SECONDS]
    assert timed[0][1][0] == pytest.approx(now[buckets].sum(), abs=1e-5)
    assert np.array_equal(timed[1][1], boosts[1][1])


def not_asked(*_: Any) -> Float32Array:
    raise AssertionError("own items keep their scores: nobody has to know them")


def test_own_items_may_keep_a_share_of_their_scores_only() -> None:
    weight = np.zeros((FIRST_ACTIVITY, 2 + NUM_SITUATIONS), np.float32)
    bias = np.full(FIRST_ACTIVITY, 0.25, np.float32)
    scores = np.arange(10, dtype=np.float32)

    def scores_of(embedding: Float32Array, items: Int64Array) -> Float32Array:
        found: Float32Array = scores[items] * embedding[0]
        return found

    states = np.array([[1.0, 0.0], [2.0, 0.0]], np.float32)
    histories = [np.array([3, 3, 5], np.int32), np.array([8], np.int32)]
    for share in (0.0, 0.75):
        boosts = RepeatBoosts(weight, bias, 10, share, scores_of)(states, histories)
        taken = [[3.0, 5.0], [16.0]]
        for (_, values), whole in zip(boosts, taken, strict=True):
            assert values.tolist() == [1.0 - (1 - share) * score for score in whole]


def test_situations_by_hand() -> None:
    # Of the last four events three are of different items, and two are as new as the newest.
    history = np.array([1, 2, 2, 5, 9], np.int32)
    times = np.array([10, 20, 30, 40, 40])
    assert situation(history, 4, Timeline(times, 41)).tolist() == [
        3, FIRST_GAP + 1, FIRST_TENTH + 7, FIRST_SITTING + 1,
    ]  # fmt: skip
    assert situation(history, 4, None).tolist() == [
        3, FIRST_GAP + UNKNOWN_AGE, FIRST_TENTH + 7, UNKNOWN_SITTING,
    ]  # fmt: skip
    # 1, 2, 3, 4–5, 6–7, 8–11: two for every doubling, but the first two.
    found = [situation(np.zeros(count, np.int32), 10**6, None)[0] for count in range(1, 10)]
    assert found == [0, 1, 2, 3, 3, 4, 4, 5, 5]
    most = situation(np.zeros(10**5, np.int32), 10**6, Timeline(np.zeros(10**5, np.int64), 0))
    assert most.tolist() == [FIRST_GAP - 1, FIRST_GAP, FIRST_TENTH, UNKNOWN_SITTING - 1]


def test_ages_double_from_bucket_to_bucket() -> None:
    history = np.arange(7, dtype=np.int32)
    ago = np.array([10**12, 1 << 31, (1 << 31) - 1, 2, 1, 0, -5])  # the last is of the future
    own = own_items(history, 10, Timeline(10**9 - ago, 10**9))
    last = len(AGE_BOUNDS)
    expected = [last, last, last - 1, 2, 1, 0, 0]
    assert (own.buckets[:, 3] - FIRST_AGE).tolist() == expected
    assert own.buckets.max() < FIRST_ACTIVITY


def test_settings_that_repeats_do_not_go_with() -> None:
    with pytest.raises(InputError, match="reads in one direction, not bert4rec"):
        Settings().with_values({"repeats": 9, "architecture": "bert4rec"})
    with pytest.raises(InputError, match="repeats boosts what exclude_seen leaves out"):
        Settings().with_values({"repeats": 9, "exclude_seen": True})
    with pytest.raises(InputError, match="repeats is -1, expected 0 or a positive integer"):
        Settings().with_values({"repeats": -1})
