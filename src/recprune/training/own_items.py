"""The items that a user had before, as candidates of a repeat head in training."""

from __future__ import annotations

import numpy as np

from recprune.models.activity import Activity
from recprune.models.embedding import ItemEmbedding
from recprune.models.repeats import (
    FIRST_ACTIVITY,
    FIRST_AGE,
    FIRST_FAST,
    FIRST_SLOW,
    recency_bucket,
)
from recprune.models.situations import (
    COUNT_BOUNDS,
    FIRST_GAP,
    FIRST_SITTING,
    FIRST_TENTH,
    NUM_SITUATIONS,
    TENTHS,
    UNKNOWN_SITTING,
)
from recprune.models.timed import bucketized_ages
from recprune.models.timelines import AGE_BOUNDS, UNKNOWN_AGE
from recprune.training.sparse_scores import SparseScores
from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn


class OwnItems:
    """Scores what users had before, at every position of a minibatch."""

    def __init__(
        self,
        embedding: ItemEmbedding,
        head: nn.Linear,
        length: int,
        looks_back: int,
        own_scores: float,
        activity: Activity | None,
        device: torch.device,
    ) -> None:
        """Take the most positions that a user has, and how many events count before each.

        `own_scores` is the share of their scores that own items keep.
        """
        self._embedding = embedding
        self._head = head
        self._length = length
        self._looks_back = looks_back
        self._taken_away = 1.0 - own_scores
        self._activity = None if activity is None else _ActivityTable(activity, device)
        self._count_bounds = torch.from_numpy(COUNT_BOUNDS).to(device)
        self._age_bounds = torch.from_numpy(AGE_BOUNDS).to(device)
        self._recency = torch.from_numpy(recency_bucket(np.arange(looks_back))).to(device)

    def __call__(self, states: Tensor, events: Tensor, now: Tensor) -> SparseScores:
        """Return the own items of positions, from their states, [positions, d], and own events.

        One counts that is not later, near enough, and the item's last event so far.
        """
        users, columns, places, asked_at, known_until = now
        items, until_next, fast, slow, times = events  # [users, longest] each
        ago = columns.unsqueeze(1) - torch.arange(items.shape[1], device=items.device)
        seen = (ago >= 0) & (ago < self._looks_back)
        valid = seen & (until_next[users] > ago)
        ages = bucketized_ages(asked_at.unsqueeze(1), times[users], self._age_bounds)
        situations = self._situations(seen, valid, ages, columns, times[users])
        with torch.autocast(states.device.type, enabled=False):
            states = states.float()
            numbers = self._head(torch.cat([states, situations], 1))  # [positions, buckets]
            # A matrix product for each user; what is padding stands behind all positions.
            by_user = states.new_zeros(len(items), self._length + 1, states.shape[1])
            by_user[users, places] = states
            vectors = self._embedding.vectors(items)
            products = torch.bmm(by_user, vectors.transpose(1, 2))[users, places]
        boosts = (
            numbers.gather(1, self._recency[ago.clamp(0, self._looks_back - 1)])
            + numbers.gather(1, FIRST_FAST + fast[users])
            + numbers.gather(1, FIRST_SLOW + slow[users])
            + numbers.gather(1, FIRST_AGE + ages)
            - self._taken_away * products
        )
        if self._activity is not None:
            buckets = self._activity(items[users], known_until)
            boosts = boosts + numbers.gather(1, FIRST_ACTIVITY + buckets)
        return SparseScores(items[users], products, boosts, valid)

    def _situations(
        self, seen: Tensor, valid: Tensor, ages: Tensor, columns: Tensor, times: Tensor
    ) -> Tensor:
        """Return the situations of positions as zeros and four ones each, [positions, situations].

        Given are which events are looked at, which are the last of their items, how old they are,
        the columns of the newest ones, and when all were.
        """
        newest = columns.unsqueeze(1)
        count = seen.sum(1).clamp(min=1)
        gap = ages.gather(1, newest).squeeze(1)
        tenths = (TENTHS * valid.sum(1) // count).clamp(max=TENTHS - 1)
        at_once = (seen & (times == times.gather(1, newest))).sum(1)
        sitting = FIRST_SITTING + self._count_bucket(at_once)
        sitting = torch.where(gap == UNKNOWN_AGE, UNKNOWN_SITTING, sitting)
        rows = (self._count_bucket(count), FIRST_GAP + gap, FIRST_TENTH + tenths, sitting)
        found = torch.zeros(len(columns), NUM_SITUATIONS, device=columns.device)
        return found.scatter(1, torch.stack(rows, 1), 1.0)

    def _count_bucket(self, counts: Tensor) -> Tensor:
        return torch.bucketize(counts, self._count_bounds, right=True)


class _ActivityTable:
    """How often anyone had items lately, looked up on the device."""

    def __init__(self, activity: Activity, device: torch.device) -> None:
        self._ends = torch.from_numpy(np.array(activity.ends)).to(device)
        self._buckets = torch.from_numpy(np.array(activity.buckets)).to(device)

    def __call__(self, items: Tensor, known_until: Tensor) -> Tensor:
        """Return the buckets of items [positions, c] at the moments of positions."""
        rows = torch.bucketize(known_until, self._ends)
        return self._buckets[rows.unsqueeze(1), items].long()
