"""Scores of the few items that something special is known of, at every position of a minibatch.

Heads that boost (what the user had before, what followed the last items) bring candidates of their
own. All of them are compared with the target at every position, while other items are drawn by
chance. What is always there would be held down more than what is drawn now and then; so before a
loss looks at its score, this is lowered by the logarithm of how often the others are drawn, also
where it is the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor


class SparseScores(NamedTuple):
    """Candidates of every position, [positions, c]."""

    items: Tensor
    products: Tensor  # the scores without boosts
    boosts: Tensor
    valid: Tensor  # whether it is one; no item is one twice

    def scores(self) -> Tensor:
        """Return the scores with boosts."""
        return self.products + self.boosts


def merged(parts: Sequence[SparseScores]) -> SparseScores:
    """Put candidates together; one that several heads boost has the sum of their boosts."""
    first, *rest = parts
    for part in rest:
        same = (first.items.unsqueeze(2) == part.items.unsqueeze(1)) & first.valid.unsqueeze(2)
        met = same.any(1) & part.valid  # [positions, c of this part]
        place = same.byte().argmax(1)
        boosts = first.boosts.scatter_add(1, place, part.boosts.masked_fill(~met, 0.0))
        first = SparseScores(
            torch.cat([first.items, part.items], 1),
            torch.cat([first.products, part.products], 1),
            torch.cat([boosts, part.boosts], 1),
            torch.cat([first.valid, part.valid & ~met], 1),
        )
    return first
