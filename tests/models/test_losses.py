"""The losses against values worked out by hand, and against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recprune import InputError
from recprune.models.losses import (
    agreement,
    bce,
    concentration,
    digits,
    find_loss,
    gbce,
    gbce_beta,
    sampled_softmax,
)
from recprune.models.settings import Loss, TrainingSettings
from recprune.types import Float64Array

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Reference: TypeAlias = Callable[[Float64Array, Float64Array], float]

BETA = 0.3
LN2, LN3 = math.log(2.0), math.log(3.0)


def softplus(x: Float64Array) -> Float64Array:
    return np.logaddexp(0.0, x)


def sigmoid(x: Float64Array) -> Float64Array:
    return np.exp(-softplus(-x))


def reference_gbce(positive: Float64Array, negatives: Float64Array, beta: float) -> float:
    total = beta * softplus(-positive) + softplus(negatives).sum(1)
    return float(total.mean() / (1 + negatives.shape[1]))


def reference_softmax(positive: Float64Array, negatives: Float64Array) -> float:
    # log Σ exp(s − s⁺), with the positive's own difference of 0 in it.
    differences = negatives - positive[:, None]
    return float(np.mean(softplus(np.logaddexp.reduce(differences, axis=1))))


# All of them as means over positions.
LOSSES: dict[str, tuple[LossFunction, Reference]] = {
    "bce": (
        lambda positive, negatives: bce(positive, negatives).mean(),
        lambda positive, negatives: reference_gbce(positive, negatives, 1.0),
    ),
    "gbce": (
        lambda positive, negatives: gbce(positive, negatives, BETA).mean(),
        lambda positive, negatives: reference_gbce(positive, negatives, BETA),
    ),
    "softmax": (
        lambda positive, negatives: sampled_softmax(positive, negatives).mean(),
        reference_softmax,
    ),
}


def in_float64(scores: Tensor) -> Float64Array:
    found: Float64Array = scores.detach().double().numpy()
    return found


# By hand -----------------------------------------------------------------------------------------


def test_bce_by_hand() -> None:
    # σ(0) = 1/2: both decisions cost ln 2, and so does their mean.
    assert bce(torch.zeros(1), torch.zeros(1, 1)).item() == pytest.approx(LN2)
    # σ(ln 3) = 3/4 and σ(−ln 3) = 1/4.
    # Position 1: the positive at ln 3 costs ln 4/3, the negative at 0 costs ln 2.
    # Position 2: the positive at 0 costs ln 2, the negative at ln 3 costs −ln(1 − 3/4) = ln 4.
    # (ln 4/3 + ln 2) / 2 = 0.4904146 and (ln 2 + ln 4) / 2 = 1.0397208
    loss = bce(torch.tensor([LN3, 0.0]), torch.tensor([[0.0], [LN3]]))
    assert loss.tolist() == pytest.approx([0.4904146, 1.0397208], rel=1e-6)


def test_gbce_by_hand() -> None:
    # β = 1/2. The positive at ln 3 costs ½ ln 4/3, the negatives at −ln 3 and 0 cost ln 4/3 and
    # ln 2: (1.5 · 0.2876821 + 0.6931472) / 3 = 0.3748901
    loss = gbce(torch.tensor([LN3]), torch.tensor([[-LN3, 0.0]]), beta=0.5)
    assert loss.item() == pytest.approx(0.3748901, rel=1e-6)


def test_sampled_softmax_by_hand() -> None:
    # Position 1: 6 / (6 + 2 + 1) = 2/3 costs ln 3/2. Position 2: 1 / (1 + 1 + 2) costs ln 4.
    positive = torch.tensor([math.log(6.0), 0.0])
    negatives = torch.tensor([[LN2, 0.0], [0.0, LN2]])
    loss = sampled_softmax(positive, negatives)
    assert loss.tolist() == pytest.approx([0.4054651, 1.3862944], rel=1e-6)


def test_agreement_by_hand() -> None:
    # Split 1: 3 / (3 + 1) costs ln 4/3. Split 2: 1 / (1 + 1) costs ln 2. Their mean: 0.4904146.
    table = torch.tensor([[[LN3, 0.0], [0.0, 0.0]]])
    assert agreement(table, torch.tensor([[0, 1]], dtype=torch.uint8)).item() == pytest.approx(
        0.4904146, rel=1e-6
    )


def test_digits_by_hand() -> None:
    # As above, at a temperature of 1/4.
    table = torch.tensor([[[LN3 / 4, 0.0], [0.0, 0.0]]])
    assert digits(table, torch.tensor([[0, 1]])).item() == pytest.approx(0.4904146, rel=1e-6)


def test_concentration_by_hand() -> None:
    # Split 1: 1 + 1/3 sub-items near the top, split 2: two. (ln 4/3 + ln 2) / 2 = 0.4904146,
    # whatever all scores have in common.
    table = torch.tensor([[[LN3, 0.0], [7.0, 7.0]]])
    assert concentration(table).item() == pytest.approx(0.4904146, rel=1e-6)
    assert concentration(table + 100.0).item() == pytest.approx(0.4904146, rel=1e-5)


def test_bce_is_gbce_without_calibration() -> None:
    positive, negatives = torch.tensor([0.3, -2.0]), torch.tensor([[0.1, 5.0], [-3.0, 0.2]])
    assert torch.equal(bce(positive, negatives), gbce(positive, negatives, beta=1.0))
    assert torch.all(bce(positive, negatives) > gbce(positive, negatives, beta=0.5))


# Against float64 ---------------------------------------------------------------------------------

EXTREMES = [-1e30, -1e4, -80.0, -20.5, -1.0, -1e-3, 0.0, 1e-3, 1.0, 19.5, 20.5, 80.0, 1e4, 1e30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_scores_cost_what_they_cost_in_float64(name: str, dtype: torch.dtype) -> None:
    function, reference = LOSSES[name]
    for positive in EXTREMES:
        for negative in EXTREMES:
            scores = torch.tensor([positive]).to(dtype)
            others = torch.tensor([[negative, 0.0]]).to(dtype)
            loss = function(scores, others)
            assert loss.dtype == torch.float32
            assert torch.isfinite(loss)
            expected = reference(in_float64(scores), in_float64(others))
            assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-37)


@pytest.mark.parametrize("name", LOSSES)
def test_small_differences_between_large_scores_are_not_lost(name: str) -> None:
    function, reference = LOSSES[name]
    for size in (-1e4, -80.0, 80.0, 1e4):
        positive = torch.tensor([size, size + 0.5])
        negatives = torch.tensor([[size, size - 0.25], [size - 1.0, size + 2.0]])
        expected = reference(in_float64(positive), in_float64(negatives))
        assert function(positive, negatives).item() == pytest.approx(expected, rel=1e-6, abs=1e-37)


@pytest.mark.parametrize("name", LOSSES)
def test_a_decision_that_is_nearly_certain_still_costs_something(name: str) -> None:
    function, reference = LOSSES[name]
    positive, negatives = torch.tensor([15.0]), torch.tensor([[-15.0, -17.0]])
    expected = reference(in_float64(positive), in_float64(negatives))
    assert expected > 0.0
    assert function(positive, negatives).item() == pytest.approx(expected, rel=1e-5, abs=0.0)


SCORES = st.floats(-1e4, 1e4, width=32)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    rows=st.integers(1, 4).flatmap(
        lambda k: st.lists(st.lists(SCORES, min_size=k + 1, max_size=k + 1), min_size=1, max_size=5)
    )
)
def test_any_scores_cost_what_they_cost_in_float64(
    name: str, dtype: torch.dtype, rows: list[list[float]]
) -> None:
    function, reference = LOSSES[name]
    scores = torch.tensor(rows).to(dtype)
    loss = function(scores[:, 0], scores[:, 1:])
    expected = reference(in_float64(scores[:, 0]), in_float64(scores[:, 1:]))
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-37)


# Gradients ---------------------------------------------------------------------------------------


def analytic(
    name: str, positive: Float64Array, negatives: Float64Array
) -> tuple[Float64Array, Float64Array]:
    positions, count = negatives.shape
    if name == "softmax":
        # pᵢ − [i is the positive], over positions; −p of all negatives together for the positive.
        everything = np.concatenate([positive[:, None], negatives], axis=1)
        total = np.logaddexp.reduce(everything, axis=1)[:, None]
        shares = np.exp(negatives - total)
        return -shares.sum(1) / positions, shares / positions
    beta = BETA if name == "gbce" else 1.0
    scale = positions * (count + 1)
    return -beta * sigmoid(-positive) / scale, sigmoid(negatives) / scale


@pytest.mark.parametrize("size", [1.0, 80.0, 1e4])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_the_analytic_ones(name: str, size: float) -> None:
    rng = np.random.default_rng(0)
    positive = torch.tensor(rng.uniform(-size, size, 30), dtype=torch.float32, requires_grad=True)
    negatives = torch.tensor(
        rng.uniform(-size, size, (30, 5)), dtype=torch.float32, requires_grad=True
    )
    LOSSES[name][0](positive, negatives).backward()  # type: ignore[no-untyped-call]
    expected = analytic(name, in_float64(positive), in_float64(negatives))
    for scores, wanted in zip((positive, negatives), expected, strict=True):
        assert scores.grad is not None
        assert torch.isfinite(scores.grad).all()
        np.testing.assert_allclose(in_float64(scores.grad), wanted, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_extreme_scores_are_finite(name: str) -> None:
    pairs = [(first, second) for first in EXTREMES for second in EXTREMES]
    positive = torch.tensor([first for first, _ in pairs]).to(torch.bfloat16).requires_grad_()
    negatives = torch.tensor([[second] for _, second in pairs]).to(torch.bfloat16).requires_grad_()
    LOSSES[name][0](positive, negatives).backward()  # type: ignore[no-untyped-call]
    for scores in (positive, negatives):
        assert scores.grad is not None
        assert scores.grad.dtype == torch.bfloat16
        assert torch.isfinite(scores.grad).all()
        assert scores.grad.abs().max() > 0.0


# Calibration -------------------------------------------------------------------------------------


def test_beta_by_hand() -> None:
    # 256 of 10,000 other items: α = 0.0256.
    assert gbce_beta(256, 10_001, 0.0) == pytest.approx(1.0, rel=1e-12)
    assert gbce_beta(256, 10_001, 1.0) == pytest.approx(0.0256, rel=1e-12)
    # 0.0256 · (0.75 · (1 − 39.0625) + 39.0625) = 0.0256 · 10.515625 = 0.2692
    assert gbce_beta(256, 10_001, 0.75) == pytest.approx(0.2692, rel=1e-12)


@given(st.integers(1, 1000), st.integers(2, 10_000_000), st.floats(0.0, 1.0))
def test_beta_lies_between_the_sampling_rate_and_one(
    num_negatives: int, num_items: int, calibration: float
) -> None:
    rate = min(1.0, num_negatives / (num_items - 1))
    beta = gbce_beta(num_negatives, num_items, calibration)
    assert beta == pytest.approx(calibration * rate + 1.0 - calibration, rel=1e-9, abs=1e-12)


def test_more_negatives_than_items_are_no_more_than_all() -> None:
    for calibration in (0.0, 0.75, 1.0):
        assert gbce_beta(256, 100, calibration) == pytest.approx(1.0)


@pytest.mark.parametrize("num_items", [0, 1])
def test_a_catalogue_without_other_items_is_refused(num_items: int) -> None:
    with pytest.raises(InputError, match=f"{num_items} items"):
        gbce_beta(256, num_items, 0.75)


def test_every_loss_that_can_be_set_is_found() -> None:
    positive, negatives = torch.zeros(3), torch.zeros(3, 1)
    for name in set(get_args(Loss)) - {"digits"}:  # which has no negatives
        loss = find_loss(TrainingSettings(loss=name, num_negatives=1), num_items=10)
        assert loss(positive, negatives).shape == (3,)
