from __future__ import annotations

import math
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recprune import (
    InputError,
    Interactions,
    read_interactions,
    temporal_holdout,
)
from recprune.evaluation.baselines.baseline import Baseline
from recprune.evaluation.baselines.ease import REGULARISATIONS, Ease
from recprune.evaluation.baselines.every_baseline import every_baseline, left_out_baselines
from recprune.evaluation.baselines.fitting import FittingUsers
from recprune.evaluation.baselines.ials import FACTORS, REGULARISATION, WEIGHTS, ImplicitALS
from recprune.evaluation.baselines.item_knn import ItemKNN
from recprune.evaluation.baselines.markov_chain import MarkovChain
from recprune.evaluation.baselines.personal_frequency import PersonalFrequency
from recprune.evaluation.baselines.popularity import Popularity
from recprune.evaluation.baselines.recent_items import RecentItems
from recprune.evaluation.baselines.recent_popularity import RecentPopularity, spans_days
from recprune.types import Int32Array, random_generator
from tests.conftest import log_of


def histories_of(*histories: list[int]) -> list[Int32Array]:
    return [np.array(history, np.int32) for history in histories]


def one(baseline: Baseline, history: list[int], k: int, *, exclude_seen: bool = False) -> list[int]:
    (ids,) = baseline.recommend(histories_of(history), k, exclude_seen=exclude_seen)
    return [int(item) for item in ids]


def log_of_items(*histories: list[int]) -> Interactions:
    """Build a log from histories of integer items; items are numbered in ascending order."""
    rows = [
        (user, item, second)
        for user, history in enumerate(histories)
        for second, item in enumerate(history)
    ]
    log = log_of(*rows)
    assert [log.item_ids[item] for item in range(log.num_items)] == list(range(log.num_items))
    return log


#         counts: 0 three times, 1 four times, 2 and 3 twice, 4 once
TOY = [[0, 1, 0, 1], [0, 1, 2], [3, 1, 2, 3, 4]]


def test_popularity_counts_interactions_and_breaks_ties_by_item() -> None:
    popularity = Popularity(log_of_items(*TOY))
    assert one(popularity, [], 5) == [1, 0, 2, 3, 4]
    assert one(popularity, [1, 2], 3) == [1, 0, 2]
    assert one(popularity, [1, 2, 1], 3, exclude_seen=True) == [0, 3, 4]


def test_lists_are_padded_where_there_are_fewer_items() -> None:
    for baseline in every_baseline(log_of_items(*TOY)):
        assert sorted(one(baseline, [0, 1], 8)) == [-1, -1, -1, 0, 1, 2, 3, 4], baseline.name
        assert one(baseline, [0, 1, 2, 3, 4], 2, exclude_seen=True) == [-1, -1], baseline.name


def test_recent_items_are_the_history_backwards_and_each_item_once() -> None:
    recent = RecentItems(log_of_items(*TOY))
    assert one(recent, [4, 2, 3, 2], 3) == [2, 3, 4]
    assert one(recent, [4, 2, 3, 2], 2) == [2, 3]
    assert one(recent, [4], 4) == [4, 1, 0, 2]  # filled up by popularity
    assert one(recent, [1, 4], 3, exclude_seen=True) == [0, 2, 3]  # nothing but popularity


def test_personal_frequency_by_hand() -> None:
    frequency = PersonalFrequency(log_of_items(*TOY))
    # 2 and 3 twice, 4 once; of 2 and 3 the user had 2 last.
    assert one(frequency, [2, 3, 3, 2, 4], 3) == [2, 3, 4]
    assert one(frequency, [2, 3, 3, 2, 4], 5) == [2, 3, 4, 1, 0]  # filled up by popularity
    assert one(frequency, [3, 2, 4], 3) == [4, 2, 3]  # all once: as recent items
    assert one(frequency, [], 2) == [1, 0]
    assert one(frequency, [1, 4, 4], 3, exclude_seen=True) == [0, 2, 3]  # nothing but popularity


def test_decayed_personal_frequency_by_hand() -> None:
    log = log_of_items(*TOY)
    # Ages of 0 are 2 and 1, of 2 it is 0. With τ = 1, 0 has e⁻² + e⁻¹ = 0.50 against 1; with
    # τ = 10 it has 0.82 + 0.90 = 1.72.
    assert one(PersonalFrequency(log, decay=1), [0, 0, 2], 2) == [2, 0]
    assert one(PersonalFrequency(log, decay=10), [0, 0, 2], 2) == [0, 2]
    # What is so old that it weighs nothing in floating point is still ordered: by recency.
    assert one(PersonalFrequency(log, decay=1), [1, 2, *[0] * 2000], 3) == [0, 2, 1]
    assert one(PersonalFrequency(log, decay=1), [1, 4], 3, exclude_seen=True) == [0, 2, 3]
    for decay in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match="decay is .*, expected more than 0"):
            PersonalFrequency(log, decay=decay)


NOTHING = np.zeros(24, np.bool_)


def repeating(*history: int) -> FittingUsers:
    """Users with one history, whose last item is to be predicted."""
    return FittingUsers.of(log_of_items(*[list(history)] * 6), temporal=False)


def test_the_decay_is_fitted_on_users_of_the_training_log() -> None:
    # 2 weighs 1; 0 weighs e^(−2/3) + e^(−1) = 0.88 with τ = 3, and 1.56 with τ = 10.
    latest = repeating(0, 0, 1, 2, 2)
    assert PersonalFrequency.fitted(latest.train, latest).name == "personal frequency, τ = 3"
    # The favourite is first with 10 and with all that are longer: equals go to the longest.
    favourite = repeating(0, 0, 1, 2, 0)
    assert PersonalFrequency.fitted(favourite.train, favourite).name.endswith("τ = 1000")
    for nobody in (repeating(0), FittingUsers.of(favourite.train.select(NOTHING), temporal=True)):
        assert len(nobody) == 0
        assert PersonalFrequency.fitted(favourite.train, nobody).name.endswith("τ = 30")


def test_fitting_users_are_held_out_from_training_as_the_test_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [(0, 1, 1), (0, 2, 2), (0, 3, 9), (0, 1, 9), (1, 2, 3), (1, 4, 10), (2, 0, 4), (2, 2, 5)]
    log = log_of(*rows, (2, 0, 6), (2, 0, 7))
    last = FittingUsers.of(log, temporal=False)
    assert [history.tolist() for history in last.histories] == [[1, 2, 3], [2], [0, 2, 0]]
    assert last.targets.tolist() == [1, 4, 0]
    assert last.train.num_interactions == 7
    # Nine of ten interactions are over at 9: only one user has anything after that.
    after = FittingUsers.of(log, temporal=True)
    assert [history.tolist() for history in after.histories] == [[2]]
    assert after.targets.tolist() == [4]
    assert after.train.num_interactions == 9
    monkeypatch.setattr("recprune.evaluation.baselines.fitting.MAX_FITTING_USERS", 2)
    assert len(FittingUsers.of(log, temporal=False)) == 2


DAY = 24 * 60 * 60


def log_of_days(*rows: tuple[int, int, float]) -> Interactions:
    """Build a log from (user, item, day) rows."""
    return log_of(*((user, item, round(day * DAY)) for user, item, day in rows))


def test_recent_popularity_by_hand() -> None:
    # 0 three times on the first day, 1 twice on day 9, 2 once on day 10, which is the end.
    log = log_of_days((0, 0, 0), (0, 0, 0), (1, 0, 0.5), (0, 1, 9), (1, 1, 9), (1, 2, 10))
    assert one(RecentPopularity(log, days=1), [], 3) == [2, 0, 1]  # then what is popular
    assert one(RecentPopularity(log, days=2), [], 3) == [1, 2, 0]
    assert one(RecentPopularity(log, days=30), [], 3) == [0, 1, 2]
    assert one(RecentPopularity(log, days=2), [1, 1], 2, exclude_seen=True) == [2, 0]
    assert RecentPopularity(log, days=1).name == "popularity, last day"
    assert RecentPopularity(log).name == "popularity, last 30 days"
    with pytest.raises(InputError, match="days is 0, expected at least 1"):
        RecentPopularity(log, days=0)


def test_a_log_without_days_has_no_recent_popularity() -> None:
    positions = log_of_items(*TOY)
    assert not spans_days(positions)
    assert not spans_days(log_of((0, 0, 5), (1, 0, 5)))  # all at one time
    assert not spans_days(positions.select(np.zeros(12, np.bool_)))
    assert spans_days(log_of_days((0, 0, 0), (1, 0, 1.1)))
    with pytest.raises(InputError, match="no last days to count"):
        RecentPopularity(positions)
    users = FittingUsers.of(positions, temporal=True)
    with pytest.raises(InputError, match="no last days to count"):
        RecentPopularity.fitted(positions, users)


def test_the_days_are_fitted_on_users_of_the_training_log() -> None:
    # 0 ten times at first, 1 three times on day 20, 2 once on day 40; then what is asked for.
    # Seven days find 2 as well as one day does: equals go to the longest.
    past = [(user, 0, 0.1) for user in range(10)] + [(user, 1, 20) for user in range(3)]
    for wanted, days in ((2, "7 days"), (1, "30 days"), (0, "365 days")):
        log = log_of_days(*past, (9, 2, 40), (9, wanted, 40.5))
        users = FittingUsers.of(log, temporal=True)
        assert users.targets.tolist() == [wanted]
        fitted = RecentPopularity.fitted(log, users)
        assert fitted.name == f"popularity, last {days}"
    # User 9 had 0 already: with that left out, no span finds it.
    assert RecentPopularity.fitted(log, users, exclude_seen=True).name.endswith("365 days")
    short = FittingUsers.of(log.select(log.times < DAY * 1_000_000), temporal=False)
    assert RecentPopularity.fitted(log, short).name.endswith("30 days")


def test_markov_chain_by_hand() -> None:
    # Transitions: 0→1 three times, 1→0 once, 1→2 twice, 3→1, 2→3, 3→4 once; none between users.
    chain = MarkovChain(log_of_items(*TOY))
    assert one(chain, [0], 1) == [1]
    assert one(chain, [4, 1], 2) == [2, 0]
    assert one(chain, [3], 2) == [1, 4]
    assert one(chain, [3], 4) == [1, 4, 0, 2]  # filled up by popularity
    assert one(chain, [4], 2) == [1, 0]  # nothing follows 4, although a history begins after it
    assert one(chain, [], 2) == [1, 0]
    assert one(chain, [2, 1], 2, exclude_seen=True) == [0, 3]


def test_markov_chain_knows_a_cycle() -> None:
    chain = MarkovChain(log_of_items(list(range(20)) * 2))
    for item in range(20):
        assert one(chain, [5, item], 1) == [(item + 1) % 20]


def test_item_knn_by_hand() -> None:
    # Users of item 0: {0, 1}, of 1: {0, 1, 2}, of 2: {1, 2}, of 3 and 4: {2}; repeats do not count.
    #   cos(2, 0) = 1 / √(2·2) = 0.5      cos(2, 1) = 2 / √(2·3) = 0.82
    #   cos(2, 2) = 1                     cos(2, 3) = cos(2, 4) = 1 / √(2·1) = 0.71
    knn = ItemKNN(log_of_items(*TOY))
    assert one(knn, [2], 5) == [2, 1, 3, 4, 0]
    assert one(knn, [2], 3, exclude_seen=True) == [1, 3, 4]
    #   cos(0, 0) = 1, cos(0, 1) = 2 / √6 = 0.82, cos(0, 2) = 0.5, cos(0, 3) = cos(0, 4) = 0
    # After 0 and then 2 the scores are those of 2 and half of those of 0:
    #   0: 0.5 + 0.5 = 1    1: 0.82 + 0.41 = 1.22    2: 1 + 0.25 = 1.25    3 and 4: 0.71
    assert one(knn, [0, 2], 5) == [2, 1, 0, 3, 4]
    assert one(knn, [], 2) == [1, 0]


def test_item_knn_looks_at_few_items_and_few_neighbours() -> None:
    log = log_of_items(*TOY)
    assert one(ItemKNN(log, recent=1), [0, 2], 5) == one(ItemKNN(log), [2], 5)
    # Only 2 and 1 are near enough, the rest is popularity.
    assert one(ItemKNN(log, neighbours=2), [2], 5) == [2, 1, 0, 3, 4]


def test_item_knn_finds_the_checkerboard() -> None:
    # Even users had even items, odd users odd ones, each all but one.
    histories = [[i for i in range(u % 2, 40, 2) if i != (u + 10) % 40] for u in range(40)]
    knn = ItemKNN(log_of_items(*histories))
    for user, history in enumerate(histories):
        assert one(knn, history, 1, exclude_seen=True) == [(user + 10) % 40]


def test_item_knn_does_not_depend_on_the_size_of_its_blocks(
    small_log: Interactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    knn = ItemKNN(small_log)
    histories = [small_log.history(user) for user in range(100)]
    at_once = knn.recommend(histories, 10, exclude_seen=True)
    monkeypatch.setattr("recprune.evaluation.baselines.item_knn._ENTRIES_AT_ONCE", 500)
    np.testing.assert_array_equal(knn.recommend(histories, 10, exclude_seen=True), at_once)


def test_ease_by_hand() -> None:
    # Users had {0, 1}, {0, 1} and {1, 2}; repeats do not count. XᵀX + I, and its inverse:
    #   3 2 0          1    7 −4  2
    #   2 4 1         ── · −4  6 −3
    #   0 1 2         13    2 −3  8
    log = log_of_items([0, 1, 0], [1, 0], [2, 1])
    ease = Ease(log, regularisation=1.0)
    by_hand = [[0, 4 / 6, -2 / 8], [4 / 7, 0, 3 / 8], [-2 / 7, 3 / 6, 0]]
    np.testing.assert_allclose(ease.weights, by_hand, rtol=1e-6)
    assert one(ease, [1], 3) == [0, 2, 1]  # 4/7 and 3/8; 1 says nothing of itself: popularity
    assert one(ease, [0, 2, 0], 3) == [1, 0, 2]  # 4/6 + 3/6; the others are below 0: popularity
    assert one(ease, [0, 1], 2, exclude_seen=True) == [2, -1]
    assert one(ease, [], 2) == [0, 1]  # three times each


def test_ease_of_several_blocks_is_that_of_a_plain_inverse(
    small_log: Interactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recprune.evaluation.baselines.ease._ROWS_AT_ONCE", 128)
    had = np.zeros((small_log.num_users, small_log.num_items))
    had[np.repeat(np.arange(small_log.num_users), small_log.lengths), small_log.items] = 1.0
    inverse = np.linalg.inv(had.T @ had + 200.0 * np.eye(small_log.num_items))
    plain = -inverse / np.diag(inverse)
    np.fill_diagonal(plain, 0.0)
    np.testing.assert_allclose(Ease(small_log).weights, plain, atol=1e-6)


def test_ease_and_ials_find_the_checkerboard() -> None:
    histories = [[i for i in range(u % 2, 40, 2) if i != (u + 10) % 40] for u in range(40)]
    log = log_of_items(*histories)
    for baseline in (Ease(log), ImplicitALS(log)):
        for user, history in enumerate(histories):
            assert one(baseline, history, 1, exclude_seen=True) == [(user + 10) % 40]


def test_ials_is_that_of_its_definition_and_of_its_seed(small_log: Interactions) -> None:
    histories = [small_log.history(user) for user in range(20)]
    ials = ImplicitALS(small_log, weight=10.0)
    found = ials.recommend(histories, 10, exclude_seen=True)
    again = ImplicitALS(small_log, weight=10.0).recommend(histories, 10, exclude_seen=True)
    np.testing.assert_array_equal(found, again)
    other = ImplicitALS(small_log, weight=10.0, seed=1)
    assert (other.recommend(histories, 10, exclude_seen=True) != found).any()
    # The vector of a history: (YᵀY + (α − 1) Σ y yᵀ + λ I) x = α Σ y, over the items that it has.
    items = ials.item_vectors.astype(np.float64)
    for row, history in enumerate(histories):
        had = items[np.unique(history)]
        left = items.T @ items + 9.0 * had.T @ had + REGULARISATION * np.eye(FACTORS)
        scores = items @ np.linalg.solve(left, 10.0 * had.sum(axis=0))
        scores[history] = -np.inf
        np.testing.assert_allclose(scores[found[row]], np.sort(scores)[:-11:-1], atol=1e-4)


def test_what_ease_and_ials_have_to_set_is_fitted(small_log: Interactions) -> None:
    users = FittingUsers.of(small_log, temporal=False)
    for fitted, others in (
        (Ease.fitted, [Ease(users.train, regularisation=one) for one in REGULARISATIONS]),
        (ImplicitALS.fitted, [ImplicitALS(users.train, weight=one) for one in WEIGHTS]),
    ):
        found = {other.name: users.ndcg(other, exclude_seen=True) for other in others}
        best = fitted(small_log, users, exclude_seen=True).name
        assert found[best] == max(found.values())
    nobody = FittingUsers.of(log_of_items([0]), temporal=False)
    assert Ease.fitted(small_log, nobody).name == "EASE, λ = 200"
    assert ImplicitALS.fitted(small_log, nobody).name == "iALS, α = 10"


def test_baselines_that_are_left_out_are_named_with_the_reason(
    small_log: Interactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert left_out_baselines(small_log) == {}
    monkeypatch.setattr("recprune.evaluation.baselines.ease.QUICK_ITEMS", 899)
    assert left_out_baselines(small_log) == {
        "EASE": "for 900 items, more than 899, it takes minutes: --slow-baselines (slow=True) has "
        "it all the same"
    }
    assert left_out_baselines(small_log, slow=True) == {}
    for slow in (False, True):
        names = [baseline.name for baseline in every_baseline(small_log, slow=slow)]
        assert any(name.startswith("EASE") for name in names) == slow
    monkeypatch.setattr("recprune.evaluation.baselines.ease.MAX_ITEMS", 899)
    monkeypatch.setattr("recprune.evaluation.baselines.ials.MAX_INTERACTIONS", 11_999)
    assert left_out_baselines(small_log, slow=True) == {
        "EASE": "it inverts a matrix over all items, and 900 are more than 899",
        "iALS": "12,000 interactions are more than 11,999",
    }
    names = [baseline.name for baseline in every_baseline(small_log)]
    assert not [name for name in names if name.startswith(("EASE", "iALS"))]
    with pytest.raises(InputError, match="EASE cannot be computed: .* 900 are more than 899"):
        Ease(small_log)
    # A package that is not there is found out without importing it.
    monkeypatch.setattr("recprune.evaluation.baselines.ials.find_spec", lambda _: None)
    reason = "implicit is not installed: pip install 'recprune[baselines]'"
    assert left_out_baselines(small_log)["iALS"] == reason


def test_items_and_users_without_training_interactions() -> None:
    log = log_of_items([0, 1, 2], [0, 3], [4])
    train = log.select(np.array([True, True, False, True, False, False]))
    for baseline in every_baseline(train):
        assert sorted(one(baseline, [2], 5, exclude_seen=True)) == [-1, -1, -1, 0, 1], baseline.name
    assert one(RecentItems(train), [2, 3], 5) == [3, 2, 0, 1, -1]
    nothing = log.select(np.zeros(6, np.bool_))
    for baseline in every_baseline(nothing):
        assert one(baseline, [2], 2, exclude_seen=True) == [-1, -1], baseline.name


def test_no_users_give_no_rows() -> None:
    for baseline in every_baseline(log_of_items(*TOY)):
        assert baseline.recommend([], 3, exclude_seen=False).shape == (0, 3)


HISTORIES = st.lists(st.lists(st.integers(0, 7), max_size=8), min_size=1, max_size=6)
# All items 0 … 7 occur, so that internal ids are the items themselves.
ALL_ITEMS = list(range(8))


def slow_popularity(train: list[list[int]]) -> list[int]:
    counts = Counter(item for history in train for item in history)
    return sorted(counts, key=lambda item: (-counts[item], item))


def slow_recent(history: list[int]) -> list[int]:
    return list(dict.fromkeys(reversed(history)))


def slow_frequency(history: list[int], decay: float | None = None) -> list[int]:
    scores: dict[int, float] = {}
    for age, item in enumerate(reversed(history)):
        weight = 1.0 if decay is None else math.exp(-age / decay)
        scores[item] = scores.get(item, 0.0) + weight
    return sorted(scores, key=lambda item: -scores[item])  # most recent first among equals


def slow_markov(train: list[list[int]], history: list[int]) -> list[int]:
    counts = Counter(
        after
        for past in train
        for before, after in pairwise(past)
        if history and before == history[-1]
    )
    return sorted(counts, key=lambda item: (-counts[item], item))


def slow_knn(train: list[list[int]], history: list[int], recent: int, count: int) -> list[int]:
    users = {item: {u for u, past in enumerate(train) if item in past} for item in ALL_ITEMS}

    def cosine(one: int, other: int) -> float:
        common = len(users[one] & users[other])
        return math.sqrt(common**2 / (len(users[one]) * len(users[other])))

    scores: dict[int, float] = {}
    for place, item in enumerate(slow_recent(history)[:recent]):
        near = sorted(ALL_ITEMS, key=lambda other: (-cosine(item, other), other))
        for other in near[:count]:
            if cosine(item, other) > 0:
                scores[other] = scores.get(other, 0.0) + cosine(item, other) / (place + 1)
    return sorted(scores, key=lambda item: (-scores[item], item))


@given(HISTORIES, HISTORIES, st.integers(1, 10), st.booleans(), st.integers(1, 8))
def test_all_agree_with_the_obvious(
    more: list[list[int]], asked: list[list[int]], k: int, exclude_seen: bool, count: int
) -> None:
    train = [ALL_ITEMS, *[history for history in more if history]]
    log = log_of_items(*train)
    popular = slow_popularity(train)
    for baseline, preferred in (
        (Popularity(log), lambda _: []),
        (RecentItems(log), slow_recent),
        (PersonalFrequency(log), slow_frequency),
        (PersonalFrequency(log, decay=2.5), lambda history: slow_frequency(history, 2.5)),
        (MarkovChain(log), lambda history: slow_markov(train, history)),
        (
            ItemKNN(log, recent=2, neighbours=count),
            lambda history: slow_knn(train, history, 2, count),
        ),
    ):
        expected = []
        for history in asked:
            ranked = list(dict.fromkeys([*preferred(history), *popular]))
            kept = [item for item in ranked if not (exclude_seen and item in history)][:k]
            expected.append(kept + [-1] * (k - len(kept)))
        found = baseline.recommend(histories_of(*asked), k, exclude_seen=exclude_seen)
        assert found.dtype == np.int64
        assert found.tolist() == expected, baseline.name


def test_one_user_gets_the_same_alone_and_among_others(small_log: Interactions) -> None:
    histories = [small_log.history(user) for user in range(60)]
    for baseline in every_baseline(small_log):
        together = baseline.recommend(histories, 10, exclude_seen=True)
        for user in range(0, 60, 7):
            alone = baseline.recommend(histories[user : user + 1], 10, exclude_seen=True)
            np.testing.assert_array_equal(together[user], alone[0])
            assert not np.isin(together[user], histories[user]).any()


def test_every_baseline_has_its_own_name(small_log: Interactions) -> None:
    users = FittingUsers.of(small_log, temporal=True)
    names = [
        "popularity",
        RecentPopularity.fitted(small_log, users).name,
        "recent items",
        "personal frequency",
        PersonalFrequency.fitted(small_log, users).name,
        "Markov chain",
        "item KNN",
        Ease.fitted(small_log, users).name,
        ImplicitALS.fitted(small_log, users).name,
    ]
    assert [baseline.name for baseline in every_baseline(small_log)] == names
    # Without times that tell days apart, there is no popularity of the last ones.
    of_toy = [baseline.name for baseline in every_baseline(log_of_items(*TOY))]
    assert [name for name in of_toy if "last" in name] == []
    assert len(of_toy) == len(names) - 1


def test_wrong_arguments_are_refused() -> None:
    log = log_of_items(*TOY)
    for baseline in every_baseline(log):
        with pytest.raises(InputError, match="k is 0, expected at least 1"):
            baseline.recommend([], 0, exclude_seen=False)
        for item in (-1, 5):
            with pytest.raises(InputError, match=r"histories\[1\] holds items outside 0 to 4"):
                baseline.recommend(histories_of([0], [1, item]), 1, exclude_seen=False)
        with pytest.raises(InputError, match=r"histories\[0\] is int32\[1, 1\], expected integers"):
            baseline.recommend([np.zeros((1, 1), np.int32)], 1, exclude_seen=False)
        with pytest.raises(InputError, match=r"histories\[0\] is float64\[2\], expected integers"):
            baseline.recommend([np.zeros(2)], 1, exclude_seen=False)  # type: ignore[list-item]
    with pytest.raises(InputError, match="recent is 0, expected at least 1"):
        ItemKNN(log, recent=0)
    with pytest.raises(InputError, match="neighbours is 0, expected at least 1"):
        ItemKNN(log, neighbours=0)
    with pytest.raises(InputError, match="regularisation is 0.0, expected more than 0"):
        Ease(log, regularisation=0.0)
    with pytest.raises(InputError, match="weight is 0.0, expected more than 0"):
        ImplicitALS(log, weight=0.0)


def test_a_large_catalogue_takes_seconds(gitlog: Path) -> None:
    holdout = temporal_holdout(read_interactions(gitlog), min_history=5)
    chosen = random_generator(0).permutation(len(holdout.test))[:200]
    histories = [holdout.history(holdout.test, int(target)) for target in chosen]
    begun = time.monotonic()
    for baseline in every_baseline(holdout.train):
        ids = baseline.recommend(histories, 10, exclude_seen=True)
        assert ids.min() >= 0
    assert time.monotonic() - begun < 60  # some 10 s on two cores
