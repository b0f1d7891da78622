"""Two runs compared: real differences are found, and none between equals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recprune import InputError, RankedUsers, compare
from recprune.evaluation.comparison import verdict
from tests.evaluation.test_metrics import of_lists


def at_ranks(ranks: list[int], k: int = 10) -> RankedUsers:
    """Return users whose only target, item 0, stands at these ranks; 0 means nowhere."""
    ids = np.tile(np.arange(1, k + 1), (len(ranks), 1))
    for row, rank in enumerate(ranks):
        if rank:
            ids[row, rank - 1] = 0
    return RankedUsers.of_targets(ids, np.zeros(len(ranks), np.int32))


def random_ranks(seed: int, users: int, chance: float) -> list[int]:
    rng = np.random.default_rng(seed)
    ranks = np.where(rng.random(users) < chance, rng.integers(1, 11, users), 0)
    return [int(rank) for rank in ranks]


def test_compare_finds_a_real_difference() -> None:
    better, worse = at_ranks(random_ranks(0, 3000, 0.4)), at_ranks(random_ranks(1, 3000, 0.3))
    comparison = compare(better, worse, "NDCG@10")
    assert comparison.first > comparison.second
    assert comparison.difference.mean == pytest.approx(comparison.first - comparison.second)
    assert 0 < comparison.difference.low < comparison.difference.mean < comparison.difference.high
    assert comparison.p_value < 0.001
    other_way = compare(worse, better, "NDCG@10")
    assert other_way.difference.mean == -comparison.difference.mean
    assert other_way.p_value == comparison.p_value  # two-sided


def test_compare_finds_nothing_between_equals() -> None:
    runs = [at_ranks(random_ranks(seed, 200, 0.3)) for seed in range(120)]
    p_values = [
        compare(first, second, "NDCG@10", resamples=1).p_value
        for first, second in zip(runs[::2], runs[1::2], strict=True)
    ]
    # Under equality p-values are uniform: of 60, about 3 are below 0.05 and 30 below 0.5.
    assert np.count_nonzero(np.array(p_values) < 0.05) <= 8
    assert 18 <= np.count_nonzero(np.array(p_values) < 0.5) <= 42
    same = compare(runs[0], runs[0], "MRR@5")
    assert (same.p_value, same.difference.low, same.difference.high) == (1.0, 0.0, 0.0)


def test_p_value_by_hand() -> None:
    # Eight users, each better by the same: only the signs +…+ and −…− are as extreme, 2 of 256.
    comparison = compare(at_ranks([1] * 8), at_ranks([0] * 8), "Hit@10", flips=200_000)
    assert comparison.p_value == pytest.approx(2 / 256, rel=0.1)


def test_p_value_of_many_equal_differences_by_hand() -> None:
    # 20 of 30 users are better, 10 worse: as extreme are 20 or more heads of 30, and 10 or fewer.
    comparison = compare(
        at_ranks([1] * 20 + [0] * 10), at_ranks([0] * 20 + [1] * 10), "Hit@10", flips=100_000
    )
    exact = 2 * sum(math.comb(30, heads) for heads in range(20, 31)) / 2**30  # 0.0987
    assert comparison.p_value == pytest.approx(exact, abs=0.004)


@pytest.mark.parametrize("users", [30, 1500])
def test_p_value_does_not_depend_on_parts(users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = at_ranks(random_ranks(2, users, 0.5)), at_ranks(random_ranks(3, users, 0.45))
    once = compare(first, second, "NDCG@10")
    monkeypatch.setattr("recprune.evaluation.resampling._NUMBERS_AT_ONCE", 2_000)
    assert compare(first, second, "NDCG@10") == once


def test_only_the_same_users_can_be_compared() -> None:
    ids, targets = np.array([[1, 2], [3, 4]]), np.array([1, 9])
    run = RankedUsers.of_targets(ids, targets)
    others = RankedUsers.of_targets(ids, targets, users=np.array([0, 7]))
    with pytest.raises(InputError, match="different users"):
        compare(run, others, "NDCG@2")
    with pytest.raises(InputError, match="different relevant items"):
        compare(run, RankedUsers.of_targets(ids, np.array([1, 8])), "NDCG@2")
    with pytest.raises(InputError, match="different numbers of relevant items"):
        compare(run, of_lists([[1, 2], [3, 4]], [[1], [9, 8]]), "NDCG@2")
    with pytest.raises(InputError, match="different users"):
        compare(run, RankedUsers.of_targets(ids[:1], targets[:1]), "NDCG@2")
    with pytest.raises(InputError, match="flips is 100, expected at least 10000"):
        compare(run, run, "NDCG@2", flips=100)


def test_the_verdict_says_who_is_better() -> None:
    good, middling = at_ranks(random_ranks(0, 900, 0.5)), at_ranks(random_ranks(1, 900, 0.3))
    poor = at_ranks(random_ranks(2, 900, 0.1))
    beaten = verdict("SASRec", good, {"popularity": poor, "Markov chain": middling})
    assert beaten.startswith(
        "SASRec beats every baseline on NDCG@10: the best of them is Markov chain, 0."
    )
    assert ", 95 % interval +0." in beaten
    assert beaten.endswith("p = 0.0001).")
    worse = verdict("SASRec", middling, {"popularity": poor, "Markov chain": good})
    assert worse.startswith(
        "SASRec does not beat every baseline on NDCG@10: Markov chain is better, 0."
    )
    as_good = at_ranks(random_ranks(3, 900, 0.3))  # differs by chance only
    even = verdict("SASRec", middling, {"popularity": poor, "recent items": as_good})
    assert even.startswith(
        "SASRec does not beat every baseline on NDCG@10: recent items cannot be told from it, 0."
    )
    assert "on Hit@5:" in verdict("SASRec", good, {"popularity": poor}, metric="Hit@5")
    with pytest.raises(InputError, match="no baselines"):
        verdict("SASRec", good, {})
