"""The figures of one run: coverage and bias by hand, intervals, JSON and tables."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from recprune import Evaluation, InputError, Interactions, RankedUsers
from recprune.evaluation.evaluation import (
    DEFAULT_COLUMNS,
    UserGroup,
    evaluate,
    evaluation_rows,
    group_rows,
)
from recprune.types import Json
from tests.conftest import log_of
from tests.evaluation.test_metrics import NAMES, of_lists

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


# Repeats -----------------------------------------------------------------------------------------

# The first two users had their target before; the first finds it in place 1, the second not at all,
# the third finds a new item in place 2, the fourth has no history.
IDS = np.array([[0, 1], [1, 0], [3, 2], [1, 0]])
TARGETS = np.array([0, 3, 2, 2])
HISTORIES = [np.array(history, np.int32) for history in ([1, 0], [3, 3, 1], [0, 1], [])]


def test_repeats_and_new_items_by_hand(train: Interactions) -> None:
    ranked = RankedUsers.of_targets(IDS, TARGETS)
    evaluation = evaluate(ranked, train, name="toy", histories=HISTORIES, cutoffs=(1, 2))
    assert evaluation.repeat_share == 0.5
    assert evaluation.repeats is not None
    assert evaluation.others is not None
    assert (evaluation.repeats.num_users, evaluation.others.num_users) == (2, 2)
    assert evaluation.repeats.metrics["Recall@2"].mean == 0.5
    assert evaluation.repeats.metrics["NDCG@2"].mean == 0.5
    assert evaluation.others.metrics["NDCG@2"].mean == pytest.approx(0.5 / np.log2(3))
    assert evaluation.others.metrics["Recall@1"].mean == 0.0
    # Of two users with 1 and 0, both, one or none are hit in a resample.
    assert evaluation.repeats.metrics["Recall@2"].low == 0.0
    assert evaluation.repeats.metrics["Recall@2"].high == 1.0
    # All users together are judged as they are without histories.
    plain = evaluate(ranked, train, name="toy", cutoffs=(1, 2))
    assert plain.metrics == evaluation.metrics
    assert (plain.repeats, plain.others, plain.repeat_share) == (None, None, None)


def test_a_group_without_users_has_no_figures(train: Interactions) -> None:
    ranked = RankedUsers.of_targets(IDS[:2], TARGETS[:2])
    evaluation = evaluate(ranked, train, name="toy", histories=HISTORIES[:2], cutoffs=(2,))
    assert evaluation.repeat_share == 1.0
    assert evaluation.others == UserGroup(0, {})
    assert group_rows([evaluation], "repeats", ["NDCG@2", "Recall@2"]) == [
        ("toy", "0.5000 [0.0000, 1.0000]", "0.5000 [0.0000, 1.0000]")
    ]
    with pytest.raises(InputError, match="toy has no users whose targets are others"):
        group_rows([evaluation], "others", ["NDCG@2"])
    assert Evaluation.from_json(json.loads(json.dumps(evaluation.to_json()))) == evaluation


def test_cold_and_warm_targets_by_hand(train: Interactions) -> None:
    """Without item 3 in training, the second user's target is cold, and not found."""
    some = train.select(train.items != 3)
    ids = np.array([[0, 1], [1, 0], [3, 2], [1, 3]])
    ranked = RankedUsers.of_targets(ids, np.array([0, 3, 2, 3]))
    evaluation = evaluate(ranked, some, name="toy", cutoffs=(1, 2))
    assert evaluation.cold_share == 0.5
    assert evaluation.cold is not None
    assert evaluation.warm is not None
    assert (evaluation.cold.num_users, evaluation.warm.num_users) == (2, 2)
    assert evaluation.cold.metrics["Recall@2"].mean == 0.5
    assert evaluation.cold.metrics["NDCG@2"].mean == pytest.approx(0.5 / np.log2(3))
    assert evaluation.cold.metrics["Recall@1"].mean == 0.0
    assert evaluation.warm.metrics["NDCG@2"].mean == pytest.approx((1 + 1 / np.log2(3)) / 2)
    assert group_rows([evaluation], "cold", ["Recall@2"]) == [("toy", "0.5000 [0.0000, 1.0000]")]
    assert Evaluation.from_json(json.loads(json.dumps(evaluation.to_json()))) == evaluation


def test_cold_targets_are_told_apart_for_one_target_of_every_user(train: Interactions) -> None:
    several = evaluate(of_lists([[0], [0]], [[0], [1, 2]]), train, name="toy", cutoffs=(1,))
    assert (several.cold, several.warm, several.cold_share) == (None, None, None)
    with pytest.raises(InputError, match="toy was evaluated for several targets of a user"):
        group_rows([several], "cold", ["NDCG@1"])


def test_repeats_need_a_history_and_one_target_of_every_user(train: Interactions) -> None:
    ranked = RankedUsers.of_targets(IDS, TARGETS)
    with pytest.raises(InputError, match="3 histories but 4 users"):
        evaluate(ranked, train, name="", histories=HISTORIES[:3], cutoffs=(1,))
    several = of_lists([[0], [0]], [[0], [1, 2]])
    with pytest.raises(InputError, match="row 1 has 2 relevant items: repeats are told apart"):
        evaluate(several, train, name="", histories=HISTORIES[:2], cutoffs=(1,))
    with pytest.raises(InputError, match="toy was evaluated without histories"):
        group_rows([evaluate(ranked, train, name="toy", cutoffs=(1,))], "others", ["NDCG@1"])


# In words ----------------------------------------------------------------------------------------


def test_json_and_back(train: Interactions) -> None:
    ranked = RankedUsers.of_targets(np.array([[0, 1], [1, 0]]), np.array([0, 3]))
    evaluation = evaluate(ranked, train, name="toy", cutoffs=(1, 2))
    unknown = dataclasses.replace(evaluation, popularity_bias={1: None, 2: 2.0})
    histories = [np.array([0], np.int32), np.array([1], np.int32)]
    apart = evaluate(ranked, train, name="toy", histories=histories, cutoffs=(1, 2))
    for original in (evaluation, unknown, apart):
        assert Evaluation.from_json(json.loads(json.dumps(original.to_json()))) == original
    older = {k: v for k, v in evaluation.to_json().items() if k not in ("repeats", "others")}
    assert Evaluation.from_json(older) == evaluation


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
        {"repeats": {"num_users": 1}},
        {"others": 3},
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


# Errors ------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused(train: Interactions) -> None:
    ranked = RankedUsers.of_targets(np.array([[0, 1]]), np.array([0]))
    for cutoff in (0, 3):
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
    outside = RankedUsers.of_targets(np.array([[4]]), np.array([0]))
    with pytest.raises(InputError, match="ids holds item 4, but the catalogue has 4"):
        evaluate(outside, train, name="", cutoffs=(1,))
    outside = RankedUsers.of_targets(np.array([[0]]), np.array([9]))
    with pytest.raises(InputError, match="relevant holds item 9, but the catalogue has 4"):
        evaluate(outside, train, name="", cutoffs=(1,))


def test_figures_as_a_frame(train: Interactions) -> None:
    ranked = RankedUsers.of_targets(np.array([[0, 1], [1, -1]]), np.array([1, 2], np.int32))
    run = evaluate(ranked, train, name="one", cutoffs=(1, 2))
    frame = run.to_frame()
    assert frame.columns == ["run", "metric", "mean", "low", "high"]
    by_name = {row["metric"]: row for row in frame.iter_rows(named=True)}
    assert len(by_name) == len(frame) == len(run.metrics) + 4
    ndcg, found = run.metrics["NDCG@2"], by_name["NDCG@2"]
    assert (found["mean"], found["low"], found["high"]) == (ndcg.mean, ndcg.low, ndcg.high)
    coverage = by_name["Coverage@2"]
    assert (coverage["run"], coverage["mean"], coverage["low"]) == ("one", run.coverage[2], None)
