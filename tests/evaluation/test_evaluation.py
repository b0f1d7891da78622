from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import ir_measures
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir_measures import AP, RR, Qrel, R, ScoredDoc, Success, nDCG

from recprune import InputError, Interactions
from recprune.evaluation.evaluation import (
    DEFAULT_COLUMNS,
    Evaluation,
    RankedUsers,
    compare,
    evaluate,
    evaluation_rows,
    user_values,
    verdict,
)
from recprune.evaluation.resampling import bootstrap_mean, sign_flip_p_value
from recprune.types import Json
from tests.conftest import log_of

NAMES = ("NDCG", "Recall", "Hit", "MRR", "MAP")


def of_lists(ids: list[list[int]], relevant: list[list[int]]) -> RankedUsers:
    offsets = np.cumsum([0, *map(len, relevant)])
    items = np.array([item for items in relevant for item in items], np.int64)
    return RankedUsers.of_relevant(np.array(ids, np.int64), offsets, items)


def at_ranks(ranks: list[int], k: int = 10) -> RankedUsers:
    """Return users whose only target, item 0, stands at these ranks; 0 means nowhere."""
    ids = np.tile(np.arange(1, k + 1), (len(ranks), 1))
    for row, rank in enumerate(ranks):
        if rank:
            ids[row, rank - 1] = 0
    return RankedUsers.of_targets(ids, np.zeros(len(ranks), np.int32))


# By hand -----------------------------------------------------------------------------------------


def test_one_target_by_hand() -> None:
    # Ranks 1, 3 and nowhere. log2(1 + 1) = 1, log2(3 + 1) = 2.
    ranked = RankedUsers.of_targets(
        np.array([[5, 6, 7], [6, 7, 5], [6, 7, 8]]), np.array([5, 5, 5], np.int32)
    )
    values = user_values(ranked, [f"{name}@{cutoff}" for cutoff in (2, 3) for name in NAMES])
    assert values["NDCG@3"].tolist() == [1.0, 0.5, 0.0]
    assert values["Recall@3"].tolist() == [1.0, 1.0, 0.0]
    assert values["Hit@3"].tolist() == [1.0, 1.0, 0.0]
    assert values["MRR@3"].tolist() == pytest.approx([1.0, 1 / 3, 0.0])
    assert values["MAP@3"].tolist() == pytest.approx([1.0, 1 / 3, 0.0])
    for name in NAMES:
        assert values[f"{name}@2"].tolist() == [1.0, 0.0, 0.0]


def test_several_relevant_items_by_hand() -> None:
    # Relevant 1, 2, 3, 4, 5; found 2 at rank 1 and 4 at rank 3.
    ranked = of_lists([[2, 9, 4, 8]], [[1, 2, 3, 4, 5]])
    values = user_values(ranked, ["NDCG@4", "Recall@4", "Hit@4", "MRR@4", "MAP@4", "NDCG@1"])
    # (1 + 1/2) / (1 + 1/log2(3) + 1/2 + 1/log2(5)): the ideal list has four places only.
    assert values["NDCG@4"][0] == pytest.approx(1.5 / 2.5616063116448506)
    assert values["Recall@4"][0] == pytest.approx(2 / 5)
    assert values["Hit@4"][0] == 1.0
    assert values["MRR@4"][0] == 1.0
    assert values["MAP@4"][0] == pytest.approx((1 / 1 + 2 / 3) / 4)
    assert values["NDCG@1"][0] == 1.0


def test_padding_never_counts() -> None:
    ranked = RankedUsers.of_targets(np.array([[3, -1, -1], [-1, -1, -1]]), np.array([3, 3]))
    values = user_values(ranked, [f"{name}@3" for name in NAMES])
    for name in NAMES:
        assert values[f"{name}@3"].tolist() == [1.0, 0.0]


# Against the obvious -----------------------------------------------------------------------------


def slow(name: str, ids: list[int], relevant: list[int], cutoff: int) -> float:
    places = [rank for rank, item in enumerate(ids[:cutoff], start=1) if item in relevant]
    fewer = min(cutoff, len(relevant))
    if name == "NDCG":
        ideal = sum(1 / math.log2(rank + 1) for rank in range(1, fewer + 1))
        return sum(1 / math.log2(rank + 1) for rank in places) / ideal
    if name == "Recall":
        return len(places) / len(relevant)
    if name == "Hit":
        return float(bool(places))
    if name == "MRR":
        return 1 / places[0] if places else 0.0
    return sum(number / rank for number, rank in enumerate(places, start=1)) / fewer


@st.composite
def ranked_lists(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    k = draw(st.integers(1, 7))
    items = st.integers(0, 12)
    ids = draw(st.lists(st.lists(items, unique=True, max_size=k), min_size=1, max_size=8))
    relevant = [draw(st.lists(items, unique=True, min_size=1, max_size=9)) for _ in ids]
    return [row + [-1] * (k - len(row)) for row in ids], relevant


@given(ranked_lists())
def test_metrics_agree_with_the_obvious(lists: tuple[list[list[int]], list[list[int]]]) -> None:
    ids, relevant = lists
    cutoffs = range(1, len(ids[0]) + 1)
    metrics = [f"{name}@{cutoff}" for name in NAMES for cutoff in cutoffs]
    values = user_values(of_lists(ids, relevant), metrics)
    for metric in metrics:
        name, cutoff = metric.split("@")
        expected = [
            slow(name, row, wanted, int(cutoff)) for row, wanted in zip(ids, relevant, strict=True)
        ]
        assert values[metric].tolist() == pytest.approx(expected), metric


def test_metrics_do_not_depend_on_the_size_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    ids = np.array([rng.permutation(30)[:10] for _ in range(50)])
    relevant = [rng.permutation(30)[: 1 + row % 4].tolist() for row in range(50)]
    whole = user_values(of_lists(ids.tolist(), relevant), ["NDCG@10", "MAP@5"])
    monkeypatch.setattr("recprune.evaluation.resampling._NUMBERS_AT_ONCE", 64)
    parts = user_values(of_lists(ids.tolist(), relevant), ["NDCG@10", "MAP@5"])
    for metric, values in whole.items():
        np.testing.assert_array_equal(parts[metric], values)


def test_metrics_agree_with_ir_measures() -> None:
    rng = np.random.default_rng(0)
    users, k, num_items = 300, 20, 60
    ids = np.array([rng.permutation(num_items)[:k] for _ in range(users)])
    ids[:50, 12:] = -1
    relevant = [rng.permutation(num_items)[: rng.integers(1, 15)].tolist() for _ in range(users)]
    qrels = [Qrel(str(u), str(item), 1) for u, items in enumerate(relevant) for item in items]
    run = [
        ScoredDoc(str(u), str(item), float(k - place))
        for u, row in enumerate(ids.tolist())
        for place, item in enumerate(row)
        if item >= 0
    ]
    measures: dict[str, Callable[[int], Any]] = {
        "NDCG": lambda cutoff: nDCG @ cutoff,
        "Recall": lambda cutoff: R @ cutoff,
        "Hit": lambda cutoff: Success @ cutoff,
        "MRR": lambda cutoff: RR @ cutoff,
        "MAP": lambda cutoff: AP @ cutoff,
    }
    by_measure = {
        measures[name](cutoff): f"{name}@{cutoff}" for name in NAMES for cutoff in (1, 5, 10, 20)
    }
    values = user_values(of_lists(ids.tolist(), relevant), list(by_measure.values()))
    compared = 0
    for result in ir_measures.iter_calc(list(by_measure), qrels, run):
        metric, user = by_measure[result.measure], int(result.query_id)
        expected = result.value
        if metric.startswith("MAP"):
            # trec_eval divides by the number of relevant items even where K places cannot hold them.
            number = len(relevant[user])
            expected *= number / min(number, int(metric.split("@")[1]))
        assert values[metric][user] == pytest.approx(expected, abs=1e-9), (metric, user)
        compared += 1
    assert compared == users * len(by_measure)


# Coverage and popularity -------------------------------------------------------------------------


@pytest.fixture
def train() -> Interactions:
    """Item 0 four times, item 1 twice, items 2 and 3 once, out of eight interactions."""
    rows = [("u", 0, 1), ("u", 0, 2), ("u", 0, 3), ("u", 0, 4), ("u", 1, 5), ("u", 1, 6)]
    return log_of(*rows, ("u", 2, 7), ("u", 3, 8))


def test_coverage_and_popularity_bias_by_hand(train: Interactions) -> None:
    ranked = RankedUsers.of_targets(
        np.array([[0, 1], [1, -1], [-1, -1]]), np.array([1, 2, 3], np.int32)
    )
    evaluation = evaluate(ranked, train, name="toy", cutoffs=(1, 2))
    assert evaluation.coverage == {1: 0.5, 2: 0.5}  # items 0 and 1 of four
    # Wanted: (2 + 1 + 1) / 3 interactions. At 1: (4 + 2) / 2; at 2: ((4 + 2) / 2 + 2) / 2.
    assert evaluation.popularity_bias[1] == pytest.approx(3 / (4 / 3))
    assert evaluation.popularity_bias[2] == pytest.approx(2.5 / (4 / 3))


def test_recommending_what_was_wanted_has_bias_one(train: Interactions) -> None:
    ranked = of_lists([[2, 0], [1, 3]], [[0, 2], [3, 1]])
    evaluation = evaluate(ranked, train, name="oracle", cutoffs=(2,))
    assert evaluation.popularity_bias[2] == pytest.approx(1.0)
    assert evaluation.coverage[2] == 1.0


def test_popularity_bias_can_be_undefined(train: Interactions) -> None:
    unseen = train.select(train.items != 3)
    wanted_unseen = RankedUsers.of_targets(np.array([[0]]), np.array([3]))
    assert evaluate(wanted_unseen, unseen, name="", cutoffs=(1,)).popularity_bias[1] is None
    nothing = RankedUsers.of_targets(np.array([[-1]]), np.array([0]))
    assert evaluate(nothing, train, name="", cutoffs=(1,)).popularity_bias[1] is None


# Intervals ---------------------------------------------------------------------------------------


def test_evaluation_holds_every_metric_at_every_cutoff(train: Interactions) -> None:
    ranked = RankedUsers.of_targets(np.array([[0, 1], [1, 0]]), np.array([0, 0]))
    evaluation = evaluate(ranked, train, name="toy", cutoffs=(1, 2))
    assert list(evaluation.metrics) == [f"{n}@1" for n in NAMES] + [f"{n}@2" for n in NAMES]
    assert (evaluation.name, evaluation.num_users) == ("toy", 2)
    assert evaluation.metrics["Hit@1"].mean == 0.5
    # Of two users, both, one or none are hit in a resample: 25 % of them are at either end.
    assert (evaluation.metrics["Hit@1"].low, evaluation.metrics["Hit@1"].high) == (0.0, 1.0)
    assert evaluation.metrics["Hit@2"] == dataclasses.replace(
        evaluation.metrics["Hit@2"], mean=1.0, low=1.0, high=1.0
    )


@pytest.mark.parametrize("decimals", [1, 16])
def test_intervals_are_seeded_and_do_not_depend_on_parts(
    decimals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).random(140).round(decimals)
    once = bootstrap_mean(values, seed=3)
    assert bootstrap_mean(values, seed=3) == once
    assert bootstrap_mean(values, seed=4) != once
    monkeypatch.setattr("recprune.evaluation.resampling._NUMBERS_AT_ONCE", 999)
    assert bootstrap_mean(values, seed=3) == once


@pytest.mark.parametrize("distinct", [3, 80])
def test_intervals_are_those_of_resampling_users_one_by_one(distinct: int) -> None:
    rng = np.random.default_rng(5)
    values = rng.choice(np.linspace(0, 1, distinct) ** 3, size=80)
    means = values[rng.integers(0, 80, (40_000, 80))].mean(axis=1)
    estimate = bootstrap_mean(values, resamples=40_000)
    assert estimate.mean == values.mean()
    assert estimate.low == pytest.approx(np.quantile(means, 0.025), abs=0.01)
    assert estimate.high == pytest.approx(np.quantile(means, 0.975), abs=0.01)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_intervals_hold_the_truth_as_often_as_they_say(confidence: float) -> None:
    # NDCG of users whose target is at a rank of 1 … 20 by chance: half of them have none at 10.
    gains = np.append(1 / np.log2(np.arange(2, 12)), np.zeros(10))
    rng = np.random.default_rng(11)
    held = 0
    for trial in range(400):
        estimate = bootstrap_mean(
            rng.choice(gains, 300), confidence=confidence, resamples=1000, seed=trial
        )
        held += estimate.low <= gains.mean() <= estimate.high
    # Within three standard errors of a share out of 400 trials.
    assert held / 400 == pytest.approx(
        confidence, abs=3 * math.sqrt(confidence * (1 - confidence) / 400)
    )


# Comparison --------------------------------------------------------------------------------------


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


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), min_size=1, max_size=9))
def test_p_value_is_that_of_all_sign_changes(differences: list[float]) -> None:
    signs = np.array(np.meshgrid(*[[-1, 1]] * len(differences))).reshape(len(differences), -1).T
    sums = np.abs(signs @ np.array(differences))
    exact = (sums >= abs(sum(differences)) - 1e-12).mean()
    assert sign_flip_p_value(np.array(differences), 20_000, 0) == pytest.approx(exact, abs=0.02)


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


# In words ----------------------------------------------------------------------------------------


def test_json_and_back(train: Interactions) -> None:
    ranked = RankedUsers.of_targets(np.array([[0, 1], [1, 0]]), np.array([0, 3]))
    evaluation = evaluate(ranked, train, name="toy", cutoffs=(1, 2))
    unknown = dataclasses.replace(evaluation, popularity_bias={1: None, 2: 2.0})
    for original in (evaluation, unknown):
        assert Evaluation.from_json(json.loads(json.dumps(original.to_json()))) == original


def test_foreign_json_is_refused(train: Interactions) -> None:
    ranked = RankedUsers.of_targets(np.array([[0]]), np.array([0]))
    values = evaluate(ranked, train, name="toy", cutoffs=(1,)).to_json()
    with pytest.raises(InputError, match="missing or unknown entries: colour, seed"):
        Evaluation.from_json(
            {name: v for name, v in values.items() if name != "seed"} | {"colour": 1}
        )
    damaged: list[Json] = [
        {"metrics": {"NDCG@1": {"mean": 0.1}}},
        {"metrics": {"NDCG@1": 0.1}},
        {"metrics": []},
        {"coverage": {"ten": 0.1}},
    ]
    for wrong in damaged:
        with pytest.raises(InputError, match="an evaluation cannot be read"):
            Evaluation.from_json(values | wrong)


def test_rows_for_a_table(train: Interactions) -> None:
    ids = np.array([[0, 1, 2, 3, *[-1] * 6]])
    first = evaluate(RankedUsers.of_targets(ids, np.array([1])), train, name="model")
    unseen = train.select(train.items != 3)
    second = evaluate(RankedUsers.of_targets(ids, np.array([3])), unseen, name="other")
    assert evaluation_rows([first, second]) == [
        (
            "model",
            "0.6309 [0.6309, 0.6309]",
            "1.0000 [1.0000, 1.0000]",
            "0.5000 [0.5000, 0.5000]",
            "100.000%",
            "1.00",
        ),
        (
            "other",
            "0.4307 [0.4307, 0.4307]",
            "1.0000 [1.0000, 1.0000]",
            "0.2500 [0.2500, 0.2500]",
            "100.000%",
            "–",
        ),
    ]
    assert all(len(row) == 1 + len(DEFAULT_COLUMNS) for row in evaluation_rows([first]))
    assert evaluation_rows([first], ["MAP@10"]) == [("model", "0.5000 [0.5000, 0.5000]")]
    with pytest.raises(InputError, match="model has no NDCG@5"):
        evaluation_rows([first], ["NDCG@5"])


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


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "targets", "message"),
    [
        ([[1, 2, 1]], [1], r"ids\[0\] has item 1 twice"),
        ([[1, 2], [-1, 4]], [1, 1], r"ids\[1, 1\] is an item behind padding"),
        ([[1, 2], [4, -2]], [1, 1], r"ids\[1, 1\] is -2, expected an item id or −1"),
        ([[1, 2]], [-1], r"relevant\[0\] is -1, expected an item id"),
        ([[1, 2]], [1, 2], "offsets must have 2 entries"),
        ([[1.0, 2.0]], [1], "ids is float64, expected integers"),
        ([[1, 2]], [1.0], "items is float64, expected integers"),
        ([1, 2], [1, 2], r"ids is int64\[1-D\], expected int64\[2-D\]"),
        ([[]], [1], "ids is float64"),
    ],
)
def test_wrong_lists_are_refused(ids: list[Any], targets: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RankedUsers.of_targets(np.array(ids), np.array(targets))


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="no users to evaluate"):
        RankedUsers.of_targets(np.zeros((0, 3), np.int64), np.zeros(0, np.int64))
    with pytest.raises(InputError, match="nothing is recommended to anybody"):
        RankedUsers.of_targets(np.zeros((1, 0), np.int64), np.zeros(1, np.int64))
    with pytest.raises(InputError, match="3 users but 1 rows of ids"):
        RankedUsers.of_targets(np.array([[1]]), np.array([1]), users=np.arange(3))
    with pytest.raises(InputError, match="row 1 has no relevant items"):
        of_lists([[1], [2]], [[1], []])
    with pytest.raises(InputError, match="row 1 has the relevant item 5 twice"):
        of_lists([[1], [2]], [[5], [5, 6, 5]])
    for offsets in ([0, 1], [1, 2, 3], [0, 1, 2]):
        with pytest.raises(InputError, match="offsets must have 3 entries, from 0 .* items, 3"):
            RankedUsers.of_relevant(np.array([[1], [2]]), np.array(offsets), np.array([1, 2, 3]))
    with pytest.raises(InputError, match=r"users is int64\[2-D\]"):
        RankedUsers.of_targets(np.array([[1]]), np.array([1]), users=np.array([[1]]))


def test_the_callers_arrays_stay_writeable() -> None:
    ids, targets = np.array([[1, 2]]), np.array([1])
    ranked = RankedUsers.of_targets(ids, targets)
    ids[0, 0] = 7
    assert ranked.ids.tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="read-only"):
        ranked.ids[0, 0] = 7


def test_wrong_arguments_are_refused(train: Interactions) -> None:
    ranked = RankedUsers.of_targets(np.array([[0, 1]]), np.array([0]))
    for metric in ("ndcg@2", "NDCG", "NDCG@", "NDCG@-1", "NDCG@two", "@2"):
        with pytest.raises(InputError, match="expected one of NDCG, Recall, Hit, MRR, MAP"):
            user_values(ranked, [metric])
    for cutoff in (0, 3):
        with pytest.raises(InputError, match=f"cutoff {cutoff} of recommendations with 2 places"):
            user_values(ranked, [f"NDCG@{cutoff}"])
        with pytest.raises(InputError, match=f"cutoff {cutoff} of recommendations with 2 places"):
            evaluate(ranked, train, name="", cutoffs=(cutoff,))
    with pytest.raises(InputError, match="cutoffs is empty"):
        evaluate(ranked, train, name="", cutoffs=())
    for confidence in (0.0, 1.0, 95.0):
        with pytest.raises(InputError, match="confidence is .*, expected between 0 and 1"):
            evaluate(ranked, train, name="", cutoffs=(1,), confidence=confidence)
    with pytest.raises(InputError, match="resamples is 0"):
        evaluate(ranked, train, name="", cutoffs=(1,), resamples=0)
    with pytest.raises(InputError, match="seed is -1"):
        evaluate(ranked, train, name="", cutoffs=(1,), seed=-1)
    with pytest.raises(InputError, match="no values"):
        bootstrap_mean(np.zeros(0))
    outside = RankedUsers.of_targets(np.array([[4]]), np.array([0]))
    with pytest.raises(InputError, match="ids holds item 4, but the catalogue has 4"):
        evaluate(outside, train, name="", cutoffs=(1,))
    outside = RankedUsers.of_targets(np.array([[0]]), np.array([9]))
    with pytest.raises(InputError, match="relevant holds item 9, but the catalogue has 4"):
        evaluate(outside, train, name="", cutoffs=(1,))
