"""How sure a mean over users is: the bootstrap, and the randomisation test by sign flips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from recprune.types import Float64Array, InputError, random_generator

DEFAULT_CONFIDENCE = 0.95
DEFAULT_RESAMPLES = 10_000
_NUMBERS_AT_ONCE = 1 << 21  # of any temporary array: 16 MB as float64


@dataclass(frozen=True)
class Estimate:
    """A mean over users, and the interval in which it lies with the evaluation's confidence."""

    mean: float
    low: float
    high: float


def bootstrap_mean(
    values: Float64Array,
    *,
    confidence: float = DEFAULT_CONFIDENCE,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Return the mean of per-user values and its bootstrap percentile interval."""
    if not 0.0 < confidence < 1.0:
        raise InputError(f"confidence is {confidence}, expected between 0 and 1")
    if resamples < 1:
        raise InputError(f"resamples is {resamples}, expected at least 1")
    if len(values) == 0:
        raise InputError("there are no values to take the mean of")
    distinct, counts = np.unique(values, return_counts=True)
    few = _are_few(distinct, values)
    rng = random_generator(seed)
    means = np.empty(resamples)
    for part in in_parts(resamples, len(distinct) if few else len(values)):
        rows = part.stop - part.start
        if few:
            # Users with equal values are interchangeable: how often each is drawn decides.
            drawn = rng.multinomial(len(values), counts / len(values), size=rows)
            means[part] = (drawn * distinct).sum(axis=1) / len(values)
        else:
            means[part] = values[rng.integers(0, len(values), (rows, len(values)))].mean(axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Estimate(float(values.mean()), float(low), float(high))


def sign_flip_p_value(differences: Float64Array, flips: int, seed: int) -> float:
    """Return the share of random sign changes that give at least the observed sum."""
    sizes, counts = np.unique(np.abs(differences), return_counts=True)
    # Sums that are equal but for rounding are as large as the observed one.
    observed = abs(differences.sum()) - 1e-12 * np.abs(differences).sum()
    few = _are_few(sizes, differences)
    rng = random_generator(seed)
    as_large = 0
    for part in in_parts(flips, len(sizes) if few else len(differences)):
        rows = part.stop - part.start
        if few:
            # Of c users with differences of one size, as many keep it as of c coins show heads.
            kept = rng.binomial(counts, 0.5, size=(rows, len(sizes)))
            sums = ((2 * kept - counts) * sizes).sum(axis=1)
        else:
            keep = rng.random((rows, len(differences))) < 0.5
            sums = np.where(keep, differences, -differences).sum(axis=1)
        as_large += int(np.count_nonzero(np.abs(sums) >= observed))
    return (as_large + 1) / (flips + 1)


def _are_few(distinct: Float64Array, values: Float64Array) -> bool:
    """Whether counts of distinct values are cheaper to draw than the values: ten times, each."""
    return 10 * len(distinct) <= len(values)


def in_parts(rows: int, width: int) -> Iterator[slice]:
    """Divide rows of a wide array into slices of limited size."""
    step = max(1, _NUMBERS_AT_ONCE // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
