"""Transformer Default in torch: the product with all item vectors, then the best k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from recprune.experiments.peers.peer import (
    CodesAndVectors,
    ModelShape,
    Peer,
    checked_query,
    padded,
    timed,
)
from recprune.experiments.peers.torch_peer import inference
from recprune.types import Float32Array, Int64Array, needs_extra

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class TorchDensePeer:
    """Scores every item by one matrix-vector product."""

    item_vectors: torch.Tensor  # [n, d]
    build_seconds: float
    name: str = "torch dense product"
    family: str = "torch dense product"
    exact: bool = True

    @property
    def bytes_used(self) -> int:
        return self.item_vectors.nbytes

    def search(self, sequence_embedding: Float32Array, k: int) -> Int64Array:
        import torch

        num_items, width = self.item_vectors.shape
        query = checked_query(sequence_embedding, width, k)
        with inference():
            scores = self.item_vectors @ torch.tensor(query[0])
            best = torch.topk(scores, min(k, num_items)).indices
        return padded(best.numpy(), k)


@dataclass(frozen=True)
class TorchDense:
    """Transformer Default, as a tensor framework computes it."""

    key: ClassVar[str] = "torch_dense"
    package: ClassVar[str] = "torch"

    def bytes_needed(self, shape: ModelShape) -> int:
        """All item vectors, which are all there is."""
        return shape.vector_bytes

    def settings(self, shape: ModelShape) -> str:  # noqa: ARG002
        return "item vectors"

    def unsuited(self, shape: ModelShape) -> str | None:  # noqa: ARG002
        return None

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:  # noqa: ARG002
        with needs_extra("train"):
            import torch
        vectors, seconds = timed(lambda: torch.from_numpy(model.item_vectors()))
        return [TorchDensePeer(vectors, seconds)]
