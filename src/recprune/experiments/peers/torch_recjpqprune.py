"""RecJPQPrune in torch: Algorithm 1, vectorised as the paper describes.

Petrov, Macdonald and Tonellotto, "Efficient Recommendation with Millions of Items by Dynamic
Pruning of Sub-Item Embeddings", SIGIR 2025. A step takes the best unprocessed sub-item ids of one
split, scores the items that carry them, and merges their best k with the best so far. It stops when
no unvisited item can reach the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from recprune.experiments.peers.peer import (
    CodesAndVectors,
    ModelShape,
    Peer,
    checked_query,
    padded,
    timed,
)
from recprune.experiments.peers.torch_peer import inference, sub_item_scores
from recprune.search.posting_lists import build_posting_lists
from recprune.types import Float32Array, InputError, Int64Array, needs_extra

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Pruned:
    """What Algorithm 1 found, and what that cost."""

    items: torch.Tensor  # int32 [at most k], best first
    scores: torch.Tensor  # float32, likewise
    items_scored: int  # repeats counted
    steps: int


@dataclass(frozen=True, eq=False)
class TorchRecJPQPrunePeer:
    """Algorithm 1 with `sub_items_per_step` sub-item ids a step (BS)."""

    codes: torch.Tensor  # int32 [n, M], split m's ids raised by m·B: places in the flattened S
    posting_lists: list[list[torch.Tensor]]  # L_m(b): int32 views of one tensor a split
    sub_item_embeddings: torch.Tensor  # [M, B, d/M]
    sub_items_per_step: int
    build_seconds: float
    family: str = "torch RecJPQPrune"
    exact: bool = True

    @property
    def name(self) -> str:
        return f"torch RecJPQPrune, BS {self.sub_items_per_step}"

    @property
    def bytes_used(self) -> int:
        num_items, num_splits = self.codes.shape
        return self.codes.nbytes + 4 * num_items * num_splits + self.sub_item_embeddings.nbytes

    def search(self, sequence_embedding: Float32Array, k: int) -> Int64Array:
        return padded(self.prune(sequence_embedding, k).items.numpy(), k)

    def prune(self, sequence_embedding: Float32Array, k: int) -> Pruned:
        """Return the k best items with their scores, and how many items had to be scored."""
        num_splits, _, split_width = self.sub_item_embeddings.shape
        query = checked_query(sequence_embedding, num_splits * split_width, k)
        with inference():
            return self._prune(sub_item_scores(query, self.sub_item_embeddings), k)

    def _prune(self, scores: torch.Tensor, k: int) -> Pruned:
        import torch

        num_splits, num_sub_items = scores.shape
        ordered = scores.sort(dim=1, descending=True)
        queue = ordered.indices.tolist()  # Q
        queue_scores = ordered.values.numpy()
        position = [0] * num_splits  # P
        next_scores = queue_scores[:, 0].copy()
        top_items = torch.empty(0, dtype=torch.int32)
        top_scores = torch.empty(0)
        threshold, items_scored, steps = -np.inf, 0, 0
        # At equality it goes on, as recprune does: an unvisited item might tie.
        while upper_bound(next_scores) >= threshold:
            split = int(next_scores.argmax())
            start = position[split]
            chosen = queue[split][start : start + self.sub_items_per_step]
            items = torch.cat([self.posting_lists[split][sub_item] for sub_item in chosen])
            step_items, step_scores = self._pqtopk(scores, items, k)
            top_items, top_scores = merge(top_items, top_scores, step_items, step_scores, k)
            items_scored += len(items)
            steps += 1
            position[split] += len(chosen)
            if position[split] == num_sub_items:
                break  # every item is in some list of this split
            next_scores[split] = queue_scores[split, position[split]]
            if len(top_scores) == k:
                threshold = float(top_scores[-1])
        return Pruned(top_items, top_scores, items_scored, steps)

    def _pqtopk(
        self, scores: torch.Tensor, items: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score some items and return the best k of them."""
        codes = self.codes.index_select(0, items)
        gathered = scores.view(-1).index_select(0, codes.view(-1)).view(codes.shape)
        # Added in split order like the upper bound, which is then a bound for the rounded sums too.
        total = gathered[:, 0].clone()
        for split in range(1, codes.shape[1]):
            total += gathered[:, split]
        best = total.topk(min(k, len(total)))
        return items[best.indices], best.values


def upper_bound(next_scores: Float32Array) -> np.float32:
    """Return σ: the next scores of all splits, added one after the other in float32."""
    bound: np.float32 = np.add.accumulate(next_scores)[-1]
    return bound


def merge(
    top_items: torch.Tensor,
    top_scores: torch.Tensor,
    step_items: torch.Tensor,
    step_scores: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best k of both, every item once: it comes again with every split."""
    import torch

    # One step's items differ, as they come from one split; only known ones can repeat.
    new = ~torch.isin(step_items, top_items)
    items = torch.cat([top_items, step_items[new]])
    best = torch.cat([top_scores, step_scores[new]]).topk(min(k, len(items)))
    return items[best.indices], best.values


@dataclass(frozen=True)
class TorchRecJPQPrune:
    """Algorithm 1 as published, in torch."""

    sub_items_per_step: int = 8

    key: ClassVar[str] = "torch_recjpqprune"
    package: ClassVar[str] = "torch"

    def __post_init__(self) -> None:
        if self.sub_items_per_step < 1:
            raise InputError(
                f"sub_items_per_step is {self.sub_items_per_step}, expected at least 1"
            )

    def bytes_needed(self, shape: ModelShape) -> int:
        """Codes and posting lists as int32, and the sub-item embeddings."""
        return 8 * shape.num_items * shape.num_splits + shape.embedding_bytes

    def settings(self, shape: ModelShape) -> str:  # noqa: ARG002
        return f"RecJPQ's codes and posting lists, {self.sub_items_per_step} sub-items a step"

    def unsuited(self, shape: ModelShape) -> str | None:
        if shape.num_items >= 2**31:
            return f"{self.key} keeps item ids as int32, and {shape.num_items:,} are too many"
        return None

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:
        with needs_extra("train"):
            import torch

        def build() -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
            shape = model.shape
            offsets = np.arange(shape.num_splits, dtype=np.int32) * np.int32(shape.num_sub_items)
            lists = build_posting_lists(model.codes, shape.num_sub_items, threads=threads)
            sizes = np.diff(lists.offsets, axis=1).tolist()
            items = torch.tensor(lists.items.astype(np.int32, copy=False))
            views = [list(torch.split(row, size)) for row, size in zip(items, sizes, strict=True)]
            return torch.tensor(model.codes + offsets), views

        (codes, posting_lists), seconds = timed(build)
        embeddings = torch.tensor(model.sub_item_embeddings)
        return [
            TorchRecJPQPrunePeer(codes, posting_lists, embeddings, self.sub_items_per_step, seconds)
        ]
