"""Which of two runs is better, user by user, and whether chance explains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from recprune.evaluation.metrics import RankedUsers, user_values
from recprune.evaluation.resampling import (
    DEFAULT_CONFIDENCE,
    DEFAULT_RESAMPLES,
    Estimate,
    bootstrap_mean,
    sign_flip_p_value,
)
from recprune.types import InputError

DEFAULT_FLIPS = 10_000
MIN_FLIPS = 10_000  # sign changes: a p-value is 1 / 10,001 at least


@dataclass(frozen=True)
class Comparison:
    """By how much the first of two runs is better on a metric, and whether chance explains it."""

    metric: str
    first: float  # means over users
    second: float
    difference: Estimate  # of first − second
    p_value: float  # two-sided: how likely so large a difference is between equals
    confidence: float


def compare(
    first: RankedUsers,
    second: RankedUsers,
    metric: str,
    *,
    confidence: float = DEFAULT_CONFIDENCE,
    resamples: int = DEFAULT_RESAMPLES,
    flips: int = DEFAULT_FLIPS,
    seed: int = 0,
) -> Comparison:
    """Compare two runs over the same users and relevant items, user by user.

    The p-value is that of the sign-flip randomisation test: the share of random sign changes of the
    users' differences that give at least so large a mean difference, the observed one counted in.
    """
    if flips < MIN_FLIPS:
        raise InputError(f"flips is {flips}, expected at least {MIN_FLIPS}")
    for name, one, other in (
        ("users", first.users, second.users),
        ("numbers of relevant items", first.offsets, second.offsets),
        ("relevant items", first.relevant, second.relevant),
    ):
        if not np.array_equal(one, other):
            raise InputError(f"the two runs have different {name}, or in a different order")
    values = [user_values(ranked, [metric])[metric] for ranked in (first, second)]
    differences = values[0] - values[1]
    return Comparison(
        metric=metric,
        first=float(values[0].mean()),
        second=float(values[1].mean()),
        difference=bootstrap_mean(
            differences, confidence=confidence, resamples=resamples, seed=seed
        ),
        p_value=sign_flip_p_value(differences, flips, seed),
        confidence=confidence,
    )


def verdict(
    name: str,
    model: RankedUsers,
    baselines: Mapping[str, RankedUsers],
    *,
    metric: str = "NDCG@10",
    confidence: float = DEFAULT_CONFIDENCE,
    seed: int = 0,
) -> str:
    """Say in one sentence whether the model beats every baseline, beyond what chance explains.

    If not, the best of the baselines that it does not beat is named.
    """
    if not baselines:
        raise InputError("there are no baselines to compare with")
    comparisons = {
        baseline: compare(model, ranked, metric, confidence=confidence, seed=seed)
        for baseline, ranked in baselines.items()
    }
    # Beating all of them is claimed only if each is beaten, so no test needs a correction.
    unbeaten = {
        baseline: comparison
        for baseline, comparison in comparisons.items()
        if comparison.difference.mean <= 0.0 or not _significant(comparison)
    }
    best, against = max((unbeaten or comparisons).items(), key=lambda pair: pair[1].second)
    figures = (
        f"{against.first:.4f} against {against.second:.4f} "
        f"({in_words(against.difference, confidence)}, p = {against.p_value:.2g})"
    )
    if not unbeaten:
        return f"{name} beats every baseline on {metric}: the best of them is {best}, {figures}."
    if not _significant(against):
        return (
            f"{name} does not beat every baseline on {metric}: "
            f"{best} cannot be told from it, {figures}."
        )
    return f"{name} does not beat every baseline on {metric}: {best} is better, {figures}."


def _significant(comparison: Comparison) -> bool:
    return comparison.p_value < 1.0 - comparison.confidence


def in_words(difference: Estimate, confidence: float) -> str:
    interval = f"{confidence * 100:g} % interval {difference.low:+.4f} to {difference.high:+.4f}"
    return f"{difference.mean:+.4f}, {interval}"
