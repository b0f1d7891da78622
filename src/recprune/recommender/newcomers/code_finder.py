"""Codes for new items of one recommender: what is looked up once, and one question for each item.

What speaks for a code are the states of those who took the item (`best_code`), and the place that
its content gives it. The latter is a prior: a sub-item counts the less, the further it is from that
place, so that content decides alone where nobody took the item, and less with everyone who did.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recprune.preparation.codebook import code_dtype
from recprune.recommender.newcomers.best_code import Passers, best_code
from recprune.search.index import Index
from recprune.types import Float32Array, Float64Array

# Chosen on gitlog, at an earlier moment than that of the test: docs/catalogue.md.
RARITY = 0.003
CLOSENESS = 3.0

MOST_PASSERS = 256  # states that are looked at
_FEWEST_PASSERS = 32  # among fewer, those who took an item would stand for everybody
_MOST_NUMBERS = 1 << 22  # of sub-item scores of all of them: for a table with an item a sub-item
_RIVALS = 100  # items that compete: those that a state scores highest


class CodeFinder:
    """Finds codes for items that a recommender's index does not have."""

    def __init__(
        self,
        index: Index,
        states: Float32Array,
        *,
        rarity: float = RARITY,
        closeness: float = CLOSENESS,
    ) -> None:
        """Take states [n, d] of whoever comes by, of which the first few hundred are looked at.

        With a `rarity` of 1, each item is expected to be taken by one in as many as there are
        items, and the likelier a state is to take it, the more of them it is one of. The lower it
        is, the less it matters whom else a code would suit. `closeness` says how much content
        counts beside one who took the item.
        """
        self._embeddings = np.asarray(index.sub_item_embeddings(), np.float64)
        self._exposure = rarity * index.num_items  # for each that took an item
        self._closeness = closeness
        self._passers = _passers(index, states)
        self.num_splits = index.num_splits
        self.dtype = code_dtype(index.num_sub_items)

    def code(
        self, state_sum: Float64Array, count: int, place: Float64Array | None
    ) -> NDArray[np.unsignedinteger]:
        """Return the code of an item that `count` users took, by the sum of their states [d].

        `place` [d] is where its content would have it.
        """
        splits, _, size = self._embeddings.shape
        states = state_sum.reshape(splits, size)
        linear = np.einsum("md,mbd->mb", states, self._embeddings)
        if place is not None:
            apart = self._embeddings - place.reshape(splits, 1, size)
            linear -= 0.5 * self._closeness * np.square(apart).sum(axis=2)
        code, _ = best_code(linear, self._passers, self._exposure * count)
        return code.astype(self.dtype)


def _passers(index: Index, states: Float32Array) -> Passers | None:
    """Return the states that an item might be taken in, as far as there is room for them."""
    room = _MOST_NUMBERS // (index.num_splits * index.num_sub_items)
    states = states[: max(_FEWEST_PASSERS, min(MOST_PASSERS, room))]
    if len(states) < _FEWEST_PASSERS or not index.num_items:
        return None
    best = index.search(states, min(_RIVALS, index.num_items)).scores.astype(np.float64)
    highest = best[:, :1]
    rivals = highest[:, 0] + np.log(np.exp(best - highest).sum(axis=1))
    return Passers.of(index.sub_item_scores(states), rivals)
