"""What most had lately: where a catalogue drifts, popularity of all times is out of date."""

from __future__ import annotations

from collections.abc import Sequence

from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.fitting import FittingUsers
from recprune.evaluation.baselines.popularity import Popularity, fill_up, most_frequent_first
from recprune.types import InputError, Int32Array, Int64Array

DAYS = (1, 7, 30, 90, 365)
DEFAULT_DAYS = 30  # where there are no users to fit it on
_DAY = 24 * 60 * 60 * 1_000_000  # in the microseconds of a log's times


class RecentPopularity:
    """The items with the most interactions in the last days of training; then what is popular.

    The last days end with the last interaction of the training log, and are the same for every
    user. A log must last longer than a day (`spans_days`).
    """

    def __init__(self, train: Interactions, *, days: int = DEFAULT_DAYS) -> None:
        if days < 1:
            raise InputError(f"days is {days}, expected at least 1")
        if not spans_days(train):
            raise InputError(
                "the training log lasts no longer than a day, or has positions instead of times: "
                "there are no last days to count"
            )
        self.name = f"popularity, last {days} days" if days > 1 else "popularity, last day"
        recent = train.times > train.times.max() - days * _DAY
        self._order = most_frequent_first(train.items[recent], train.num_items)
        self._popularity = Popularity(train)

    @classmethod
    def fitted(
        cls, train: Interactions, users: FittingUsers, *, exclude_seen: bool = False
    ) -> RecentPopularity:
        """Look back over as many of `DAYS` as give users of the training log the best NDCG@10.

        Of equally good spans it is the longest; without users, or where what is left to learn from
        lasts no longer than a day, it is `DEFAULT_DAYS`.
        """

        def ndcg(days: int) -> float:
            return users.ndcg(cls(users.train, days=days), exclude_seen=exclude_seen)

        fits = len(users) and spans_days(users.train)
        return cls(train, days=max(reversed(DAYS), key=ndcg) if fits else DEFAULT_DAYS)

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the k most popular items of the last days for every user."""
        return fill_up(histories, k, exclude_seen, self._popularity, lambda _: self._order)


def spans_days(train: Interactions) -> bool:
    """Whether a log lasts longer than a day.

    One that has positions in place of times does not (they read as seconds), nor one without times.
    """
    return bool(len(train.times)) and bool(train.times.max() - train.times.min() > _DAY)
