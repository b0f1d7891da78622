"""Users to fit a baseline's setting on.

They are held out from the training log just as the test users were from the whole log. The
validation users of a temporal hold-out would not do: each gives up the last item of the training
history, which often belongs to one sitting with those before it, while a test target begins a new
one. On gitlog they choose a decay of 3 where these users, and the test users, prefer 30.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.baseline import Baseline
from recprune.evaluation.metrics import RankedUsers, user_values
from recprune.preparation.holdout import leave_one_out, temporal_holdout
from recprune.types import Int32Array, random_generator

MAX_FITTING_USERS = 2048  # enough to tell settings apart, few enough to take seconds


@dataclass(frozen=True, eq=False)
class FittingUsers:
    """Users of a training log, what is to be predicted for them, and what is left to learn from."""

    train: Interactions
    histories: list[Int32Array]
    targets: Int32Array

    @classmethod
    def of(cls, train: Interactions, *, temporal: bool) -> FittingUsers:
        """Hold out again: the first item after 90 % of a training log, or every user's last."""
        if train.num_interactions == 0:
            return cls(train, [], np.zeros(0, np.int32))
        hold_out = temporal_holdout if temporal else leave_one_out
        holdout = hold_out(train, validation_users=0)
        order = random_generator(0).permutation(len(holdout.test))
        chosen = np.sort(order[:MAX_FITTING_USERS])
        histories = [holdout.history(holdout.test, int(target)) for target in chosen]
        return cls(holdout.train, histories, holdout.test.items[chosen])

    def __len__(self) -> int:
        return len(self.targets)

    def ndcg(self, baseline: Baseline, *, exclude_seen: bool = False) -> float:
        """Return the NDCG@10 of a baseline that has learnt from `train`."""
        ids = baseline.recommend(self.histories, 10, exclude_seen=exclude_seen)
        values = user_values(RankedUsers.of_targets(ids, self.targets), ["NDCG@10"])
        return float(values["NDCG@10"].mean())
