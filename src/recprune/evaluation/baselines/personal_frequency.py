"""What the user had most often: the strongest way of counting where people repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.fitting import FittingUsers
from recprune.evaluation.baselines.popularity import Popularity, fill_up
from recprune.types import InputError, Int32Array, Int64Array

DECAYS = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # events: from a sitting to a long history
DEFAULT_DECAY = 30.0  # events, where there are no users to fit it on; the best on gitlog


class PersonalFrequency:
    """What the user had most often, each item once; then what is popular.

    With a `decay` τ, an event counts exp(−age / τ) instead of 1, its age being the number of events
    after it. Of items that count alike the one that the user had last comes first. No two have
    their last event in one place of a history, so that this decides between all of them.
    """

    def __init__(self, train: Interactions, *, decay: float | None = None) -> None:
        if decay is not None and not decay > 0.0:
            raise InputError(f"decay is {decay}, expected more than 0")
        self.name = "personal frequency" + (f", τ = {decay:g}" if decay is not None else "")
        self._decay = decay
        self._popularity = Popularity(train)

    @classmethod
    def fitted(cls, train: Interactions, users: FittingUsers) -> PersonalFrequency:
        """Decay by the τ of `DECAYS` that gives some users of the training log the best NDCG@10.

        Of equally good ones it is the largest; without users it is `DEFAULT_DECAY`.
        """

        def ndcg(decay: float) -> float:
            return users.ndcg(cls(users.train, decay=decay))

        best = max(reversed(DECAYS), key=ndcg) if len(users) else DEFAULT_DECAY
        return cls(train, decay=best)

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return every user's k most frequent items; with `exclude_seen` popularity is left."""
        return fill_up(histories, k, exclude_seen, self._popularity, self._most_frequent)

    def _most_frequent(self, history: Int32Array) -> Int32Array:
        backwards = history[::-1]
        items, last, item_of_event = np.unique(backwards, return_index=True, return_inverse=True)
        ages = np.arange(len(history))
        weights = np.exp(-ages / self._decay) if self._decay is not None else None
        counts = np.bincount(item_of_event, weights)
        return items[np.lexsort((last, -counts))]
