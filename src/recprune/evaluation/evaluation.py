"""How good recommendations are: metrics over the full catalogue, never over sampled items.

Every figure comes with a bootstrap interval over users, and two runs over the same users are
compared user by user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune.data.interactions import Interactions
from recprune.evaluation.resampling import (
    DEFAULT_CONFIDENCE,
    DEFAULT_RESAMPLES,
    Estimate,
    bootstrap_mean,
    in_parts,
    sign_flip_p_value,
)
from recprune.types import (
    Float64Array,
    InputError,
    Int64Array,
    Json,
    frozen,
)

DEFAULT_CUTOFFS = (10,)
DEFAULT_FLIPS = 10_000
DEFAULT_COLUMNS = ("NDCG@10", "Recall@10", "MRR@10", "Coverage@10", "Bias@10")
MIN_FLIPS = 10_000


@dataclass(frozen=True, eq=False)
class RankedUsers:
    """What was recommended to each of some users, and which items were relevant to them.

    Row r of `ids` is the recommendation for user `users[r]`, best first, padded with −1; relevant
    to that user are `relevant[offsets[r]:offsets[r + 1]]`, at least one item and each once.
    """

    ids: Int64Array  # [users, k]
    users: Int64Array  # [users]
    offsets: Int64Array  # [users + 1]
    relevant: Int64Array  # [offsets[-1]]

    def __post_init__(self) -> None:
        for name, dimensions in (("ids", 2), ("users", 1), ("offsets", 1), ("relevant", 1)):
            array = getattr(self, name)
            if array.dtype != np.int64 or array.ndim != dimensions:
                raise InputError(
                    f"{name} is {array.dtype}[{array.ndim}-D], expected int64[{dimensions}-D]"
                )
            frozen(array)
        if len(self.ids) == 0:
            raise InputError("ids has no rows: there are no users to evaluate")
        if len(self.users) != len(self.ids):
            raise InputError(f"{len(self.users)} users but {len(self.ids)} rows of ids")
        _check_relevant(self.offsets, self.relevant, len(self.ids))
        _check_ids(self.ids)

    @classmethod
    def of_targets(
        cls, ids: NDArray[Any], targets: NDArray[Any], *, users: NDArray[Any] | None = None
    ) -> RankedUsers:
        """Build from one target per user; without `users` they are called 0, 1, 2 …"""
        return cls.of_relevant(ids, np.arange(len(targets) + 1), targets, users=users)

    @classmethod
    def of_relevant(
        cls,
        ids: NDArray[Any],
        offsets: NDArray[Any],
        items: NDArray[Any],
        *,
        users: NDArray[Any] | None = None,
    ) -> RankedUsers:
        """Build from several relevant items per user: `items[offsets[r]:offsets[r + 1]]`."""
        return cls(
            _as_int64(ids, "ids"),
            np.arange(len(ids)) if users is None else _as_int64(users, "users"),
            _as_int64(offsets, "offsets"),
            _as_int64(items, "items"),
        )

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.ids)

    @property
    def k(self) -> int:
        """Number of places in every recommendation: the largest cutoff that can be judged."""
        return int(self.ids.shape[1])

    @property
    def num_relevant(self) -> Int64Array:
        """Number of relevant items of every user."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Evaluation:
    """The figures of one run.

    Coverage@K is the share of the catalogue that is recommended to anybody in the first K places.
    Bias@K is the popularity of what is recommended relative to that of what was wanted,

        mean over users u of mean over i in the first K of u of p(i)
        ────────────────────────────────────────────────────────────
        mean over users u of mean over the items i relevant to u of p(i)

    with p(i) the share of training interactions that fall on item i; users without any
    recommendation are left out of the upper mean. It is 1 where both are equally popular, above 1
    where popular items are preferred, and None where nothing is recommended or nothing relevant has
    any training interactions.
    """

    name: str
    num_users: int
    confidence: float
    resamples: int
    seed: int
    metrics: Mapping[str, Estimate]  # by names such as NDCG@10
    coverage: Mapping[int, float]  # by cutoff
    popularity_bias: Mapping[int, float | None]  # by cutoff

    def to_json(self) -> Json:
        """Return the figures as what `json` can write."""
        values = asdict(self)
        for name in ("coverage", "popularity_bias"):
            values[name] = {str(cutoff): value for cutoff, value in values[name].items()}
        return values

    @classmethod
    def from_json(cls, values: Json) -> Evaluation:
        """Return the evaluation that `to_json` wrote."""
        expected = {field.name for field in fields(cls)}
        if set(values) != expected:
            wrong = ", ".join(sorted(set(values) ^ expected))
            raise InputError(f"an evaluation has missing or unknown entries: {wrong}")
        try:
            return cls(
                **values
                | {
                    "metrics": {name: Estimate(**v) for name, v in values["metrics"].items()},
                    "coverage": {int(k): v for k, v in values["coverage"].items()},
                    "popularity_bias": {int(k): v for k, v in values["popularity_bias"].items()},
                }
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError(f"an evaluation cannot be read: {error}") from None


@dataclass(frozen=True)
class Comparison:
    """By how much the first of two runs is better on a metric, and whether chance explains it."""

    metric: str
    first: float  # means over users
    second: float
    difference: Estimate  # of first − second
    p_value: float  # two-sided: how likely so large a difference is between equals
    confidence: float


# Metrics -----------------------------------------------------------------------------------------


def user_values(ranked: RankedUsers, metrics: Sequence[str]) -> dict[str, Float64Array]:
    """Return each metric, by names such as NDCG@10, for every user: [users] values from 0 to 1.

    With R relevant items, gain 1 for each and rank 1 for the best place:

    - NDCG@K: Σ 1 / log₂(rank + 1) over relevant items in the first K, divided by the same sum of
      the ideal ranking, which has min(K, R) of them in front.
    - Recall@K: the share of the relevant items that is in the first K.
    - Hit@K: 1 if any is, else 0.
    - MRR@K: 1 / rank of the first, 0 if there is none in the first K.
    - MAP@K: Σ (relevant items up to rank) / rank over relevant items in the first K, divided by
      min(K, R).
    """
    parsed = [_parse(metric, ranked.k) for metric in metrics]
    ranks = _sorted_ranks(ranked)
    return {
        metric: function(ranked, ranks, cutoff)
        for metric, (function, cutoff) in zip(metrics, parsed, strict=True)
    }


def _ndcg(ranked: RankedUsers, ranks: Float64Array, cutoff: int) -> Float64Array:
    gains = np.where(ranks <= cutoff, 1.0 / np.log2(ranks + 1.0), 0.0)
    ideal: Float64Array = np.cumsum(1.0 / np.log2(np.arange(2.0, cutoff + 2.0)))
    return _sums(ranked, gains) / ideal.take(np.minimum(ranked.num_relevant, cutoff) - 1)


def _recall(ranked: RankedUsers, ranks: Float64Array, cutoff: int) -> Float64Array:
    return _sums(ranked, ranks <= cutoff) / ranked.num_relevant


def _hit(ranked: RankedUsers, ranks: Float64Array, cutoff: int) -> Float64Array:
    return (ranks[ranked.offsets[:-1]] <= cutoff).astype(np.float64)


def _mrr(ranked: RankedUsers, ranks: Float64Array, cutoff: int) -> Float64Array:
    best = ranks[ranked.offsets[:-1]]
    return np.where(best <= cutoff, 1.0 / best, 0.0)


def _map(ranked: RankedUsers, ranks: Float64Array, cutoff: int) -> Float64Array:
    # Ranks ascend within a user, so the n-th of them has n relevant items up to it.
    found_so_far = np.arange(len(ranks)) - np.repeat(ranked.offsets[:-1], ranked.num_relevant) + 1
    precisions = np.where(ranks <= cutoff, found_so_far / ranks, 0.0)
    return _sums(ranked, precisions) / np.minimum(ranked.num_relevant, cutoff)


_Metric: TypeAlias = Callable[[RankedUsers, Float64Array, int], Float64Array]
_METRICS: dict[str, _Metric] = {
    "NDCG": _ndcg,
    "Recall": _recall,
    "Hit": _hit,
    "MRR": _mrr,
    "MAP": _map,
}


def _parse(metric: str, k: int) -> tuple[_Metric, int]:
    name, _, cutoff = metric.partition("@")
    if name not in _METRICS or not cutoff.isdecimal():
        known = ", ".join(_METRICS)
        raise InputError(f"metric is {metric!r}, expected one of {known} and a cutoff: NDCG@10")
    _check_cutoff(int(cutoff), k)
    return _METRICS[name], int(cutoff)


def _check_cutoff(cutoff: int, k: int) -> None:
    if not 1 <= cutoff <= k:
        raise InputError(f"cutoff {cutoff} of recommendations with {k} places, expected 1 to {k}")


def _sums(ranked: RankedUsers, values: NDArray[Any]) -> Float64Array:
    """Add up values of relevant items for every user."""
    sums: Float64Array = np.add.reduceat(values, ranked.offsets[:-1], dtype=np.float64)
    return sums


def _sorted_ranks(ranked: RankedUsers) -> Float64Array:
    """Return the rank of every relevant item, ascending within each user, ∞ if not recommended."""
    row_of_item = np.repeat(np.arange(ranked.num_users), ranked.num_relevant)
    ranks = np.empty(len(ranked.relevant))
    for part in in_parts(len(ranks), ranked.k):
        same = ranked.ids[row_of_item[part]] == ranked.relevant[part, None]
        ranks[part] = np.where(same.any(axis=1), same.argmax(axis=1) + 1.0, np.inf)
    return ranks[np.lexsort((ranks, row_of_item))]


# Evaluation --------------------------------------------------------------------------------------


def evaluate(
    ranked: RankedUsers,
    train: Interactions,
    *,
    name: str,
    cutoffs: Sequence[int] = DEFAULT_CUTOFFS,
    confidence: float = DEFAULT_CONFIDENCE,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> Evaluation:
    """Judge one run, called `name`: every metric at every cutoff, with bootstrap intervals.

    `train` is what the run learned from: its catalogue is what is covered, its interactions say
    which items are popular.
    """
    if len(cutoffs) == 0:
        raise InputError("cutoffs is empty, expected at least one")
    for cutoff in cutoffs:
        _check_cutoff(cutoff, ranked.k)
    for array, items in (("ids", ranked.ids), ("relevant", ranked.relevant)):
        if items.max(initial=-1) >= train.num_items:
            raise InputError(
                f"{array} holds item {items.max()}, but the catalogue has {train.num_items}"
            )
    metrics = [f"{metric}@{cutoff}" for cutoff in cutoffs for metric in _METRICS]
    popularity = np.bincount(train.items, minlength=train.num_items).astype(np.float64)
    return Evaluation(
        name=name,
        num_users=ranked.num_users,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
        metrics={
            metric: bootstrap_mean(values, confidence=confidence, resamples=resamples, seed=seed)
            for metric, values in user_values(ranked, metrics).items()
        },
        coverage={cutoff: _coverage(ranked, cutoff, train.num_items) for cutoff in cutoffs},
        popularity_bias={cutoff: _bias(ranked, cutoff, popularity) for cutoff in cutoffs},
    )


def _coverage(ranked: RankedUsers, cutoff: int, num_items: int) -> float:
    recommended = np.zeros(num_items + 1, np.bool_)  # the last place is that of −1
    recommended[ranked.ids[:, :cutoff]] = True
    return float(recommended[:-1].mean())


def _bias(ranked: RankedUsers, cutoff: int, popularity: Float64Array) -> float | None:
    """Return Bias@K. Shares and counts give the same quotient, so `popularity` is in counts."""
    wanted = (_sums(ranked, popularity[ranked.relevant]) / ranked.num_relevant).mean()
    places = np.count_nonzero(ranked.ids[:, :cutoff] >= 0, axis=1)
    if wanted == 0.0 or not places.any():
        return None
    recommended = np.empty(ranked.num_users)
    for part in in_parts(ranked.num_users, cutoff):
        ids = ranked.ids[part, :cutoff]
        recommended[part] = np.where(ids >= 0, popularity[ids], 0.0).sum(axis=1)
    return float((recommended[places > 0] / places[places > 0]).mean() / wanted)


# Comparison --------------------------------------------------------------------------------------


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


# In words ----------------------------------------------------------------------------------------


def evaluation_rows(
    evaluations: Sequence[Evaluation], columns: Sequence[str] = DEFAULT_COLUMNS
) -> list[tuple[str, ...]]:
    """Return one row per run: its name, then each column; the header is `("", *columns)`.

    Columns are metrics, Coverage@K and Bias@K; metrics are shown with their intervals.
    """
    return [
        (evaluation.name, *(_cell(evaluation, column) for column in columns))
        for evaluation in evaluations
    ]


def _cell(evaluation: Evaluation, column: str) -> str:
    if column in evaluation.metrics:
        estimate = evaluation.metrics[column]
        return f"{estimate.mean:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"
    for cutoff, share in evaluation.coverage.items():
        if column == f"Coverage@{cutoff}":
            return f"{share:.3%}"
    for cutoff, bias in evaluation.popularity_bias.items():
        if column == f"Bias@{cutoff}":
            return "–" if bias is None else f"{bias:.2f}"
    raise InputError(f"{evaluation.name} has no {column}; it was not evaluated at that cutoff")


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
        f"({_in_words(against.difference, confidence)}, p = {against.p_value:.2g})"
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


def _in_words(difference: Estimate, confidence: float) -> str:
    interval = f"{confidence * 100:g} % interval {difference.low:+.4f} to {difference.high:+.4f}"
    return f"{difference.mean:+.4f}, {interval}"


# Checks ------------------------------------------------------------------------------------------


def _as_int64(array: NDArray[Any], name: str) -> Int64Array:
    """Return a copy, for what is frozen must not be the caller's."""
    if array.dtype.kind not in "iu":
        raise InputError(f"{name} is {array.dtype}, expected integers")
    return array.astype(np.int64)


def _check_relevant(offsets: Int64Array, relevant: Int64Array, num_users: int) -> None:
    if len(offsets) != num_users + 1 or offsets[0] != 0 or offsets[-1] != len(relevant):
        raise InputError(
            f"offsets must have {num_users + 1} entries, "
            f"from 0 to the number of relevant items, {len(relevant)}"
        )
    counts = np.diff(offsets)
    if counts.min() < 1:
        raise InputError(f"row {int((counts < 1).argmax())} has no relevant items")
    if relevant.min() < 0:
        place = int((relevant < 0).argmax())
        raise InputError(f"relevant[{place}] is {relevant[place]}, expected an item id")
    rows = np.repeat(np.arange(num_users), counts)
    order = np.lexsort((relevant, rows))
    twice = (np.diff(rows[order]) == 0) & (np.diff(relevant[order]) == 0)
    if twice.any():
        place = int(order[twice.argmax()])
        raise InputError(f"row {rows[place]} has the relevant item {relevant[place]} twice")


def _check_ids(ids: Int64Array) -> None:
    if ids.shape[1] == 0:
        raise InputError("ids has no columns: nothing is recommended to anybody")
    for part in in_parts(len(ids), ids.shape[1]):
        rows = ids[part]
        if rows.min() < -1:
            row, place = np.argwhere(rows < -1)[0]
            raise InputError(
                f"ids[{part.start + row}, {place}] is {rows[row, place]}, expected an item id or −1"
            )
        behind_padding = (rows[:, 1:] >= 0) & (rows[:, :-1] < 0)
        if behind_padding.any():
            row, place = np.argwhere(behind_padding)[0]
            raise InputError(f"ids[{part.start + row}, {place + 1}] is an item behind padding")
        ordered = np.sort(rows, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if twice.any():
            row, place = np.argwhere(twice)[0]
            raise InputError(f"ids[{part.start + row}] has item {ordered[row, place]} twice")
