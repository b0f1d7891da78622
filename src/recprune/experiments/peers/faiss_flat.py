"""FAISS IndexFlatIP: all item vectors, one inner product each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from recprune.experiments.peers.faiss_peer import FaissPeer, import_faiss
from recprune.experiments.peers.peer import CodesAndVectors, ModelShape, Peer, timed


@dataclass(frozen=True)
class FaissFlat:
    """Exhaustive search over item vectors."""

    key: ClassVar[str] = "faiss_flat"
    package: ClassVar[str] = "faiss"

    def bytes_needed(self, shape: ModelShape) -> int:
        """The item vectors, and FAISS's own copy."""
        return 2 * shape.vector_bytes

    def settings(self, shape: ModelShape) -> str:  # noqa: ARG002
        return "item vectors"

    def unsuited(self, shape: ModelShape) -> str | None:  # noqa: ARG002
        return None

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:  # noqa: ARG002
        faiss = import_faiss()

        def build() -> Any:
            index = faiss.IndexFlatIP(model.shape.width)
            index.add(model.item_vectors())
            return index

        index, seconds = timed(build)
        name = "FAISS flat"
        return [FaissPeer(name, name, True, model.shape.vector_bytes, seconds, index)]
