"""How good one run is: every metric with its interval, how much is covered, what is preferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from recprune.data.interactions import Interactions
from recprune.evaluation.metrics import (
    METRICS,
    RankedUsers,
    check_cutoff,
    sum_by_user,
    user_values,
)
from recprune.evaluation.resampling import (
    DEFAULT_CONFIDENCE,
    DEFAULT_RESAMPLES,
    Estimate,
    bootstrap_mean,
    in_parts,
)
from recprune.types import Float64Array, InputError, Int32Array, Int64Array, Json, needs_extra

if TYPE_CHECKING:
    import polars as pl

# Of users, by their targets.
Group = Literal["repeats", "others", "cold", "warm"]

DEFAULT_CUTOFFS = (10,)
DEFAULT_COLUMNS = ("NDCG@10", "Recall@10", "MRR@10", "Coverage@10", "Bias@10")


@dataclass(frozen=True)
class UserGroup:
    """The figures of some of the users of a run."""

    num_users: int
    metrics: Mapping[str, Estimate]  # by names such as NDCG@10; empty without users

    @classmethod
    def from_json(cls, values: Json | None) -> UserGroup | None:
        """Return the group that `Evaluation.to_json` wrote, None if there was none."""
        return None if values is None else cls(values["num_users"], _estimates(values["metrics"]))


@dataclass(frozen=True)
class Evaluation:
    """The figures of one run.

    Where histories are known, users are also judged in two groups: those whose target is a
    *repeat*, being in their own history, and the others, whose target is new to them. Where every
    user has one target, they are also told apart by whether that is a *cold* item, which no
    training interaction has, or a warm one. The mean over all users hides which of these a run is
    good at. Targets that the catalogue does not have are cold, and count as not found.

    Coverage@K is the share of the catalogue that is recommended to any user in the first K places.
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
    repeats: UserGroup | None = None  # users whose target is in their own history
    others: UserGroup | None = None  # users whose target is new to them
    cold: UserGroup | None = None  # users whose target has no training interaction
    warm: UserGroup | None = None  # users whose target has
    unknown_targets: int = 0  # that the catalogue does not have: nothing could find them

    @property
    def cold_share(self) -> float | None:
        """The share of users whose target has no training interaction; None where not known."""
        return None if self.cold is None else self.cold.num_users / self.num_users

    @property
    def repeat_share(self) -> float | None:
        """The share of users whose target is in their own history; None where it is not known."""
        return None if self.repeats is None else self.repeats.num_users / self.num_users

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each figure: run, metric, mean, low and high.

        Metrics with their intervals come first, then Coverage@K and Bias@K, which have none.
        """
        with needs_extra("data"):
            import polars as pl
        rows: list[tuple[str, float | None, float | None, float | None]] = []
        rows += [(name, one.mean, one.low, one.high) for name, one in self.metrics.items()]
        for name, by_cutoff in (("Coverage", self.coverage), ("Bias", self.popularity_bias)):
            rows += [(f"{name}@{k}", mean, None, None) for k, mean in by_cutoff.items()]
        numbers = dict.fromkeys(("mean", "low", "high"), pl.Float64)
        frame = pl.DataFrame(rows, schema={"metric": pl.String, **numbers}, orient="row")
        return frame.select(pl.lit(self.name).alias("run"), pl.all())

    def to_json(self) -> Json:
        """Return the figures as what `json` can write."""
        values = asdict(self)
        for name in ("coverage", "popularity_bias"):
            values[name] = {str(cutoff): value for cutoff, value in values[name].items()}
        return values

    @classmethod
    def from_json(cls, values: Json) -> Evaluation:
        """Return the evaluation that `to_json` wrote; older ones do not tell users apart."""
        expected = {field.name for field in fields(cls)}
        wrong = (set(values) | {*get_args(Group), "unknown_targets"}) ^ expected
        if wrong:
            raise InputError(
                f"an evaluation has missing or unknown entries: {', '.join(sorted(wrong))}"
            )
        try:
            return cls(
                **values
                | {
                    "metrics": _estimates(values["metrics"]),
                    "coverage": {int(k): v for k, v in values["coverage"].items()},
                    "popularity_bias": {int(k): v for k, v in values["popularity_bias"].items()},
                    **{name: UserGroup.from_json(values.get(name)) for name in get_args(Group)},
                }
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"an evaluation cannot be read: {error}") from None


def _estimates(values: Json) -> dict[str, Estimate]:
    return {name: Estimate(**estimate) for name, estimate in values.items()}


def evaluate(
    ranked: RankedUsers,
    train: Interactions,
    *,
    name: str,
    histories: Sequence[Int32Array] | None = None,
    cutoffs: Sequence[int] = DEFAULT_CUTOFFS,
    confidence: float = DEFAULT_CONFIDENCE,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> Evaluation:
    """Judge one run, called `name`: every metric at every cutoff, with bootstrap intervals.

    `train` is what the run learned from: its catalogue is what is covered, its interactions say
    which items are popular. With the `histories` that the run was asked about, repeats are told
    apart; every user then has one target.
    """
    if ranked.relevant.max(initial=-1) >= train.num_items:
        raise InputError(
            f"relevant holds item {ranked.relevant.max()}, but the catalogue has {train.num_items}"
        )
    return evaluate_by_counts(
        ranked,
        np.bincount(train.items, minlength=train.num_items),
        name=name,
        histories=histories,
        cutoffs=cutoffs,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def evaluate_by_counts(
    ranked: RankedUsers,
    counts: Int64Array,
    *,
    name: str,
    histories: Sequence[Int32Array] | Sequence[Int64Array] | None = None,
    cutoffs: Sequence[int] = DEFAULT_CUTOFFS,
    confidence: float = DEFAULT_CONFIDENCE,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> Evaluation:
    """Do as `evaluate` does, knowing the training interactions of every item, [num_items].

    Relevant items, and those of histories, may have higher numbers: each is then one that the
    catalogue does not have.
    """
    num_items = len(counts)
    if len(cutoffs) == 0:
        raise InputError("cutoffs is empty, expected at least one")
    for cutoff in cutoffs:
        check_cutoff(cutoff, ranked.k)
    if ranked.ids.max(initial=-1) >= num_items:
        raise InputError(f"ids holds item {ranked.ids.max()}, but the catalogue has {num_items}")
    metrics = [f"{metric}@{cutoff}" for cutoff in cutoffs for metric in METRICS]
    values = user_values(ranked, metrics)
    popularity = counts.astype(np.float64)
    wanted = np.append(popularity, 0.0)[np.minimum(ranked.relevant, num_items)]

    def estimates(users: NDArray[np.bool_]) -> dict[str, Estimate]:
        return {
            metric: bootstrap_mean(
                of_users[users], confidence=confidence, resamples=resamples, seed=seed
            )
            for metric, of_users in values.items()
        }

    def group(users: NDArray[np.bool_]) -> UserGroup:
        count = int(np.count_nonzero(users))
        return UserGroup(count, estimates(users) if count else {})

    repeated = None if histories is None else _repeated(ranked, histories)
    has_one = bool((ranked.num_relevant == 1).all())
    is_cold = wanted == 0 if has_one else None
    return Evaluation(
        name=name,
        num_users=ranked.num_users,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
        metrics=estimates(np.ones(ranked.num_users, np.bool_)),
        coverage={cutoff: _coverage(ranked, cutoff, num_items) for cutoff in cutoffs},
        popularity_bias={cutoff: _bias(ranked, cutoff, popularity, wanted) for cutoff in cutoffs},
        repeats=None if repeated is None else group(repeated),
        others=None if repeated is None else group(~repeated),
        cold=None if is_cold is None else group(is_cold),
        warm=None if is_cold is None else group(~is_cold),
        unknown_targets=int(np.count_nonzero(ranked.relevant >= num_items)),
    )


def _repeated(
    ranked: RankedUsers, histories: Sequence[Int32Array] | Sequence[Int64Array]
) -> NDArray[np.bool_]:
    """Return which users' targets are in their own histories."""
    if len(histories) != ranked.num_users:
        raise InputError(f"{len(histories)} histories but {ranked.num_users} users")
    if ranked.num_relevant.max() > 1:
        row = int((ranked.num_relevant > 1).argmax())
        raise InputError(
            f"row {row} has {ranked.num_relevant[row]} relevant items: repeats are told apart for "
            "one target of each user"
        )
    pairs = zip(ranked.relevant.tolist(), histories, strict=True)
    return np.array([bool((history == target).any()) for target, history in pairs])


def _coverage(ranked: RankedUsers, cutoff: int, num_items: int) -> float:
    recommended = np.zeros(num_items + 1, np.bool_)  # the last place is that of −1
    recommended[ranked.ids[:, :cutoff]] = True
    return float(recommended[:-1].mean())


def _bias(
    ranked: RankedUsers, cutoff: int, popularity: Float64Array, of_relevant: Float64Array
) -> float | None:
    """Return Bias@K. Shares and counts give the same quotient, so popularity is in counts."""
    wanted = (sum_by_user(of_relevant, ranked.offsets) / ranked.num_relevant).mean()
    places = np.count_nonzero(ranked.ids[:, :cutoff] >= 0, axis=1)
    if wanted == 0.0 or not places.any():
        return None
    recommended = np.empty(ranked.num_users)
    for part in in_parts(ranked.num_users, cutoff):
        ids = ranked.ids[part, :cutoff]
        recommended[part] = np.where(ids >= 0, popularity[ids], 0.0).sum(axis=1)
    return float((recommended[places > 0] / places[places > 0]).mean() / wanted)


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


def mean_rows(evaluations: Sequence[Evaluation], columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the rows of `evaluation_rows` without intervals."""
    return [
        (
            evaluation.name,
            *(
                f"{evaluation.metrics[column].mean:.4f}"
                if column in evaluation.metrics
                else _cell(evaluation, column)
                for column in columns
            ),
        )
        for evaluation in evaluations
    ]


def group_rows(
    evaluations: Sequence[Evaluation], group: Group, metrics: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return one row per run, over a group of its users: its name, then each metric."""
    rows = []
    for evaluation in evaluations:
        users: UserGroup | None = getattr(evaluation, group)
        if users is None:
            several = group in ("cold", "warm")
            why = "for several targets of a user" if several else "without histories"
            raise InputError(f"{evaluation.name} was evaluated {why}")
        if not users.num_users:
            raise InputError(f"{evaluation.name} has no users whose targets are {group}")
        rows.append((evaluation.name, *(_interval(users.metrics[metric]) for metric in metrics)))
    return rows


def _interval(estimate: Estimate) -> str:
    return f"{estimate.mean:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"


def _cell(evaluation: Evaluation, column: str) -> str:
    if column in evaluation.metrics:
        return _interval(evaluation.metrics[column])
    for cutoff, share in evaluation.coverage.items():
        if column == f"Coverage@{cutoff}":
            return f"{share:.3%}"
    for cutoff, bias in evaluation.popularity_bias.items():
        if column == f"Bias@{cutoff}":
            return "–" if bias is None else f"{bias:.2f}"
    raise InputError(f"{evaluation.name} has no {column}; it was not evaluated at that cutoff")
