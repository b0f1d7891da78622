"""Where content would have new items: between the trained items that they are most like.

That is where cold items stand in training (`training/placement.py`), in NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.data.content import Content, read_content
from recprune.data.identifiers import ExternalId
from recprune.preparation.cold_items import ColdItems, like_by_content
from recprune.recommender.recommender import Recommender
from recprune.types import Float64Array, Int64Array, Progress, no_progress


class GrowingIds:
    """Ids of a recommender's items, and of any others as they are met, which come after these."""

    def __init__(self, recommender: Recommender) -> None:
        self._known = recommender.item_ids
        self._added: dict[ExternalId, int] = {}
        self.new: list[ExternalId] = []

    @property
    def are_strings(self) -> bool:
        return self._known.are_strings

    def __len__(self) -> int:
        return len(self._known) + len(self.new)

    def find_all(self, external_ids: Sequence[object]) -> Int64Array:
        found = self._known.find_all(external_ids)
        for place in np.flatnonzero(found < 0).tolist():
            found[place] = self._number(external_ids[place])
        return found

    def take(self, internal_ids: Iterable[int]) -> list[ExternalId]:
        first = len(self._known)
        return [self._known[one] if one < first else self.new[one - first] for one in internal_ids]

    def _number(self, external_id: Any) -> int:
        if external_id not in self._added:
            self._added[external_id] = len(self)
            self.new.append(external_id)
        return self._added[external_id]


class ContentPlaces:
    """The places of new items that are like some of the trained ones, by number."""

    def __init__(self, recommender: Recommender, near: ColdItems) -> None:
        index = recommender.index
        self._embeddings = np.asarray(index.sub_item_embeddings(), np.float64)
        self._codes = index.item_codes()
        self._scale = recommender.trained_settings("content").training.cold_scale
        self._near = near
        self.rows = {number: row for row, number in enumerate(near.items.tolist())}

    def get(self, number: int) -> Float64Array | None:
        """Return the place [d] of an item, None where it is like none of the trained ones."""
        row = self.rows.get(number)
        if row is None:
            return None
        used = self._near.weights[row] > 0
        codes = self._codes[self._near.neighbours[row][used]]  # [k, M]
        parts = [table[codes[:, split]] for split, table in enumerate(self._embeddings)]
        shares = self._near.weights[row][used].astype(np.float64)
        return _predicted(np.concatenate(parts, axis=1), shares, self._scale)


def find_places(
    recommender: Recommender,
    path: str | Path,
    ids: GrowingIds,
    item_column: str | None = None,
    progress: Progress = no_progress,
) -> ContentPlaces:
    """Read the content of items, and find what those are like that the recommender lacks."""
    progress(f"reading {Path(path).name}")
    content = read_content(path, ids, item_column=item_column)
    num_known = len(recommender.item_ids)
    trained = np.zeros(len(ids), np.bool_)
    trained[:num_known] = recommender.popularity > 0
    wanted = trained[content.items] | (content.items >= num_known)
    near = like_by_content(_part(content, wanted), ~trained, trained, progress=progress)
    return ContentPlaces(recommender, near)


def _predicted(vectors: Float64Array, shares: Float64Array, scale: float) -> Float64Array:
    """Return the direction of a weighted mean, `scale` times as long as the vectors on average."""
    mean = shares @ vectors
    length = shares @ np.linalg.norm(vectors, axis=1)
    place: Float64Array = mean * (scale * length / max(float(np.linalg.norm(mean)), 1e-12))
    return place


def _part(content: Content, wanted: NDArray[np.bool_]) -> Content:
    """Return the content of some of its items."""
    rows = np.flatnonzero(wanted)
    texts = None if content.texts is None else [content.texts[row] for row in rows]
    vectors = None if content.vectors is None else content.vectors[rows]
    return replace(content, items=content.items[rows], texts=texts, vectors=vectors)
