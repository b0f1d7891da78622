"""Vectors of items, and scores of items: RecJPQ's shared sub-items, or a plain full table.

Both answer the same two questions, so that every encoder works with either. RecJPQ builds neither
the vectors of all items nor, in training, a score for every item at every position.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from recprune.models.touched_rows import TouchedRows
from recprune.types import CodeArray, InputError, needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn

# Small enough that dot products with normalised states begin near zero.
INITIAL_SCALE = 0.05


class ItemEmbedding(Protocol):
    """What an encoder needs to know of the items."""

    num_items: int
    width: int

    def vectors(self, items: Tensor) -> Tensor:
        """Return the vectors of items, [..., d]."""
        ...

    def all_vectors(self) -> Tensor:
        """Return the vectors of all items, [items, d]: for catalogues that are small."""
        ...

    def scores(self, sequence_embeddings: Tensor, items: Tensor) -> Tensor:
        """Return the scores of given items: [positions, d] and [positions, c] → [positions, c]."""
        ...

    def score_table(self, sequence_embeddings: Tensor) -> Tensor:
        """Return what the scores of all items are computed from, [positions, ...]."""
        ...

    def scores_of_range(self, table: Tensor, first: int, last: int) -> Tensor:
        """Return the scores of items first … last − 1 from that, [positions, last − first]."""
        ...


def dot_products(embedding: ItemEmbedding, sequence_embeddings: Tensor, items: Tensor) -> Tensor:
    """Return the scores of given items from their vectors, [positions, c]."""
    with torch.autocast(sequence_embeddings.device.type, enabled=False):
        states = sequence_embeddings.float()
        # For few items, all scores of a position are less than the vectors of its candidates.
        if embedding.num_items <= items.shape[1] * embedding.width:
            return (states @ embedding.all_vectors().T).gather(1, items)
        return torch.einsum("pd,pcd->pc", states, embedding.vectors(items))


def nearest_codes(vectors: Tensor, sub_item_embeddings: Tensor) -> Tensor:
    """Return the nearest sub-item of every split, [..., M], of vectors [..., d]."""
    num_splits, _, size = sub_item_embeddings.shape
    parts = vectors.reshape(-1, num_splits, size)
    with torch.autocast(vectors.device.type, enabled=False):
        # ½‖e − c‖² = ½‖e‖² − (e·c − ½‖c‖²): the largest similarity is the smallest distance.
        norms = sub_item_embeddings.square().sum(-1).unsqueeze(1)  # [M, 1, B]
        similarities = torch.baddbmm(
            norms, parts.float().transpose(0, 1), sub_item_embeddings.transpose(1, 2), beta=-0.5
        )
        nearest = similarities.argmax(-1)
    return nearest.T.reshape(*vectors.shape[:-1], num_splits)


class RecJPQEmbedding(nn.Module):
    """RecJPQ (Petrov and Macdonald, WSDM 2024): an item's vector is made of M sub-item vectors.

    It stands where `torch.nn.Embedding` would. `codes`, integers [n, M], say which sub-items make
    up each item, and stay as they are; `sub_item_embeddings`, [M, B, width / M], are the one
    parameter. Items are numbered from 0 on, and none of them is padding. After training,
    `Index.build(codes, embedding.sub_item_embeddings.detach().numpy())` searches all items exactly.
    """

    codes: Tensor  # [num_items, M]

    def __init__(self, codes: CodeArray, num_sub_items: int, width: int) -> None:
        super().__init__()
        _check_codes(codes, num_sub_items)
        self.num_items, num_splits = codes.shape
        if width % num_splits:
            raise InputError(f"width {width} is not a multiple of the {num_splits} splits")
        self.num_splits = num_splits
        self.num_sub_items = num_sub_items
        self.width = width
        shape = (num_splits, num_sub_items, width // num_splits)
        self.sub_item_embeddings = nn.Parameter(torch.randn(shape) * INITIAL_SCALE)
        narrow = np.uint8 if num_sub_items <= 256 else np.int32  # torch has no uint16 worth using
        self.register_buffer("codes", torch.from_numpy(np.array(codes, narrow)))

    def vectors(self, items: Tensor) -> Tensor:
        """Return the vectors of items: their sub-item vectors, one after the other."""
        flat = self._flat_codes(items)
        table = self.sub_item_embeddings.flatten(0, 1)  # [M · B, d / M]
        return nn.functional.embedding(flat, table).flatten(-2)

    def all_vectors(self) -> Tensor:
        """Return the vectors of all items, [items, d]: for catalogues that are small."""
        return self.vectors(torch.arange(self.num_items, device=self.codes.device))

    def score_table(self, sequence_embeddings: Tensor) -> Tensor:
        """Return the sub-item scores S, [positions, M, B]."""
        parts = sequence_embeddings.view(-1, self.num_splits, self.width // self.num_splits)
        # A product per split, [M, positions, d / M] with [M, d / M, B]. Not in bfloat16: a score is
        # a sum of eight of these.
        with torch.autocast(sequence_embeddings.device.type, enabled=False):
            products = torch.bmm(
                parts.float().transpose(0, 1), self.sub_item_embeddings.transpose(1, 2)
            )
        return products.transpose(0, 1)

    def scores(self, sequence_embeddings: Tensor, items: Tensor) -> Tensor:
        """Return the scores of given items, looked up in S and added."""
        table = self.score_table(sequence_embeddings).flatten(1)  # [positions, M · B]
        flat = self._flat_codes(items).flatten(1)  # [positions, c · M]
        return table.gather(1, flat).view(*items.shape, self.num_splits).sum(-1)

    def scores_of_range(self, table: Tensor, first: int, last: int) -> Tensor:
        """Return the scores of a range of items, added in split order like the search does."""
        codes = self.codes[first:last].long()
        total = table[:, 0, codes[:, 0]]
        for split in range(1, self.num_splits):
            total += table[:, split, codes[:, split]]
        return total

    def _flat_codes(self, items: Tensor) -> Tensor:
        """Return the codes of items as rows of the flattened table, [..., M]."""
        starts = torch.arange(self.num_splits, device=items.device) * self.num_sub_items
        return self.codes[items].long() + starts


def _check_codes(codes: CodeArray, num_sub_items: int) -> None:
    """Refuse here what would be an index out of range, or of another item, in a step on a GPU."""
    if codes.ndim != 2 or 0 in codes.shape or codes.dtype.kind not in "iu":
        given = f"{codes.dtype}{list(codes.shape)}"
        raise InputError(f"codes is {given}, expected integers [n, M]")
    if codes.min() < 0 or codes.max() >= num_sub_items:
        place = codes.argmin() if codes.min() < 0 else codes.argmax()
        item, split = np.unravel_index(int(place), codes.shape)
        raise InputError(
            f"codes[{item}, {split}] is {codes[item, split]}, expected 0 to {num_sub_items - 1}"
        )


class FullEmbedding(nn.Module):
    """A vector of its own for every item, as in the uncompressed models."""

    def __init__(self, num_items: int, width: int) -> None:
        super().__init__()
        self.num_items = num_items
        self.width = width
        self.item_embeddings = nn.Parameter(torch.randn(num_items, width) * INITIAL_SCALE)
        self.touched: TouchedRows | None = None

    def vectors(self, items: Tensor) -> Tensor:
        if self.touched is not None:
            return self.touched.look_up(items)
        return nn.functional.embedding(items, self.item_embeddings)

    def all_vectors(self) -> Tensor:
        if self.touched is not None:
            return self.touched.look_up_all()
        return self.item_embeddings

    def scores(self, sequence_embeddings: Tensor, items: Tensor) -> Tensor:
        return dot_products(self, sequence_embeddings, items)

    def score_table(self, sequence_embeddings: Tensor) -> Tensor:
        """Return the sequence embeddings themselves."""
        return sequence_embeddings

    def scores_of_range(self, table: Tensor, first: int, last: int) -> Tensor:
        return table @ self.item_embeddings[first:last].T
