"""Answers as a table: a row for each item of each answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from recprune.data.identifiers import ExternalId
from recprune.types import Float32Array, needs_extra

if TYPE_CHECKING:
    import polars as pl


def answer_frame(
    column: str,
    asked: Sequence[ExternalId],
    items: Sequence[Sequence[ExternalId]],
    scores: Float32Array,
) -> pl.DataFrame:
    """Return what was asked, in a column of that name, rank from 1 on, item_id and score.

    `scores` [answers, k] are padded, and items are not.
    """
    with needs_extra("data"):
        import polars as pl
    lengths = [len(row) for row in items]
    return pl.DataFrame(
        {
            column: [one for one, n in zip(asked, lengths, strict=True) for _ in range(n)],
            "rank": [rank for n in lengths for rank in range(1, n + 1)],
            "item_id": [item for row in items for item in row],
            "score": scores[np.arange(scores.shape[1]) < np.array(lengths, np.int64)[:, None]],
        }
    )
