"""What followed the last items, as candidates of a transition head in training."""

from __future__ import annotations

from recprune.models.embedding import ItemEmbedding
from recprune.models.transitions import (
    BUCKETS,
    COUNT_BOUNDS,
    PROBABILITY_BUCKETS,
    RATIO_BOUNDS,
    RATIO_UNIT,
    SUCCESSORS,
    SuccessorTable,
)
from recprune.training.sparse_scores import SparseScores
from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn


class Successors:
    """Scores what followed the last items, at every position of a minibatch."""

    def __init__(
        self,
        embedding: ItemEmbedding,
        head: nn.Linear,
        looks_back: int,
        table: SuccessorTable,
        device: torch.device,
    ) -> None:
        """Take the head, how many last items it looks at, and what followed them in training."""
        self._embedding = embedding
        self._head = head
        self._looks_back = looks_back
        self._offsets, self._successors, self._counts, self._totals = (
            torch.from_numpy(array.copy()).to(device)
            for array in (table.offsets, table.successors, table.counts, table.totals)
        )
        self._bounds = tuple(
            torch.from_numpy(bounds).to(device) for bounds in (RATIO_BOUNDS, COUNT_BOUNDS)
        )

    def __call__(
        self, states: Tensor, items: Tensor, segments: Tensor, positions: Tensor, wanted: Tensor
    ) -> list[SparseScores]:
        """Return the candidates for each of the last items before positions, the newest first.

        `items` and `segments` are those of the minibatch, `wanted` the targets of the positions.
        """
        with torch.autocast(states.device.type, enabled=False):
            numbers = self._head(states.float())  # [positions, buckets]
        flat, histories = items.flatten(), segments.flatten()
        newest = flat[positions]
        found = []
        for back in range(self._looks_back):
            place = (positions - back).clamp(min=0)
            known = (histories[place] == histories[positions]) & (positions >= back)
            own = numbers[:, back * BUCKETS : (back + 1) * BUCKETS]
            found.append(self._after(states, own, flat[place], known, newest, wanted))
        return found

    def _after(
        self,
        states: Tensor,
        numbers: Tensor,
        last: Tensor,
        known: Tensor,
        newest: Tensor,
        wanted: Tensor,
    ) -> SparseScores:
        """Return what followed `last`, of positions where that is known."""
        starts, ends = self._offsets[last], self._offsets[last + 1]
        entries = starts.unsqueeze(1) + torch.arange(SUCCESSORS, device=last.device)
        valid = (entries < ends.unsqueeze(1)) & known.unsqueeze(1)
        entries = entries.clamp(max=len(self._successors) - 1)
        items = self._successors[entries].long()
        # The transition that is to be predicted is among those that were counted.
        itself = (items == wanted.unsqueeze(1)) & (last == newest).unsqueeze(1)
        counts = self._counts[entries] - itself.int()
        totals = self._totals[last] - (last == newest).int()
        valid = valid & (counts > 0)
        likely, often = bucketized(
            counts.clamp(min=1), totals.clamp(min=1).unsqueeze(1), *self._bounds
        )
        boosts = numbers.gather(1, likely) + numbers.gather(1, often)
        return SparseScores(items, self._embedding.scores(states, items).float(), boosts, valid)


def bucketized(
    counts: Tensor, totals: Tensor, ratio_bounds: Tensor, count_bounds: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the buckets of transitions, with RATIO_BOUNDS and COUNT_BOUNDS given."""
    counts = counts.long()
    likely = torch.bucketize(totals.long() * RATIO_UNIT // counts, ratio_bounds, right=True)
    return likely, PROBABILITY_BUCKETS + torch.bucketize(counts, count_bounds, right=True)
