"""USearch: another navigable graph over item vectors, approximate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from recprune.experiments.peers.peer import (
    CodesAndVectors,
    ModelShape,
    Peer,
    checked_query,
    padded,
    timed,
)
from recprune.types import Float32Array, Int64Array, needs_extra


@dataclass(frozen=True, eq=False)
class UsearchPeer:
    """A USearch graph, searched with one breadth."""

    breadth: int
    bytes_used: int
    build_seconds: float
    index: Any
    family: str = "USearch"
    exact: bool = False

    @property
    def name(self) -> str:
        return f"USearch, expansion {self.breadth}"

    def search(self, sequence_embedding: Float32Array, k: int) -> Int64Array:
        query = checked_query(sequence_embedding, self.index.ndim, k)
        # The breadth belongs to the index that several peers share.
        self.index.expansion_search = self.breadth
        matches = self.index.search(query[0], min(k, len(self.index)), threads=1)
        return padded(matches.keys, k)


@dataclass(frozen=True)
class Usearch:
    """One graph, searched with several breadths."""

    links: int = 16  # connectivity; this and expansion_add are USearch's own defaults
    build_breadth: int = 128
    numbers: str = "f16"  # half as many bytes to read as f32
    breadths: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)

    key: ClassVar[str] = "usearch"
    package: ClassVar[str] = "usearch"

    def bytes_needed(self, shape: ModelShape) -> int:
        """The item vectors, and USearch's copy with the graph, which doubles when it grows."""
        per_item = 4 * 3 * self.links + 64  # neighbours on all layers, key and bookkeeping
        copy = shape.vector_bytes if self.numbers == "f32" else shape.vector_bytes // 2
        return shape.vector_bytes + 2 * (copy + per_item * shape.num_items)

    def settings(self, shape: ModelShape) -> str:  # noqa: ARG002
        return (
            f"item vectors as {self.numbers}, connectivity {self.links}, "
            f"expansion_add {self.build_breadth}"
        )

    def unsuited(self, shape: ModelShape) -> str | None:  # noqa: ARG002
        return None

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:
        """Build the graph: twelve minutes for a million items, on two cores."""
        with needs_extra("peers"):
            from usearch.index import Index

        def build() -> Any:
            index = Index(
                ndim=model.shape.width,
                metric="ip",
                dtype=self.numbers,
                connectivity=self.links,
                expansion_add=self.build_breadth,
            )
            index.add(np.arange(len(model.codes)), model.item_vectors(), threads=threads)
            return index

        index, seconds = timed(build)
        size = int(index.memory_usage)
        return [UsearchPeer(breadth, size, seconds, index) for breadth in self.breadths]
