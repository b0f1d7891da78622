"""The shape of sub-item scores S as numbers, and how they go with what a search costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.types import Float32Array, Float64Array


@dataclass(frozen=True)
class Statistic:
    """A number that describes S of one user."""

    name: str  # in a table
    words: str
    needs_threshold: bool = False


STATISTICS = {
    "high_30": Statistic(
        "high, 30 %", "sub-items above 30 % of the way from the mean of S to its maximum"
    ),
    "high_50": Statistic(
        "high, 50 %", "sub-items above 50 % of the way from the mean of S to its maximum"
    ),
    "fall": Statistic(
        "fall to half",
        "sub-items to take, best first, until σ is half way from the maxima to the means",
    ),
    "near": Statistic(
        "near the best",
        "sub-items within a fifth of Σ (maximum − mean) of the maximum of their split",
    ),
    "entropy": Statistic(
        "entropy in splits", "entropy of softmax within a split, mean over splits"
    ),
    "entropy_all": Statistic("entropy of all", "entropy of softmax over all of S"),
    "gap": Statistic(
        "best − mean", "best minus mean of a split in its standard deviations, mean over splits"
    ),
    "reach": Statistic("reach", "Σ (maximum − mean) in standard deviations of an item's score"),
    "widest": Statistic(
        "widest split", "share of the widest split in the variance of an item's score"
    ),
    "spread": Statistic("spread", "standard deviation of an item's score"),
    "skewness": Statistic("skewness", "skewness of a split's scores, mean over splits"),
    "slack": Statistic("slack", "(Σ maximum − θ) in standard deviations of an item's score", True),
    "slack_share": Statistic("slack ÷ reach", "(Σ maximum − θ) ÷ Σ (maximum − mean)", True),
    "height": Statistic(
        "height of θ", "(θ − Σ mean) in standard deviations of an item's score", True
    ),
    "fall_to_threshold": Statistic(
        "fall to θ", "sub-items to take, best first, until σ is below θ", True
    ),
}


def statistics_of(
    sub_item_scores: Float32Array, thresholds: Float64Array
) -> dict[str, Float64Array]:
    """Return every statistic for S of many users, [users, M, B], and their thresholds θ."""
    scores = sub_item_scores.astype(np.float64)
    best, mean, deviation = scores.max(2), scores.mean(2), scores.std(2)
    below_best = best[:, :, None] - scores
    reach = (best - mean).sum(1)
    spread = np.sqrt((deviation**2).sum(1))
    unit = np.where(spread > 0, spread, 1.0)
    split_unit = np.where(deviation > 0, deviation, 1.0)
    flat = scores.reshape(len(scores), -1)
    top, middle = flat.max(1), flat.mean(1)
    slack = best.sum(1) - thresholds

    def above(share: float) -> Float64Array:
        level = middle + share * (top - middle)
        counts: Float64Array = (flat > level[:, None]).sum(1).astype(np.float64)
        return counts

    return {
        "high_30": above(0.3),
        "high_50": above(0.5),
        "fall": _sub_items_to_fall(scores, reach / 2),
        "near": (below_best < reach[:, None, None] / 5).sum((1, 2)).astype(np.float64),
        "entropy": _softmax_entropy(scores).mean(1),
        "entropy_all": _softmax_entropy(flat),
        "gap": ((best - mean) / split_unit).mean(1),
        "reach": reach / unit,
        "widest": (deviation**2).max(1) / unit**2,
        "spread": spread,
        "skewness": (((scores - mean[:, :, None]) / split_unit[:, :, None]) ** 3).mean((1, 2)),
        "slack": slack / unit,
        "slack_share": slack / np.where(reach > 0, reach, 1.0),
        "height": (thresholds - mean.sum(1)) / unit,
        "fall_to_threshold": _sub_items_to_fall(scores, slack),
    }


def _softmax_entropy(scores: Float64Array) -> Float64Array:
    """Return the entropy, in nats, of softmax over the last axis."""
    shifted = scores - scores.max(-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(-1)
    entropy: Float64Array = np.log(total) - (weights * shifted).sum(-1) / total
    return entropy


def _sub_items_to_fall(scores: Float64Array, falls: Float64Array) -> Float64Array:
    """Count the sub-items, taken best first over all splits, until σ has fallen by so much.

    That is Algorithm 1 with one sub-item a step, if θ were known from the start.
    """
    counts = []
    for table, fall in zip(scores, falls, strict=True):
        rows = -np.sort(-table, axis=1)
        # With a sub-item, σ falls to the next of its split; with the last, nothing is left.
        drops = -np.diff(rows, axis=1, append=-np.inf).ravel()
        fallen = np.cumsum(drops[np.argsort(-rows, axis=None, kind="stable")])
        counts.append(1.0 + (fallen[:-1] <= fall).sum())
    return np.array(counts)


def spearman(first: NDArray[Any], second: NDArray[Any]) -> float | None:
    """Return the correlation of the ranks, ties sharing their mean; None where one is constant."""
    first_ranks, second_ranks = _mean_ranks(first), _mean_ranks(second)
    if np.ptp(first_ranks) == 0 or np.ptp(second_ranks) == 0:
        return None
    return float(np.corrcoef(first_ranks, second_ranks)[0, 1])


def _mean_ranks(values: NDArray[Any]) -> Float64Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Float64Array = (np.cumsum(counts) - (counts + 1) / 2)[inverse]
    return ranks
