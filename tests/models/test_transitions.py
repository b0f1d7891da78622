"""Transitions are counted in training alone, and what often followed is boosted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recprune import StorageError
from recprune.models.transitions import (
    BUCKETS,
    PROBABILITY_BUCKETS,
    SUCCESSORS,
    SuccessorTable,
    TransitionBoosts,
    count_transitions,
)
from recprune.preparation.prepared import Prepared
from tests.preparation.test_prepared import prepared_of


def log() -> Prepared:
    """In training, 0 is followed by 1 three times, by 2 twice, by 3 twice; 1 by 0 once."""
    histories = [[0, 1, 0, 1, 9, 9], [0, 1, 8, 8], [0, 3, 7, 7], [0, 2, 7, 7], [0, 2, 6, 6]]
    return prepared_of([*histories, [0, 3]], np.zeros((10, 2), np.uint8), 4)


def test_transitions_of_training_are_counted() -> None:
    table = count_transitions(log())
    assert table.totals.tolist() == [7, 1, *[0] * 8]  # neither validation nor test targets
    assert table.offsets.tolist() == [0, 3, *[4] * 9]
    assert table.successors.tolist() == [1, 2, 3, 0]  # of equals, the lower id
    assert table.counts.tolist() == [3, 2, 2, 1]


def test_only_the_most_frequent_successors_are_kept() -> None:
    others = 2 * SUCCESSORS
    histories = [[0, 1 + item] * (1 + item % 3) for item in range(others)]
    ends = [[*history, others + 1, others + 1] for history in histories]
    table = count_transitions(prepared_of(ends, np.zeros((others + 2, 2), np.uint8), 4))
    assert table.offsets[1] == SUCCESSORS
    assert table.totals[0] == sum(1 + item % 3 for item in range(others))
    thrice = [1 + item for item in range(others) if item % 3 == 2]
    assert table.successors[: len(thrice)].tolist() == thrice
    assert (np.diff(table.counts[:SUCCESSORS]) <= 0).all()


def test_boosts_by_hand() -> None:
    table = count_transitions(log())
    bias = np.arange(2 * BUCKETS, dtype=np.float32)
    weight = np.zeros((2 * BUCKETS, 3), np.float32)
    weight[:, 1] = 100.0
    head = TransitionBoosts(weight, bias, 2, table)
    states = np.array([[0, 0, 5], [0, 1, 0]], np.float32)
    (newest, both) = head(states, [np.array([5, 0], np.int32), np.array([0, 1], np.int32)])
    # 7 / 3 is between 2 and 2 √2, 7 / 2 between 2 √2 and 4; 3 is between 2 √2 and 4, 2 is 2.
    assert newest[0].tolist() == [1, 2, 3]
    assert newest[1].tolist() == [2 + PROBABILITY_BUCKETS + 3, *[3 + PROBABILITY_BUCKETS + 2] * 2]
    # After 1, 0 came with certainty, once; then, with further buckets, what followed 0.
    assert both[0].tolist() == [0, 1, 2, 3]
    once = 200.0 + 0 + PROBABILITY_BUCKETS
    further = [200.0 + 2 * BUCKETS + value for value in newest[1]]
    assert both[1].tolist() == [once, *further]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offsets", np.array([0, 3, 2, *[4] * 8])),
        ("offsets", np.array([0, 3, *[4] * 8])),
        ("successors", np.array([1, 2, 10, 0], np.int32)),
        ("counts", np.array([1], np.int32)),
        ("totals", np.array([1], np.int32)),
        ("totals", np.array([6, *[1] * 9], np.int32)),
        ("counts", np.array([3, 2, 2, 0], np.int32)),
        ("offsets", np.array([0, 3, *[4] * 9], np.float64)),
        ("successors", np.array([[1, 2, 3, 0]], np.int32)),
    ],
)
def test_a_table_that_does_not_fit_is_refused(name: str, value: Any) -> None:
    arrays = count_transitions(log()).to_arrays("x")
    again = SuccessorTable.from_arrays(arrays, "x", 10)
    assert again.successors.tolist() == [1, 2, 3, 0]
    with pytest.raises(StorageError, match="does not fit the items"):
        SuccessorTable.from_arrays(arrays | {f"x_{name}": value}, "x", 10)
