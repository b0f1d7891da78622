"""FAISS IndexHNSWFlat: a navigable graph over item vectors, approximate.

Malkov and Yashunin, "Efficient and robust approximate nearest neighbor search using Hierarchical
Navigable Small World graphs", TPAMI 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from recprune.peers.faiss_peer import FaissPeer, import_faiss
from recprune.peers.peer import CodesAndVectors, ModelShape, Peer, threads_set, timed


@dataclass(frozen=True)
class FaissHNSW:
    """One graph, searched with several breadths."""

    links: int = 32  # M of the HNSW paper, and FAISS's own default
    build_breadth: int = 128  # efConstruction, as USearch has it; FAISS's 40 makes a poorer graph
    ef_search: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)

    key: ClassVar[str] = "faiss_hnsw"
    package: ClassVar[str] = "faiss"

    def bytes_needed(self, shape: ModelShape) -> int:
        """The item vectors, and FAISS's own copy with the graph."""
        return shape.vector_bytes + self._bytes_used(shape)

    def settings(self, shape: ModelShape) -> str:  # noqa: ARG002
        """Say what is built."""
        return f"item vectors, M = {self.links}, efConstruction = {self.build_breadth}"

    def unsuited(self, shape: ModelShape) -> str | None:  # noqa: ARG002
        """Take any model."""
        return None

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:
        """Build the graph: a quarter of an hour for a million items, on two cores."""
        faiss = import_faiss()

        def build() -> Any:
            metric = faiss.METRIC_INNER_PRODUCT
            index = faiss.IndexHNSWFlat(model.shape.width, self.links, metric)
            index.hnsw.efConstruction = self.build_breadth
            with threads_set(threads, faiss.omp_get_max_threads, faiss.omp_set_num_threads):
                index.add(model.item_vectors())
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
        # Twice `links` neighbours on the ground floor, `links` on every other, which few items
        # reach; an offset and a level for every item.
        upper = self.links / (self.links - 1)
        per_item = 4 * self.links * (1 + upper) + 8 + 4
        return shape.vector_bytes + round(shape.num_items * per_item)
