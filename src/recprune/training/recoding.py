"""A prepared log with the codes of a model that was trained on it.

Codes that say what an item is let a model begin with that knowledge. The codes of a RecJPQ model
are taken as they are; the item vectors of a full table are cut by product quantisation.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from recprune.models.embedding import RecJPQEmbedding
from recprune.preparation.codebook import Codebook, assign_pq, code_dtype
from recprune.preparation.prepared import Prepared
from recprune.training.checkpoint import load_model
from recprune.types import InputError, Progress, no_progress


def model_codebook(
    prepared: Prepared,
    folder: str | Path,
    *,
    num_splits: int | None = None,
    num_sub_items: int | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Codebook:
    """Return the codes of the items of a model that was trained on this prepared log.

    Numbers of splits and sub-items are for a full table, where they are 16 and 256 unless given.
    """
    model, settings = load_model(folder, prepared)
    embedding, item_ids = model.embedding, prepared.item_ids
    made_by = {"model": Path(folder).name, "settings": settings.to_json()}
    if isinstance(embedding, RecJPQEmbedding):
        sizes = {"num_splits": embedding.num_splits, "num_sub_items": embedding.num_sub_items}
        wanted = {"num_splits": num_splits, "num_sub_items": num_sub_items}
        for name, size in sizes.items():
            if wanted[name] not in (None, size):
                raise InputError(f"{name} is {wanted[name]}, but the codes of {folder} have {size}")
        codes = embedding.codes.numpy().astype(code_dtype(embedding.num_sub_items))
        return Codebook(codes, embedding.num_sub_items, item_ids, {"method": "model"} | made_by)
    quantised = assign_pq(
        embedding.all_vectors().detach().numpy(),
        num_splits=num_splits or 16,
        num_sub_items=num_sub_items or 256,
        seed=seed,
        item_ids=item_ids,
        progress=progress,
    )
    codebook = quantised.codebook
    return dataclasses.replace(codebook, settings=codebook.settings | made_by)


def with_codebook(prepared: Prepared, codebook: Codebook) -> Prepared:
    """Return a prepared log with other codes, and all else as it was."""
    return dataclasses.replace(
        prepared,
        codes=codebook.codes,
        num_sub_items=codebook.num_sub_items,
        settings={**prepared.settings, "codebook": codebook.settings},
    )
