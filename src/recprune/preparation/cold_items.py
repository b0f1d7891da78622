"""Cold items: those without a training interaction, each known by the trained items most like it.

A model is never shown them, so their place can only come from content. Which items are alike does
not depend on the model. So it is found out once, before training: of every cold item that has
content, the nearest trained ones. The vector of a cold item is then the weighted mean of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from recprune.types import (
    Float32Array,
    InputError,
    Int32Array,
    Progress,
    frozen,
    no_progress,
)

if TYPE_CHECKING:
    from recprune.data.content import Content
    from recprune.data.interactions import Interactions

NUM_NEIGHBOURS = 5  # chosen on gitlog's validation users: more blur, fewer copy one item


@dataclass(frozen=True, eq=False)
class ColdItems:
    """Some items without training interactions, and what their vectors are made of."""

    items: Int32Array  # [cold], ascending
    neighbours: Int32Array  # [cold, k]: trained items, nearest first
    weights: Float32Array  # [cold, k]: their shares, 1 in all; 0 where there are fewer than k

    def __post_init__(self) -> None:
        if (
            not self.neighbours.shape
            == self.weights.shape
            == (len(self.items), self.num_neighbours)
        ):
            raise InputError("every cold item has as many neighbours as weights")
        for array in (self.items, self.neighbours, self.weights):
            frozen(array)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def num_neighbours(self) -> int:
        """k, at most: how many neighbours a cold item has."""
        return int(self.neighbours.shape[-1])


def find_cold_items(
    content: Content,
    train: Interactions,
    *,
    num_neighbours: int = NUM_NEIGHBOURS,
    progress: Progress = no_progress,
) -> ColdItems:
    """Return the items that `train` lacks, but whose content is like that of items that it has."""
    from recprune.preparation.neighbours import nearest_by_text, nearest_by_vector

    if num_neighbours < 1:
        raise InputError(f"num_neighbours is {num_neighbours}, expected at least 1")
    is_trained = np.zeros(train.num_items, np.bool_)
    is_trained[train.items] = True
    is_trained = is_trained[content.items]
    trained, cold = np.flatnonzero(is_trained), np.flatnonzero(~is_trained)
    if content.vectors is not None:
        nearest = nearest_by_vector(content.vectors, cold, trained, num_neighbours, progress)
    else:
        texts = content.texts or []
        nearest = nearest_by_text(texts, cold, trained, num_neighbours, progress)
    places, similarities = nearest
    total = similarities.sum(axis=1)
    order = np.argsort(content.items[cold], kind="stable")
    order = order[total[order] > 0]
    weights = similarities[order] / total[order, None]
    return ColdItems(
        content.items[cold[order]].astype(np.int32),
        content.items[places[order]].astype(np.int32),
        weights.astype(np.float32),
    )
