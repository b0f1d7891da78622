from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recprune import Holdout, InputError, leave_one_out, no_holdout, temporal_holdout
from tests.conftest import log_of


def training_of(holdout: Holdout) -> list[list[object]]:
    ids = holdout.log.item_ids
    return [
        [ids[item] for item in holdout.train.history(user).tolist()]
        for user in range(holdout.log.num_users)
    ]


def targets_of(holdout: Holdout, name: str) -> dict[object, tuple[list[object], object]]:
    """Return user → (history, target), in external ids."""
    targets, log = getattr(holdout, name), holdout.log
    return {
        log.user_ids[int(targets.users[t])]: (
            [log.item_ids[item] for item in holdout.history(targets, t).tolist()],
            log.item_ids[int(targets.items[t])],
        )
        for t in range(len(targets))
    }


#     time  1  2  3  4  5  6  7  8 | 9  10
#     ann   a     b     c          | d  e
#     bob      a     b     c  d  e |
#     cat                          | (nothing before: see below)
TEN = [
    ("ann", "a", 1), ("bob", "a", 2), ("ann", "b", 3), ("bob", "b", 4), ("ann", "c", 5),
    ("bob", "c", 6), ("bob", "d", 7), ("bob", "e", 8), ("ann", "d", 9), ("cat", "z", 10),
]  # fmt: skip


def test_temporal_by_hand() -> None:
    holdout = temporal_holdout(log_of(*TEN), train_fraction=0.8, validation_users=0)
    assert holdout.cut_time == 8_000_000
    assert training_of(holdout) == [["a", "b", "c"], ["a", "b", "c", "d", "e"], []]
    assert targets_of(holdout, "test") == {"ann": (["a", "b", "c"], "d")}
    assert [holdout.log.user_ids[user] for user in holdout.dropped_users] == ["cat"]
    assert holdout.train.num_items == 6  # z is only seen after the cut, and stays


def test_without_a_holdout_everything_trains() -> None:
    holdout = no_holdout(log_of(*TEN))
    assert training_of(holdout) == [["a", "b", "c", "d"], ["a", "b", "c", "d", "e"], ["z"]]
    assert len(holdout.validation) == len(holdout.test) == len(holdout.dropped_users) == 0
    assert holdout.cut_time is None


def test_validation_items_leave_training_but_not_the_test_history() -> None:
    holdout = temporal_holdout(log_of(*TEN), train_fraction=0.8, validation_users=2)
    assert training_of(holdout) == [["a", "b"], ["a", "b", "c", "d"], []]
    assert targets_of(holdout, "validation") == {
        "ann": (["a", "b"], "c"),
        "bob": (["a", "b", "c", "d"], "e"),
    }
    assert targets_of(holdout, "test") == {"ann": (["a", "b", "c"], "d")}


def test_the_last_sitting_can_be_asked_for_from_its_beginning() -> None:
    """Ann's last sitting before the cut is b and c, bob has a single one, cat's begins with her."""
    rows = [
        ("ann", "a", 1), ("bob", "a", 2), ("bob", "b", 2), ("ann", "b", 3), ("ann", "c", 3),
        ("cat", "x", 3), ("cat", "y", 4), ("cat", "z", 4), ("cat", "a", 4), ("ann", "d", 9),
    ]  # fmt: skip
    holdout = temporal_holdout(
        log_of(*rows), train_fraction=0.9, validation_users=9, validation="sitting"
    )
    assert training_of(holdout) == [["a"], ["a", "b"], ["x"]]
    assert targets_of(holdout, "validation") == {"ann": (["a"], "b"), "cat": (["x"], "y")}
    assert targets_of(holdout, "test") == {"ann": (["a", "b", "c"], "d")}


#     time  1  2  3  4  5  6  7  8  9 | 10 11 12 | 13 14 15 16
#     ann   a     b     c             |    d  e  | x
#     bob      a     b        c       |          |    y  z        nothing between the cuts
#     cat                  a          | b        |
#     dan                             |       a  |          z     nothing before the earlier one
#     eve                        a  bc|          |
TWICE_CUT = [
    ("ann", "a", 1), ("bob", "a", 2), ("ann", "b", 3), ("bob", "b", 4), ("ann", "c", 5),
    ("cat", "a", 6), ("bob", "c", 7), ("eve", "a", 8), ("eve", "b", 9), ("eve", "c", 9),
    ("cat", "b", 10), ("ann", "d", 11), ("ann", "e", 12), ("dan", "a", 12),
    ("ann", "x", 13), ("bob", "y", 14), ("bob", "z", 15), ("dan", "z", 16),
]  # fmt: skip


def test_validation_users_can_be_asked_at_an_earlier_cut() -> None:
    """0.7 of 18 are 13, all of which happened by time 12; 0.7 of the 14 until then are 10."""
    holdout = temporal_holdout(
        log_of(*TWICE_CUT), train_fraction=0.7, validation_users=9, validation="temporal"
    )
    assert holdout.cut_time == 12_000_000
    abc = ["a", "b", "c"]
    assert targets_of(holdout, "validation") == {"ann": (abc, "d"), "cat": (["a"], "b")}
    # What the two had between the cuts trains no model; all else does.
    assert training_of(holdout) == [abc, abc, ["a"], ["a"], abc]
    assert targets_of(holdout, "test") == {
        "ann": ([*abc, "d", "e"], "x"),
        "bob": (abc, "y"),
        "dan": (["a"], "z"),
    }
    assert len(holdout.dropped_users) == 0


def test_who_is_asked_at_an_earlier_cut_has_history_enough_by_then() -> None:
    """Cat had two items before the cut, but only one before the earlier one."""
    found = {}
    for least in (2, 3, 4):
        found[least] = temporal_holdout(
            log_of(*TWICE_CUT),
            train_fraction=0.7,
            validation_users=9,
            validation="temporal",
            min_history=least,
        )
    assert list(targets_of(found[2], "validation")) == ["ann"]
    assert training_of(found[2])[2:4] == [["a", "b"], []]  # dan is dropped
    assert list(targets_of(found[3], "validation")) == ["ann"]
    assert training_of(found[3])[2] == []
    assert len(found[4].validation) == 0
    assert training_of(found[4])[0] == ["a", "b", "c", "d", "e"]


def test_everything_at_one_time_has_no_earlier_cut() -> None:
    log = log_of(("u", "a", 1), ("u", "b", 1), ("u", "c", 2))
    holdout = temporal_holdout(log, train_fraction=0.6, validation="temporal")
    assert len(holdout.validation) == 0
    assert training_of(holdout) == [["a", "b"]]
    assert targets_of(holdout, "test") == {"u": (["a", "b"], "c")}


def test_shares_are_decimal_fractions() -> None:
    log = log_of(*[("u", n, n) for n in range(100)])
    for percent in (7, 14, 28, 29, 55, 56, 57, 90, 99):
        holdout = temporal_holdout(log, train_fraction=percent / 100, validation_users=0)
        assert holdout.train.num_interactions == percent


def test_equal_times_are_never_torn_apart() -> None:
    # Four of eight at time 2: a cut at 50 % cannot stop in the midst of them.
    rows = [
        ("u", "a", 1),
        ("v", "a", 1),
        *[("u", item, 2) for item in "bcde"],
        ("u", "f", 3),
        ("v", "f", 3),
    ]
    for fraction in (0.3, 0.5, 0.75):
        holdout = temporal_holdout(log_of(*rows), train_fraction=fraction, validation_users=0)
        assert holdout.cut_time == 2_000_000
        assert training_of(holdout) == [["a", "b", "c", "d", "e"], ["a"]]
        assert targets_of(holdout, "test")["u"][1] == "f"


def test_everything_at_one_time_is_all_training() -> None:
    holdout = temporal_holdout(log_of(("u", "a", 1), ("u", "b", 1)), validation_users=5)
    assert len(holdout.test) == 0
    assert targets_of(holdout, "validation") == {"u": (["a"], "b")}


def test_users_with_too_little_history_can_be_dropped() -> None:
    log = log_of(*TEN)
    holdout = temporal_holdout(log, train_fraction=0.8, validation_users=0, min_history=4)
    assert training_of(holdout) == [[], ["a", "b", "c", "d", "e"], []]
    assert len(holdout.test) == 0
    assert len(holdout.dropped_users) == 2


def test_leave_one_out_by_hand() -> None:
    holdout = leave_one_out(log_of(*TEN), validation_users=1, seed=0)
    assert holdout.cut_time is None
    assert targets_of(holdout, "test") == {
        "ann": (["a", "b", "c"], "d"),
        "bob": (["a", "b", "c", "d"], "e"),
    }
    assert [holdout.log.user_ids[user] for user in holdout.dropped_users] == ["cat"]
    (validated,) = targets_of(holdout, "validation").items()
    assert validated in [("ann", (["a", "b"], "c")), ("bob", (["a", "b", "c"], "d"))]


LOGS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=80
)


@given(LOGS, st.floats(0.05, 0.95), st.integers(0, 6), st.integers(1, 3), st.integers(0, 3))
def test_nothing_leaks_from_the_future_and_nothing_is_lost(
    rows: list[tuple[int, int, int]], fraction: float, validation: int, min_history: int, seed: int
) -> None:
    log = log_of(*rows)
    holdout = temporal_holdout(
        log,
        train_fraction=fraction,
        validation_users=validation,
        min_history=min_history,
        seed=seed,
    )
    cut, train, test = holdout.cut_time, holdout.train, holdout.test
    assert cut is not None
    before = int((log.times <= cut).sum())
    share = Fraction(repr(fraction)) * log.num_interactions
    assert before >= share
    assert int((log.times < cut).sum()) < share
    assert train.num_interactions == 0 or train.times.max() <= cut
    assert len(holdout.validation) <= validation
    dropped = set(holdout.dropped_users.tolist())
    validated = dict(
        zip(holdout.validation.users.tolist(), range(len(holdout.validation)), strict=True)
    )
    tested = dict(zip(test.users.tolist(), range(len(test)), strict=True))
    for user in range(log.num_users):
        rows_of_user = slice(log.offsets[user], log.offsets[user + 1])
        items, times = log.items[rows_of_user], log.times[rows_of_user]
        past, future = items[times <= cut].tolist(), items[times > cut].tolist()
        training = train.history(user).tolist()
        if len(past) < min_history:
            assert user in dropped
            assert training == []
            assert user not in tested
            continue
        if user in validated:
            target = validated[user]
            assert training == past[:-1] == holdout.history(holdout.validation, target).tolist()
            assert holdout.validation.items[target] == past[-1]
            assert training
        else:
            assert training == past
        assert (user in tested) == bool(future)
        if future:
            assert test.items[tested[user]] == future[0]
            assert holdout.history(test, tested[user]).tolist() == past


@given(LOGS, st.floats(0.05, 0.95), st.integers(0, 6), st.integers(1, 3), st.integers(0, 3))
def test_users_that_are_asked_at_an_earlier_cut_train_on_nothing_after_it(
    rows: list[tuple[int, int, int]], fraction: float, validation: int, min_history: int, seed: int
) -> None:
    log = log_of(*rows)
    last, holdout = (
        temporal_holdout(
            log,
            train_fraction=fraction,
            validation_users=validation,
            validation=kind,
            min_history=min_history,
            seed=seed,
        )
        for kind in ("last", "temporal")
    )
    cut, share = holdout.cut_time, Fraction(repr(fraction))
    assert cut is not None
    assert targets_of(holdout, "test") == targets_of(last, "test")
    assert holdout.dropped_users.tolist() == last.dropped_users.tolist()
    past_times = sorted(log.times[log.times <= cut].tolist())
    earlier = next(
        time
        for time in past_times
        if sum(other <= time for other in past_times) >= share * len(past_times)
    )
    asked = {}
    for user in set(range(log.num_users)) - set(holdout.dropped_users.tolist()):
        rows_of_user = slice(log.offsets[user], log.offsets[user + 1])
        items, times = log.items[rows_of_user], log.times[rows_of_user]
        known = items[times <= earlier].tolist()
        between = items[(times > earlier) & (times <= cut)].tolist()
        if between and len(known) >= min_history:
            asked[user] = (known, between[0])
        if user not in holdout.validation.users:
            assert holdout.train.history(user).tolist() == known + between
    assert len(holdout.validation) == min(validation, len(asked))
    for target, user in enumerate(holdout.validation.users.tolist()):
        history = holdout.history(holdout.validation, target).tolist()
        assert (history, holdout.validation.items[target]) == asked[user]
        assert holdout.train.history(user).tolist() == history


def test_the_seed_chooses_the_validation_users() -> None:
    log = log_of(*[(user, item, item) for user in range(50) for item in range(5)])
    chosen = [
        leave_one_out(log, validation_users=10, seed=seed).validation.users.tolist()
        for seed in (1, 1, 2)
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_fraction": 1.0}, "train_fraction is 1.0"),
        ({"train_fraction": float("nan")}, "train_fraction is nan"),
        ({"validation_users": -1}, "validation_users is -1"),
        ({"min_history": 0}, "min_history is 0"),
        ({"validation": "first"}, "validation is 'first', expected one of last, sitting, temporal"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        temporal_holdout(log_of(*TEN), **arguments)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(InputError, match="seed is -1"):
        temporal_holdout(log_of(*TEN), seed=-1)


def test_an_empty_log_is_refused() -> None:
    empty = log_of((1, 2, 3)).select(np.array([False]))
    with pytest.raises(InputError, match="no interactions"):
        temporal_holdout(empty)
