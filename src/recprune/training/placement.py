"""Where untrained items stand in a model: between the trained ones that their content is like.

Their rows of a table, or their codes, take no part in training, as they are in no training history
and never drawn as negatives. So they can be written into the model under training whenever it is
to be judged or saved, and validation, evaluation, export and search all see the same.
"""

from __future__ import annotations

import numpy as np

from recprune.models.embedding import (
    FullEmbedding,
    ItemEmbedding,
    RecJPQEmbedding,
    nearest_codes,
)
from recprune.models.learnt_codes import LearntEmbedding
from recprune.preparation.cold_items import ColdItems
from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn

_NUMBERS_AT_ONCE = 1 << 26


@torch.no_grad()
def place_cold_items(embedding: ItemEmbedding, cold: ColdItems, scale: float) -> None:
    """Give cold items the vectors that their neighbours suggest, or the codes nearest to these."""
    chunk = max(1, _NUMBERS_AT_ONCE // (cold.num_neighbours * embedding.width))
    for first in range(0, len(cold), chunk):
        items, neighbours, weights = (
            torch.from_numpy(np.array(array[first : first + chunk]))
            for array in (cold.items, cold.neighbours, cold.weights)
        )
        if isinstance(embedding, RecJPQEmbedding):
            where = embedding.codes.device
            vectors = embedding.vectors(neighbours.to(where))
            predicted = predicted_vectors(vectors, weights.to(where), scale)
            codes = nearest_codes(predicted, embedding.sub_item_embeddings)
            embedding.codes[items.long().to(where)] = codes.to(embedding.codes.dtype)
        elif isinstance(embedding, FullEmbedding | LearntEmbedding):
            table = embedding.item_embeddings
            vectors = nn.functional.embedding(neighbours.to(table.device), table)
            predicted = predicted_vectors(vectors, weights.to(table.device), scale)
            table[items.long().to(table.device)] = predicted


def predicted_vectors(vectors: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Return the directions of weighted means, `scale` times as long as the vectors on average.

    [cold, k, d] and [cold, k] → [cold, d]. The mean alone is the shorter the more its neighbours
    differ, and an item with a short vector is recommended to no one.
    """
    mean = (vectors * weights.unsqueeze(-1)).sum(1)
    length = (vectors.norm(dim=-1) * weights).sum(1)
    stretch: Tensor = scale * length / mean.norm(dim=-1).clamp(min=1e-12)
    return mean * stretch.unsqueeze(-1)
