"""Cold items: those without a training interaction, each known by the trained items most like it.

A model is never shown them, so their place can only come from content. Which items are alike does
not depend on the model. So it is found out once, before training: of every cold item that has
content, the nearest trained ones. The vector of a cold item is then the weighted mean of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
        shape = (self.items.size, self.neighbours.shape[-1] if self.neighbours.ndim else 0)
        if not (self.neighbours.shape == self.weights.shape == shape and self.items.ndim == 1):
            raise InputError("every cold item has as many neighbours as weights")
        for array in (self.items, self.neighbours, self.weights):
            frozen(array)

    def __len__(self) -> int:
        return len(self.items)

    def check_items(self, num_items: int) -> None:
        """Refuse what cannot be looked up in a catalogue of so many items."""
        ids = (self.items, self.neighbours)
        if any(array.dtype.kind != "i" for array in ids) or self.weights.dtype.kind != "f":
            raise InputError("cold items and neighbours are integers, weights are floats")
        if any(((array < 0) | (array >= num_items)).any() for array in ids):
            raise InputError(f"a cold item or a neighbour is not one of 0 to {num_items - 1}")
        if not np.isfinite(self.weights).all() or (self.weights < 0).any():
            raise InputError("a weight of a neighbour is not a number from 0 on")
        used = self.neighbours[self.weights > 0]
        if (np.diff(self.items) <= 0).any() or np.isin(used, self.items).any():
            raise InputError("a cold item stands twice, or is a neighbour of another")

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
    if num_neighbours < 1:
        raise InputError(f"num_neighbours is {num_neighbours}, expected at least 1")
    is_trained = np.zeros(train.num_items, np.bool_)
    is_trained[train.items] = True
    return like_by_content(
        content, ~is_trained, is_trained, num_neighbours=num_neighbours, progress=progress
    )


def like_by_content(
    content: Content,
    asked: NDArray[np.bool_],
    among: NDArray[np.bool_],
    *,
    num_neighbours: int = NUM_NEIGHBOURS,
    progress: Progress = no_progress,
) -> ColdItems:
    """Return some items of a catalogue, and the most similar of some others by what they are."""
    from recprune.preparation.neighbours import nearest_by_text, nearest_by_vector

    wanted, pool = (np.flatnonzero(mask[content.items]) for mask in (asked, among))
    if content.vectors is not None:
        places, similarities = nearest_by_vector(
            content.vectors, wanted, pool, num_neighbours, progress
        )
    else:
        texts = content.texts or []
        places, similarities = nearest_by_text(texts, wanted, pool, num_neighbours, progress)
    return _with_shares(content.items[wanted], content.items[places], similarities)


def like_by_company(
    log: Interactions,
    asked: NDArray[np.bool_],
    among: NDArray[np.bool_],
    *,
    num_neighbours: int = NUM_NEIGHBOURS,
) -> ColdItems:
    """Return some items of a log, and which of some others stand beside them in histories."""
    from recprune.preparation.neighbours import nearest_by_company

    wanted = np.flatnonzero(asked)
    places, similarities = nearest_by_company(log, wanted, among, num_neighbours)
    return _with_shares(wanted, places, similarities)


def _with_shares(
    items: NDArray[Any], neighbours: NDArray[Any], similarities: Float32Array
) -> ColdItems:
    """Return those of some items that have a neighbour, with similarities as shares."""
    total = similarities.sum(axis=1)
    order = np.argsort(items, kind="stable")
    order = order[total[order] > 0]
    weights = similarities[order] / total[order, None]
    return ColdItems(
        items[order].astype(np.int32),
        neighbours[order].astype(np.int32),
        weights.astype(np.float32),
    )
