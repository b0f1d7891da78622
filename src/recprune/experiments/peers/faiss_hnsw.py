"""FAISS HNSW: a navigable graph over RecJPQ's codes, approximate.

Malkov and Yashunin, "Efficient and robust approximate nearest neighbor search using Hierarchical
Navigable Small World graphs", TPAMI 2020.

Item vectors are made of sub-item embeddings, so inner products are sums of looked-up ones, and the
graph is that of `IndexHNSWFlat` up to rounding, but faster to build and to search: codes stay in
the cache where vectors do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from recprune.experiments.peers.faiss_peer import FaissPeer, faiss_threads, import_faiss
from recprune.experiments.peers.faiss_pq import CENTROIDS, centroids_of, too_many_sub_items
from recprune.experiments.peers.peer import CodesAndVectors, ModelShape, Peer, timed

_ENCODED_AT_A_TIME = 8192  # items; FAISS's own number takes gigabytes of distances


@dataclass(frozen=True)
class FaissHNSW:
    """One graph, searched with several breadths."""

    links: int = 32  # M of the HNSW paper, and FAISS's own default
    build_breadth: int = 128  # efConstruction, as USearch has it; FAISS's 40 makes a poorer graph
    ef_search: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)

    key: ClassVar[str] = "faiss_hnsw"
    package: ClassVar[str] = "faiss"

    def bytes_needed(self, shape: ModelShape) -> int:
        """The item vectors, which FAISS reads once, and codes with the graph."""
        products = 4 * shape.num_splits * CENTROIDS**2
        distances = 4 * shape.num_splits * CENTROIDS * _ENCODED_AT_A_TIME
        return shape.vector_bytes + products + distances + self._bytes_used(shape)

    def settings(self, shape: ModelShape) -> str:  # noqa: ARG002
        return f"RecJPQ's codes, M = {self.links}, efConstruction = {self.build_breadth}"

    def unsuited(self, shape: ModelShape) -> str | None:
        return too_many_sub_items(self.key, shape)

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:
        """Build the graph: four minutes for a million items, on two cores."""
        faiss = import_faiss()

        def build() -> Any:
            storage = _codes_and_products(model)
            index = faiss.IndexHNSW(storage, self.links)
            index.is_trained = True
            index.hnsw.efConstruction = self.build_breadth
            with faiss_threads(threads), _encoding_by(_ENCODED_AT_A_TIME):
                index.add(model.item_vectors())
            # Encoding may have taken a sub-item for one whose vector is close.
            faiss.copy_array_to_vector(np.ascontiguousarray(model.codes).ravel(), storage.codes)
            faiss.Float32Vector().swap(storage.pq.sdc_table)  # a search compares no two codes
            return index

        index, seconds = timed(build)
        family, size = "FAISS HNSW", self._bytes_used(model.shape)
        return [
            FaissPeer(
                f"{family}, efSearch {ef}",
                family,
                False,
                size,
                seconds,
                index,
                faiss.SearchParametersHNSW(efSearch=ef),
            )
            for ef in self.ef_search
        ]

    def _bytes_used(self, shape: ModelShape) -> int:
        # Twice `links` neighbours on the bottom layer, `links` on each above, which few items
        # reach; an offset and a level for every item.
        upper = self.links / (self.links - 1)
        per_item = 4 * self.links * (1 + upper) + 8 + 4 + shape.num_splits
        return 4 * CENTROIDS * shape.width + round(shape.num_items * per_item)


@contextmanager
def _encoding_by(items: int) -> Iterator[None]:
    """Let FAISS encode so many vectors at a time."""
    settings = import_faiss().cvar
    before = settings.product_quantizer_compute_codes_bs
    settings.product_quantizer_compute_codes_bs = items
    try:
        yield
    finally:
        settings.product_quantizer_compute_codes_bs = before


def _codes_and_products(model: CodesAndVectors) -> Any:
    """Return the storage that the graph is built over: it encodes vectors as RecJPQ did.

    FAISS compares two codes by a table which it would fill with Euclidean distances.
    """
    faiss, shape = import_faiss(), model.shape
    storage = faiss.IndexPQ(shape.width, shape.num_splits, 8, faiss.METRIC_INNER_PRODUCT)
    centroids = centroids_of(model)
    faiss.copy_array_to_vector(centroids, storage.pq.centroids)
    by_split = centroids.reshape(shape.num_splits, CENTROIDS, -1)
    products = np.matmul(by_split, by_split.transpose(0, 2, 1))
    faiss.copy_array_to_vector(np.ascontiguousarray(products).ravel(), storage.pq.sdc_table)
    storage.is_trained = True
    return storage
