"""Intervals hold the truth as often as they say; p-values are those of all sign changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from recprune import InputError
from recprune.evaluation.resampling import bootstrap_mean, sign_flip_p_value


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


@pytest.mark.parametrize("distinct", [5, 400])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_intervals_are_those_of_scipy(distinct: int, confidence: float) -> None:
    rng = np.random.default_rng(7)
    values = rng.choice(np.linspace(0, 1, distinct) ** 2, size=400)
    ours = bootstrap_mean(values, confidence=confidence, resamples=20_000)
    theirs = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=20_000,
        confidence_level=confidence,
        method="percentile",
        rng=rng,
    ).confidence_interval
    # Quantiles of 20,000 draws, whose standard error is below a fiftieth of the mean's.
    error = values.std() / math.sqrt(400) / 15
    assert ours.low == pytest.approx(theirs.low, abs=error)
    assert ours.high == pytest.approx(theirs.high, abs=error)


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("decimals", [1, 16])
def test_p_values_are_those_of_scipy(shift: float, decimals: int) -> None:
    rng = np.random.default_rng(3)
    differences = (rng.normal(size=200) * 0.5 + shift).round(decimals)
    theirs = stats.permutation_test(
        (differences, np.zeros(200)),
        lambda first, second, axis: np.mean(first - second, axis=axis),
        permutation_type="samples",  # pairs are exchanged, which flips the sign of a difference
        vectorized=True,
        n_resamples=20_000,
        rng=rng,
    ).pvalue
    ours = sign_flip_p_value(differences, 20_000, seed=1)
    assert ours == pytest.approx(theirs, abs=4 * math.sqrt(0.25 / 20_000) * 2)


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


def test_no_values_have_no_interval() -> None:
    with pytest.raises(InputError, match="no values"):
        bootstrap_mean(np.zeros(0))


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), min_size=1, max_size=9))
def test_p_value_is_that_of_all_sign_changes(differences: list[float]) -> None:
    signs = np.array(np.meshgrid(*[[-1, 1]] * len(differences))).reshape(len(differences), -1).T
    sums = np.abs(signs @ np.array(differences))
    exact = (sums >= abs(sum(differences)) - 1e-12).mean()
    assert sign_flip_p_value(np.array(differences), 20_000, 0) == pytest.approx(exact, abs=0.02)
