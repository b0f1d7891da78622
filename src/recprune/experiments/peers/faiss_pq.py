"""FAISS IndexPQ over RecJPQ's own codes: exhaustive and exact, without item vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from recprune.experiments.peers.faiss_peer import FaissPeer, import_faiss
from recprune.experiments.peers.peer import CodesAndVectors, ModelShape, Peer, timed
from recprune.types import Float32Array

CENTROIDS = 256  # a code is one byte


def too_many_sub_items(key: str, shape: ModelShape) -> str | None:
    """Say that a sub-item id does not fit one byte, or return None."""
    if shape.num_sub_items > CENTROIDS:
        return f"{key} has codes of one byte, and {shape.num_sub_items} sub-items need two"
    return None


def centroids_of(model: CodesAndVectors) -> Float32Array:
    """Return the sub-item embeddings as FAISS keeps them; sub-items that no code names are zero."""
    num_splits, num_sub_items, split_width = model.sub_item_embeddings.shape
    centroids = np.zeros((num_splits, CENTROIDS, split_width), np.float32)
    centroids[:, :num_sub_items] = model.sub_item_embeddings
    return centroids.ravel()


@dataclass(frozen=True)
class FaissPQ:
    """Exhaustive search over codes."""

    key: ClassVar[str] = "faiss_pq"
    package: ClassVar[str] = "faiss"

    def bytes_needed(self, shape: ModelShape) -> int:
        """Codes and centroids."""
        return shape.num_items * shape.num_splits + 4 * CENTROIDS * shape.width

    def settings(self, shape: ModelShape) -> str:  # noqa: ARG002
        return "RecJPQ's codes"

    def unsuited(self, shape: ModelShape) -> str | None:
        return too_many_sub_items(self.key, shape)

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:  # noqa: ARG002
        """Hand codes and centroids over: nothing is trained, nothing encoded."""
        faiss = import_faiss()
        shape = model.shape

        def build() -> Any:
            metric = faiss.METRIC_INNER_PRODUCT
            index = faiss.IndexPQ(shape.width, shape.num_splits, 8, metric)
            faiss.copy_array_to_vector(centroids_of(model), index.pq.centroids)
            faiss.copy_array_to_vector(np.ascontiguousarray(model.codes).ravel(), index.codes)
            index.ntotal, index.is_trained = shape.num_items, True
            return index

        index, seconds = timed(build)
        name = "FAISS PQ"
        return [FaissPeer(name, name, True, self.bytes_needed(shape), seconds, index)]
