"""The coordinate search ends where no single change is better, and a slow twin agrees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from recprune.recommender.newcomers.best_code import TOLERANCE, Passers, best_code
from recprune.types import Float64Array, Int64Array


class Case(NamedTuple):
    linear: Float64Array  # [M, B]
    scores: Float64Array  # [states, M, B]
    rivals: Float64Array
    exposure: float

    @property
    def passers(self) -> Passers:
        return Passers.of(self.scores, self.rivals)

    def slow_objective(self, code: Int64Array) -> float:
        """Return the objective, word by word."""
        expected = 0.0
        for state, rivals in zip(self.scores, self.rivals, strict=True):
            expected += np.exp(sum(state[m, b] for m, b in enumerate(code)) - rivals)
        linear = sum(self.linear[m, b] for m, b in enumerate(code))
        return float(linear - self.exposure * expected / len(self.scores))


def random_case(rng: np.random.Generator) -> Case:
    splits, sub_items, states = (int(rng.integers(1, most)) for most in (6, 9, 12))
    scale = float(rng.choice([0.1, 1.0, 5.0]))
    scores = (scale * rng.standard_normal((states, splits, sub_items))).round(
        int(rng.integers(0, 4))  # few decimals: ties
    )
    linear = (scale * rng.standard_normal((splits, sub_items))).round(1)
    rivals = scale * rng.standard_normal(states)
    return Case(linear, scores, rivals, float(rng.choice([0.0, 0.1, 1.0, 100.0])))


@pytest.mark.parametrize("seed", range(40))
def test_no_single_change_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(10):
        case = random_case(rng)
        code, value = best_code(case.linear, case.passers, case.exposure)
        slow = case.slow_objective(code)
        room = TOLERANCE * (2.0 + 2.0 * abs(slow))
        assert value == pytest.approx(slow, abs=room, rel=1e-9)
        for split in range(case.linear.shape[0]):
            for sub_item_id in range(case.linear.shape[1]):
                other = code.copy()
                other[split] = sub_item_id
                assert case.slow_objective(other) <= slow + room


@pytest.mark.parametrize("seed", range(10))
def test_it_is_never_worse_than_where_it_begins(seed: int) -> None:
    case = random_case(np.random.default_rng(1000 + seed))
    begin = case.linear.argmax(axis=1)
    _, value = best_code(case.linear, case.passers, case.exposure)
    assert value >= case.slow_objective(begin) - 1e-9 * (1.0 + abs(value))


def test_without_passers_each_split_takes_its_best() -> None:
    linear = np.array([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    code, value = best_code(linear, None, 7.0)
    assert code.tolist() == [1, 0]  # the lowest on a tie
    assert value == 7.0


def test_one_split_is_searched_exhaustively() -> None:
    rng = np.random.default_rng(3)
    case = Case(rng.standard_normal((1, 50)), rng.standard_normal((4, 1, 50)), np.zeros(4), 2.0)
    code, _ = best_code(case.linear, case.passers, case.exposure)
    values = [case.slow_objective(np.array([sub_item_id])) for sub_item_id in range(50)]
    assert code.tolist() == [int(np.argmax(values))]


def test_what_suits_everybody_does_not_win() -> None:
    """Of two sub-items that suit the taker alike, the one that others do not care for is taken."""
    scores = np.zeros((5, 1, 2))
    scores[1:, 0, 0] = 3.0  # four others like the first as well
    scores[0, 0, :] = 3.0
    code, _ = best_code(scores[0], Passers.of(scores, np.zeros(5)), 1.0)
    assert code.tolist() == [1]


def test_enormous_scores_end_too() -> None:
    scores = np.random.default_rng(5).choice([1e6, -1e6, 700.0, 3.0], (3, 4, 20))
    with np.errstate(all="raise", under="ignore"):
        code, value = best_code(scores[0], Passers.of(scores, np.zeros(3)), 10.0)
    assert np.isfinite(value)
    assert (code < 20).all()
