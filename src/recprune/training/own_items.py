"""The items that a user had before, as candidates of a repeat head in training.

All of them are compared with the target at every position, while other items are drawn by chance.
What is always there would be held down more than what is drawn now and then; so before a loss looks
at its score, this is lowered by the logarithm of how often the others are drawn, also where it is
the target.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recprune.models.embedding import ItemEmbedding
from recprune.models.repeats import COUNT_BUCKETS, RECENCY_BUCKETS, recency_bucket
from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn


class OwnItems(NamedTuple):
    """What stands before every position, [positions, longest]."""

    items: Tensor
    scores: Tensor  # boosts included
    boosts: Tensor
    valid: Tensor  # whether it is of the same history, not later, and the item's last event so far


class OwnScores:
    """Scores the events before every position of a minibatch."""

    def __init__(
        self, embedding: ItemEmbedding, head: nn.Linear, longest: int, device: torch.device
    ) -> None:
        self._embedding = embedding
        self._head = head
        buckets = recency_bucket(np.arange(longest))
        self._recency = torch.from_numpy(buckets).to(device)

    def __call__(
        self, states: Tensor, items: Tensor, segments: Tensor, positions: Tensor, features: Tensor
    ) -> OwnItems:
        """Return the own items of positions; states are those of all events, [rows, longest, d]."""
        longest = items.shape[1]
        rows, now = positions // longest, positions % longest
        with torch.autocast(states.device.type, enabled=False):
            states = states.float()
            products = torch.bmm(states, self._embedding.vectors(items).transpose(1, 2))
            numbers = self._head(states.flatten(0, 1)[positions])  # [positions, buckets]
        until_next, counts, frequencies = features[:, rows]  # [positions, longest] each
        ago = now.unsqueeze(1) - torch.arange(longest, device=items.device)
        same = segments[rows] == segments[rows, now].unsqueeze(1)
        boosts = (
            numbers.gather(1, self._recency[ago.clamp(min=0)])
            + numbers.gather(1, RECENCY_BUCKETS + counts)
            + numbers.gather(1, RECENCY_BUCKETS + COUNT_BUCKETS + frequencies)
        )
        valid = same & (ago >= 0) & (until_next > ago)
        return OwnItems(items[rows], products[rows, now] + boosts, boosts, valid)
