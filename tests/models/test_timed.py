"""The encoder that reads times: what it sees of them, and what it cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recprune.models.ranking import encode_histories
from recprune.models.timed import TimedSASRec, bucketized_ages
from recprune.models.timelines import (
    AGE_BOUNDS,
    UNKNOWN_AGE,
    UNKNOWN_TIME,
    age_buckets,
    event_times,
    gap_and_age_buckets,
)
from recprune.types import Int64Array, Timeline
from tests.models.test_models import LENGTH, NUM_ITEMS, model_of, some_histories

torch.set_num_threads(1)

HEADS = pytest.mark.parametrize("num_heads", [1, 2])


def some_times(seed: int = 0) -> Int64Array:
    """Return times of events with gaps of seconds to months, and of a request, [LENGTH + 1]."""
    rng = np.random.default_rng(seed)
    return 10**9 + np.cumsum(np.exp(rng.uniform(1, 16, LENGTH + 1)).astype(np.int64))


def states_of(model: TimedSASRec, items: Tensor, moments: Int64Array) -> Tensor:
    """Return all states of one history, [length, d]; the last moment is that of the request."""
    times = torch.from_numpy(np.stack([moments[:-1], moments[1:]])).unsqueeze(1)
    with torch.no_grad():
        states: Tensor = model(items, torch.tensor([items.shape[1]]), times)[0]
    return states


def timed(num_heads: int = 1, num_blocks: int = 2) -> TimedSASRec:
    model = model_of("timed", num_heads=num_heads, num_blocks=num_blocks)
    assert isinstance(model, TimedSASRec)
    return model


# Buckets -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(10**10), 10**10), min_size=1))
def test_buckets_are_the_same_in_numpy_and_torch(ages: list[int]) -> None:
    expected = [sum(age >= bound for bound in AGE_BOUNDS.tolist()) for age in ages]
    assert age_buckets(np.array(ages)).tolist() == expected
    asked, bounds = torch.tensor(10**9), torch.from_numpy(AGE_BOUNDS)
    assert bucketized_ages(asked, asked - torch.tensor(ages), bounds).tolist() == expected


def test_an_age_is_not_known_where_the_request_is_not() -> None:
    asked, happened = torch.tensor([UNKNOWN_TIME, 50]), torch.tensor([UNKNOWN_TIME, 49])
    found = bucketized_ages(asked, happened, torch.from_numpy(AGE_BOUNDS))
    assert found.tolist() == [UNKNOWN_AGE, 1]


def test_the_time_after_an_event_is_that_of_the_next_and_at_last_that_of_the_request() -> None:
    timelines = [Timeline(np.array([10, 30, 31]), 100), None, Timeline(np.array([7]), 9)]
    happened, asked = event_times(timelines, 2).tolist()
    assert happened == [[30, 31], [UNKNOWN_TIME] * 2, [7, UNKNOWN_TIME]]
    assert asked == [[31, 100], [UNKNOWN_TIME] * 2, [9, UNKNOWN_TIME]]
    gaps, ages = gap_and_age_buckets(timelines[:2], 3).tolist()
    assert gaps == [age_buckets(np.array([20, 1, 69])).tolist(), [UNKNOWN_AGE] * 3]
    assert ages == [age_buckets(np.array([90, 70, 69])).tolist(), [UNKNOWN_AGE] * 3]


# States ------------------------------------------------------------------------------------------


@HEADS
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_no_state_depends_on_a_later_event_or_time(num_heads: int, num_blocks: int) -> None:
    model = timed(num_heads, num_blocks=num_blocks)
    items = torch.from_numpy(some_histories(LENGTH)[0]).long().unsqueeze(0)
    moments = some_times()
    states = states_of(model, items, moments)
    for place in range(LENGTH):
        changed = items.clone()
        changed[0, place] = (changed[0, place] + 1) % NUM_ITEMS
        found = states_of(model, changed, moments)
        assert torch.equal(found[:place], states[:place])
        assert ((found[place:] - states[place:]).abs().amax(1) > 1e-5).all()
    for place in range(1, LENGTH + 1):
        later = moments.copy()
        later[place:] += 10**8
        found = states_of(model, items, later)
        # The prediction before an event is made at its time, and knows that alone.
        assert torch.equal(found[: place - 1], states[: place - 1])
        assert ((found[place - 1 :] - states[place - 1 :]).abs().amax(1) > 1e-4).all()


@HEADS
def test_only_what_lies_between_moments_counts(num_heads: int) -> None:
    model = timed(num_heads)
    items = torch.from_numpy(some_histories(LENGTH)[0]).long().unsqueeze(0)
    moments = some_times()
    assert torch.equal(
        states_of(model, items, moments), states_of(model, items, moments + 123_456_789)
    )


@HEADS
def test_the_last_block_weighs_events_by_their_ages(num_heads: int) -> None:
    """One block, written out: softmax over products and the numbers of ages."""
    model = timed(num_heads, num_blocks=1)
    moments = some_times()
    with torch.no_grad():
        model.gaps.zero_()
        items = torch.from_numpy(some_histories(LENGTH)[0]).long().unsqueeze(0)
        before = states_of(model, items, moments)[-1]
        old = age_buckets(moments[-1] - moments[:-1])
        assert old[0] != old[-1]
        model.ages[:, old[0]] += 100.0  # nothing else is looked at
        found = states_of(model, items, moments)[-1]
        first = [at for at in range(LENGTH) if old[at] == old[0]]
        others = items.clone()
        rest = [at for at in range(len(old) - 1) if at not in first]
        others[0, rest] = (others[0, rest] + 7) % NUM_ITEMS
        again = states_of(model, others, moments)[-1]
    assert not torch.allclose(found, before, atol=1e-3)
    torch.testing.assert_close(found, again, rtol=0.0, atol=1e-5)


def test_when_it_is_asked_changes_the_embedding() -> None:
    model = timed()
    (history,) = some_histories(5)
    times = some_times()[:5]
    found = [
        encode_histories(model, LENGTH, [history], timelines=[timeline])
        for timeline in (
            None,
            Timeline(times, int(times[-1])),
            Timeline(times, int(times[-1]) + 60),
            Timeline(times, int(times[-1]) + 10**7),
        )
    ]
    for place, one in enumerate(found):
        for other in found[:place]:
            assert not torch.allclose(one, other, atol=1e-3)


def test_histories_with_and_without_times_may_be_mixed() -> None:
    model = timed()
    histories = some_histories(3, LENGTH, 30, 7)
    rng = np.random.default_rng(1)
    dated = [Timeline(np.sort(rng.integers(0, 10**9, len(one))), 10**9) for one in histories]
    timelines = [dated[0], None, dated[2], dated[3]]
    together = encode_histories(model, LENGTH, histories, timelines=timelines)
    for row, (history, timeline) in enumerate(zip(histories, timelines, strict=True)):
        alone = encode_histories(model, LENGTH, [history], timelines=[timeline])
        torch.testing.assert_close(together[row], alone[0], rtol=0.0, atol=4e-6)
    # Of a long history, the last events with their times.
    cut = Timeline(dated[2].times[-LENGTH:], 10**9)
    expected = encode_histories(model, LENGTH, [histories[2][-LENGTH:]], timelines=[cut])
    torch.testing.assert_close(together[2], expected[0], rtol=0.0, atol=4e-6)
