"""Codes that are learnt: product quantisation inside the training loop.

While a model is trained, every item has a full vector of its own, in a *shadow table*. What the
encoder and the loss see is its quantised form: in every split, the nearest of B centroids (product
quantisation: Jégou, Douze and Schmid, TPAMI 2011). The gradient goes straight through to the full
vector (van den Oord, Vinyals and Kavukcuoglu, NeurIPS 2017), and the centroids follow the mean of
the vectors that are nearest to them. So an item may change its sub-item ids at every step. In the
end the shadow table is thrown away: codes and centroids are an ordinary RecJPQ embedding, with the
same scores.

A table that was quantised from its first step on would be cut along differences that mean nothing
yet. So training begins with the full vectors themselves, and k-means cuts them when they are worth
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from recprune.models.embedding import (
    INITIAL_SCALE,
    FullEmbedding,
    RecJPQEmbedding,
    dot_products,
    nearest_codes,
)
from recprune.models.settings import ModelSettings
from recprune.models.touched_rows import TouchedRows
from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn

_DECAY = 0.99  # of what centroids remember of earlier steps
_K_MEANS_ROUNDS = 25
_K_MEANS_SAMPLE = 256  # vectors for every centroid: more change hardly anything
_UNUSED = 0.05  # a centroid with less than this share of its fair load is put elsewhere
_DISTANCES_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class CodeReport:
    """How well learnt codes tell items apart."""

    items_sharing_a_code: int  # with at least one other item
    unused_sub_items: int  # of all splits together
    quantisation_error: float  # ‖e − q‖² over the variance of e: 0 is perfect, 1 says nothing


class LearntEmbedding(nn.Module):
    """Full vectors while training, of which the model sees the quantised form."""

    sub_item_embeddings: Tensor  # [M, B, d / M]: the centroids
    loads: Tensor  # [M, B]: how many vectors were nearest, decayed
    sums: Tensor  # [M, B, d / M]: of these vectors, decayed
    is_quantised: Tensor  # []: 0 as long as full vectors are trained

    def __init__(self, num_items: int, settings: ModelSettings) -> None:
        super().__init__()
        self.num_items = num_items
        self.width = settings.width
        self.num_splits = settings.num_splits
        self.num_sub_items = settings.num_sub_items
        self.item_embeddings = nn.Parameter(torch.randn(num_items, self.width) * INITIAL_SCALE)
        shape = (self.num_splits, self.num_sub_items, self.width // self.num_splits)
        self.register_buffer("sub_item_embeddings", torch.zeros(shape))
        self.register_buffer("loads", torch.zeros(shape[:2]))
        self.register_buffer("sums", torch.zeros(shape))
        self.register_buffer("is_quantised", torch.zeros(()))
        self.touched: TouchedRows | None = None
        self.quantises = False  # as `is_quantised`, where asking a device would take long

    # What an encoder asks -------------------------------------------------------------------------

    def vectors(self, items: Tensor) -> Tensor:
        """Return the quantised vectors of items; gradients reach the full ones."""
        return self._straight_through(self._full(items))

    def all_vectors(self) -> Tensor:
        full = self.item_embeddings if self.touched is None else self.touched.look_up_all()
        return self._straight_through(full)

    def scores(self, sequence_embeddings: Tensor, items: Tensor) -> Tensor:
        return dot_products(self, sequence_embeddings, items)

    def score_table(self, sequence_embeddings: Tensor) -> Tensor:
        """Return the sequence embeddings themselves."""
        return sequence_embeddings

    def scores_of_range(self, table: Tensor, first: int, last: int) -> Tensor:
        return table @ self.vectors(torch.arange(first, last, device=table.device)).T

    # What training asks ---------------------------------------------------------------------------

    def distortion(self, items: Tensor) -> Tensor:
        """Return ½‖e − q‖² of items, [...], with a gradient for the full vectors alone."""
        full = self._full(items)
        return 0.5 * (full - self._quantised(full)).square().sum(-1)

    @torch.no_grad()
    def tally(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """Return what centroids would be moved by: loads and sums of these items.

        Items that are −1 are padding.
        """
        full = nn.functional.embedding(items.clamp(min=0), self.item_embeddings)
        counted = (items >= 0).float().repeat_interleave(self.num_splits)
        flat = self._flat_codes(full).flatten()  # [items · M]
        parts = full.view(-1, self.width // self.num_splits)
        loads = torch.zeros_like(self.loads).flatten()
        sums = torch.zeros_like(self.sums).flatten(0, 1)
        loads.index_add_(0, flat, counted)
        sums.index_add_(0, flat, parts * counted.unsqueeze(1))
        return loads.view_as(self.loads), sums.view_as(self.sums)

    @torch.no_grad()
    def follow(self, items: Tensor) -> None:
        """Move every centroid towards the mean of those of these items that are nearest to it."""
        loads, sums = self.tally(items)
        self.loads.mul_(_DECAY).add_(loads, alpha=1 - _DECAY)
        self.sums.mul_(_DECAY).add_(sums, alpha=1 - _DECAY)
        self._move_to_means()

    @torch.no_grad()
    def cut(self, rng: np.random.Generator) -> None:
        """Put the centroids where k-means puts them, and quantise from now on."""
        sample = rng.permutation(self.num_items)[: _K_MEANS_SAMPLE * self.num_sub_items]
        items = torch.from_numpy(sample).to(self.item_embeddings.device)
        # Lloyd's algorithm from distinct items; of fewer items than sub-items, some stand twice.
        first = items[torch.arange(self.num_sub_items, device=items.device) % len(items)]
        parts = self.item_embeddings[first].view(self.num_sub_items, self.num_splits, -1)
        self.sub_item_embeddings.copy_(parts.transpose(0, 1))
        for _ in range(_K_MEANS_ROUNDS):
            self.loads.zero_()
            self.sums.zero_()
            for chunk in torch.split(items, self._items_at_once):
                loads, sums = self.tally(chunk)
                self.loads += loads
                self.sums += sums
            self._move_to_means()
        self.is_quantised.fill_(1.0)
        self.quantises = True

    @torch.no_grad()
    def revive(self, rng: np.random.Generator) -> int:
        """Put centroids that serve hardly any item where items are; return how many."""
        fair = self.loads.sum(1, keepdim=True) / self.num_sub_items
        unused = self.loads < _UNUSED * fair
        splits, sub_items = (index.cpu().numpy() for index in torch.nonzero(unused, as_tuple=True))
        size = self.width // self.num_splits
        items = rng.integers(0, self.num_items, len(splits))
        for split, sub_item, item in zip(splits, sub_items, items, strict=True):
            part = self.item_embeddings[int(item), split * size : (split + 1) * size]
            self.sub_item_embeddings[split, sub_item] = part
            self.loads[split, sub_item] = fair[split, 0]
            self.sums[split, sub_item] = part * fair[split, 0]
        return len(splits)

    @torch.no_grad()
    def codes(self) -> Tensor:
        """Return the codes of all items, uint8 [n, M]."""
        parts = [
            self._codes(part) for part in torch.split(self.item_embeddings, self._items_at_once)
        ]
        return torch.cat(parts).to(torch.uint8)

    @torch.no_grad()
    def as_recjpq(self) -> RecJPQEmbedding:
        """Return what is left without the shadow table: the embedding that is saved and served."""
        codes: Any = self.codes().cpu().numpy()
        embedding = RecJPQEmbedding(codes, self.num_sub_items, self.width)
        embedding.sub_item_embeddings.copy_(self.sub_item_embeddings)
        return embedding.to(self.item_embeddings.device)

    def as_full(self) -> FullEmbedding:
        """Return the full vectors as an embedding, which shares them."""
        embedding = FullEmbedding(0, self.width)
        embedding.num_items, embedding.item_embeddings = self.num_items, self.item_embeddings
        return embedding

    @torch.no_grad()
    def report(self) -> CodeReport:
        codes = self.codes()
        _, inverse, counts = torch.unique(codes, dim=0, return_inverse=True, return_counts=True)
        used = sum(len(torch.unique(codes[:, split])) for split in range(self.num_splits))
        error = 0.0
        for full in torch.split(self.item_embeddings, self._items_at_once):
            error += float((full - self._quantised(full)).square().sum())
        spread = float(self.item_embeddings.var(0, correction=0).sum()) * self.num_items
        return CodeReport(
            items_sharing_a_code=int((counts[inverse] > 1).sum()),
            unused_sub_items=self.num_splits * self.num_sub_items - used,
            quantisation_error=error / max(spread, 1e-30),
        )

    def look_whether_cut(self) -> None:
        """Find out what the buffers say, after something else has written them."""
        self.quantises = bool(self.is_quantised > 0)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.look_whether_cut()

    @property
    def _items_at_once(self) -> int:
        return max(1, _DISTANCES_AT_ONCE // (self.num_splits * self.num_sub_items))

    def _move_to_means(self) -> None:
        """Put every centroid into the middle of its vectors; one without any stays."""
        known = self.loads.unsqueeze(-1) > 1e-6
        means = self.sums / self.loads.unsqueeze(-1).clamp(min=1e-6)
        self.sub_item_embeddings.copy_(torch.where(known, means, self.sub_item_embeddings))

    def _full(self, items: Tensor) -> Tensor:
        if self.touched is not None:
            return self.touched.look_up(items)
        return nn.functional.embedding(items, self.item_embeddings)

    def _straight_through(self, full: Tensor) -> Tensor:
        # The second summand is 0, and its gradient is that of the full vectors.
        return self._quantised(full) + (full - full.detach()) if self.quantises else full

    def _codes(self, full: Tensor) -> Tensor:
        """Return the nearest centroids of vectors [..., d], [..., M]."""
        return nearest_codes(full, self.sub_item_embeddings)

    def _flat_codes(self, full: Tensor) -> Tensor:
        starts = torch.arange(self.num_splits, device=full.device) * self.num_sub_items
        return self._codes(full) + starts

    @torch.no_grad()
    def _quantised(self, full: Tensor) -> Tensor:
        rows = self.sub_item_embeddings.flatten(0, 1)
        return nn.functional.embedding(self._flat_codes(full), rows).flatten(-2)
