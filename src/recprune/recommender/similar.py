"""Items like those that are asked about, by external ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import ExternalId
from recprune.recommender.answer_frame import answer_frame
from recprune.recommender.assortment import Assortment
from recprune.recommender.cosine import CosineSearch
from recprune.search.checks import checked_k, checked_threads
from recprune.search.index import Index
from recprune.types import Float32Array, InputError, Int64Array

if TYPE_CHECKING:
    import polars as pl


@dataclass(slots=True, eq=False)
class SimilarItems:
    """The items most like each of some items. Rows are padded with −1 and −∞ where there are fewer.

    Scores are cosines of item vectors: 1 for the same direction, 0 for what has nothing in common.
    """

    asked: list[ExternalId]  # which items they are like
    items: list[list[ExternalId]]  # external ids, not padded
    ids: Int64Array  # internal ids, [asked, k]
    scores: Float32Array  # cosines, [asked, k]
    untrained: list[ExternalId]  # of those asked: what content, or chance, gave their vectors

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each item: similar_to, rank from 1 on, item_id and score."""
        return answer_frame("similar_to", self.asked, self.items, self.scores)


def similar_items(
    offered: Assortment,
    index: Index,
    items: Sequence[ExternalId],
    k: int,
    exclude: Int64Array,
    allowed: NDArray[Any] | None,
    threads: int,
) -> SimilarItems:
    """Return the best k for each item: see `Recommender.similar`.

    `index` is that of the training, which has the codes where what is offered is in shards.
    """
    k = checked_k(k, offered.num_items)
    checked_threads(threads)
    numbers = _found(offered, items)
    ids = np.full((len(numbers), k), -1, np.int64)
    scores = np.full((len(numbers), k), -np.inf, np.float32)
    search = CosineSearch(index if offered.snapshot is None else offered.snapshot)
    for row, number in enumerate(numbers.tolist()):
        best, cosines = search.best(number, k, exclude=exclude, allow=allowed, threads=threads)
        ids[row, : len(best)], scores[row, : len(best)] = best, cosines
    asked = [*items]
    return SimilarItems(
        asked=asked,
        items=[offered.names(row[row >= 0]) for row in ids],
        ids=ids,
        scores=scores,
        untrained=[
            item
            for item, number in zip(asked, numbers.tolist(), strict=True)
            if number < len(offered.popularity) and not offered.popularity[number]
        ],
    )


def _found(offered: Assortment, items: Sequence[ExternalId]) -> Int64Array:
    """Return the numbers of items; refuse those that are not there, naming them."""
    if isinstance(items, str | bytes) or not hasattr(items, "__iter__"):
        raise InputError(f"items is {items!r}, expected a sequence of item ids")
    given = [*items]
    numbers = offered.find(given)
    if len(numbers) and numbers.min() < 0:
        missing = [given[place] for place in np.flatnonzero(numbers < 0).tolist()]
        raise InputError(f"items: not in the catalogue: {', '.join(map(repr, missing))}")
    return numbers
