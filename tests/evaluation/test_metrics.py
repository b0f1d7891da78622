"""Metrics agree with hand-worked numbers, with the obvious, and with another implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ir_measures
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir_measures import AP, RR, Qrel, R, ScoredDoc, Success, nDCG

from recprune import InputError, RankedUsers
from recprune.evaluation.metrics import RelevantRanks, ndcg, user_values

NAMES = ("NDCG", "Recall", "Hit", "MRR", "MAP")


def of_lists(ids: list[list[int]], relevant: list[list[int]]) -> RankedUsers:
    offsets = np.cumsum([0, *map(len, relevant)])
    items = np.array([item for items in relevant for item in items], np.int64)
    return RankedUsers.of_relevant(np.array(ids, np.int64), offsets, items)


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


def test_ndcg_of_ranks_by_hand() -> None:
    # 1 / log₂ 2 = 1; 1 / log₂ 3 = 0.6309298; 1 / log₂ 11 = 0.2890648; the eleventh gains nothing.
    relevant = RelevantRanks.of_targets(np.array([1, 2, 10, 11]))
    assert ndcg(relevant, 10).tolist() == pytest.approx([1.0, 0.6309298, 0.2890648, 0.0], rel=1e-6)
    assert ndcg(relevant, 1).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert ndcg(RelevantRanks.of_targets(np.empty(0, np.int64)), 10).tolist() == []


@given(st.lists(st.integers(1, 2**40), max_size=300), st.integers(1, 100))
def test_ndcg_of_one_target_is_its_gain_to_the_bit(ranks: list[int], cutoff: int) -> None:
    """The ideal ranking gains exactly 1: a training that stops early by this mean still does."""
    array = np.array(ranks, np.int64)
    gains = np.where(array <= cutoff, 1.0 / np.log2(array + 1.0), 0.0)
    values = ndcg(RelevantRanks.of_targets(array), cutoff)
    assert values.tobytes() == gains.tobytes()


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


def test_wrong_metrics_are_refused() -> None:
    ranked = RankedUsers.of_targets(np.array([[0, 1]]), np.array([0]))
    for metric in ("ndcg@2", "NDCG", "NDCG@", "NDCG@-1", "NDCG@two", "@2"):
        with pytest.raises(InputError, match="expected one of NDCG, Recall, Hit, MRR, MAP"):
            user_values(ranked, [metric])
    for cutoff in (0, 3):
        with pytest.raises(InputError, match=f"cutoff {cutoff} of recommendations with 2 places"):
            user_values(ranked, [f"NDCG@{cutoff}"])
