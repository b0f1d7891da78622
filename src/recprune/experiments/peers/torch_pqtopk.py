"""PQTopK in torch: gather sub-item scores for every item, add them up, take the best k.

Petrov, Macdonald and Tonellotto, "Efficient Inference of Sub-Item Id-based Sequential
Recommendation Models with Millions of Items", RecSys 2024.
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
from recprune.types import Float32Array, Int64Array, needs_extra

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class TorchPQTopKPeer:
    """Scores every item from the sub-item scores, split by split."""

    codes: torch.Tensor  # [M, n]: a split's sub-item ids stand together
    sub_item_embeddings: torch.Tensor  # [M, B, d/M]
    build_seconds: float
    name: str = "torch PQTopK"
    family: str = "torch PQTopK"
    exact: bool = True

    @property
    def bytes_used(self) -> int:
        return self.codes.nbytes + self.sub_item_embeddings.nbytes

    def search(self, sequence_embedding: Float32Array, k: int) -> Int64Array:
        import torch

        num_splits, _, split_width = self.sub_item_embeddings.shape
        query = checked_query(sequence_embedding, num_splits * split_width, k)
        with inference():
            scores = sub_item_scores(query, self.sub_item_embeddings)
            # torch takes bytes for a mask; widened when needed, they cost less memory traffic.
            total = scores[0].index_select(0, self.codes[0].to(torch.int32))
            for split in range(1, num_splits):
                total += scores[split].index_select(0, self.codes[split].to(torch.int32))
            best = torch.topk(total, min(k, len(total))).indices
        return padded(best.numpy(), k)


@dataclass(frozen=True)
class TorchPQTopK:
    """PQTopK as published, in torch."""

    key: ClassVar[str] = "torch_pqtopk"
    package: ClassVar[str] = "torch"

    def bytes_needed(self, shape: ModelShape) -> int:
        """Codes and sub-item embeddings."""
        code_bytes = 1 if shape.num_sub_items <= 256 else 2
        return code_bytes * shape.num_items * shape.num_splits + shape.embedding_bytes

    def settings(self, shape: ModelShape) -> str:  # noqa: ARG002
        return "RecJPQ's codes"

    def unsuited(self, shape: ModelShape) -> str | None:  # noqa: ARG002
        return None

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:  # noqa: ARG002
        with needs_extra("train"):
            import torch
        codes, seconds = timed(lambda: torch.tensor(np.ascontiguousarray(model.codes.T)))
        return [TorchPQTopKPeer(codes, torch.tensor(model.sub_item_embeddings), seconds)]
