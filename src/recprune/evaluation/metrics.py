"""How good recommendations are for each user: metrics over the full catalogue, never over samples.

A metric is a function of the ranks of a user's relevant items, and a line in `METRICS`. Training
judges its validation users by these too, so NumPy is all that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune.evaluation.resampling import in_parts
from recprune.types import Float64Array, InputError, Int64Array, frozen


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


@dataclass(frozen=True, eq=False)
class RelevantRanks:
    """Where the relevant items of some users stand: 1 is the best place, ∞ is not recommended.

    Those of user r are `ranks[offsets[r]:offsets[r + 1]]`, ascending.
    """

    offsets: Int64Array  # [users + 1]
    ranks: Float64Array  # [offsets[-1]]

    @classmethod
    def of_targets(cls, ranks: NDArray[Any]) -> RelevantRanks:
        """Build from the rank of one target per user."""
        return cls(np.arange(len(ranks) + 1), ranks.astype(np.float64))

    @classmethod
    def of_ranked(cls, ranked: RankedUsers) -> RelevantRanks:
        """Look up the relevant items of every user in what was recommended."""
        row_of_item = np.repeat(np.arange(ranked.num_users), ranked.num_relevant)
        ranks = np.empty(len(ranked.relevant))
        for part in in_parts(len(ranks), ranked.k):
            same = ranked.ids[row_of_item[part]] == ranked.relevant[part, None]
            ranks[part] = np.where(same.any(axis=1), same.argmax(axis=1) + 1.0, np.inf)
        return cls(ranked.offsets, ranks[np.lexsort((ranks, row_of_item))])

    @property
    def num_relevant(self) -> Int64Array:
        """R: number of relevant items of every user."""
        return np.diff(self.offsets)

    @property
    def best(self) -> Float64Array:
        """Rank of the best relevant item of every user."""
        return self.ranks[self.offsets[:-1]]


# Metrics: [users] values from 0 to 1 --------------------------------------------------------------


def ndcg(relevant: RelevantRanks, cutoff: int) -> Float64Array:
    """Σ 1 / log₂(rank + 1) over relevant items in the first K, relative to the ideal ranking's.

    Of that the first min(K, R) are relevant.
    """
    gains = np.where(relevant.ranks <= cutoff, 1.0 / np.log2(relevant.ranks + 1.0), 0.0)
    ideal: Float64Array = np.cumsum(1.0 / np.log2(np.arange(2.0, cutoff + 2.0)))
    found = sum_by_user(gains, relevant.offsets)
    return found / ideal.take(np.minimum(relevant.num_relevant, cutoff) - 1)


def recall(relevant: RelevantRanks, cutoff: int) -> Float64Array:
    """Return the share of the relevant items that is in the first K."""
    return sum_by_user(relevant.ranks <= cutoff, relevant.offsets) / relevant.num_relevant


def hit(relevant: RelevantRanks, cutoff: int) -> Float64Array:
    """Return 1 if any relevant item is in the first K, else 0."""
    return (relevant.best <= cutoff).astype(np.float64)


def reciprocal_rank(relevant: RelevantRanks, cutoff: int) -> Float64Array:
    """Return 1 / rank of the first relevant item, 0 if there is none in the first K."""
    return np.where(relevant.best <= cutoff, 1.0 / relevant.best, 0.0)


def average_precision(relevant: RelevantRanks, cutoff: int) -> Float64Array:
    """Σ (relevant items up to rank) / rank over relevant items in the first K, over min(K, R)."""
    # Ranks ascend within a user, so the n-th of them has n relevant items up to it.
    firsts = np.repeat(relevant.offsets[:-1], relevant.num_relevant)
    found_so_far = np.arange(len(relevant.ranks)) - firsts + 1
    precisions = np.where(relevant.ranks <= cutoff, found_so_far / relevant.ranks, 0.0)
    found = sum_by_user(precisions, relevant.offsets)
    return found / np.minimum(relevant.num_relevant, cutoff)


Metric: TypeAlias = Callable[[RelevantRanks, int], Float64Array]
METRICS: dict[str, Metric] = {
    "NDCG": ndcg,
    "Recall": recall,
    "Hit": hit,
    "MRR": reciprocal_rank,
    "MAP": average_precision,
}


def user_values(ranked: RankedUsers, metrics: Sequence[str]) -> dict[str, Float64Array]:
    """Return each metric, by names such as NDCG@10, for every user."""
    parsed = [_parse(metric, ranked.k) for metric in metrics]
    relevant = RelevantRanks.of_ranked(ranked)
    return {
        metric: function(relevant, cutoff)
        for metric, (function, cutoff) in zip(metrics, parsed, strict=True)
    }


def sum_by_user(values: NDArray[Any], offsets: Int64Array) -> Float64Array:
    """Add up values of relevant items for every user."""
    sums: Float64Array = np.add.reduceat(values, offsets[:-1], dtype=np.float64)
    return sums


# Checks ------------------------------------------------------------------------------------------


def check_cutoff(cutoff: int, k: int) -> None:
    if not 1 <= cutoff <= k:
        raise InputError(f"cutoff {cutoff} of recommendations with {k} places, expected 1 to {k}")


def _parse(metric: str, k: int) -> tuple[Metric, int]:
    name, _, cutoff = metric.partition("@")
    if name not in METRICS or not cutoff.isdecimal():
        known = ", ".join(METRICS)
        raise InputError(f"metric is {metric!r}, expected one of {known} and a cutoff: NDCG@10")
    check_cutoff(int(cutoff), k)
    return METRICS[name], int(cutoff)


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
