"""ScaNN: groups of items, 4-bit codes within them, the best rescored by vectors; approximate.

Guo et al., "Accelerating Large-Scale Inference with Anisotropic Vector Quantization", ICML 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from recprune.experiments.peers.peer import (
    CodesAndVectors,
    ModelShape,
    Peer,
    checked_query,
    padded,
    timed,
)
from recprune.types import Float32Array, Int64Array, needs_extra

_DIMENSIONS_PER_BLOCK = 2  # each block of dimensions is a code of 4 bits
_ANISOTROPIC = 0.2  # as in ScaNN's own examples
_REORDERED = (100, 1000)  # candidates that are scored again by their vectors


@dataclass(frozen=True, eq=False)
class ScannPeer:
    """A ScaNN searcher that visits some leaves, and rescores some candidates by their vectors."""

    leaves: int
    reordered: int
    bytes_used: int
    build_seconds: float
    searcher: Any
    width: int
    exact: bool = False

    @property
    def family(self) -> str:
        return f"ScaNN, reorder {self.reordered}"

    @property
    def name(self) -> str:
        return f"{self.family}, {self.leaves} leaves"

    def search(self, sequence_embedding: Float32Array, k: int) -> Int64Array:
        query = checked_query(sequence_embedding, self.width, k)
        ids, _ = self.searcher.search(
            query[0],
            final_num_neighbors=k,
            pre_reorder_num_neighbors=max(k, self.reordered),
            leaves_to_search=self.leaves,
        )
        return padded(ids, k)


@dataclass(frozen=True)
class Scann:
    """One tree, searched with several numbers of leaves; more than all leaves are all."""

    leaves: tuple[int, ...] = (5, 25, 100, 400, 1000, 100_000)

    key: ClassVar[str] = "scann"
    package: ClassVar[str] = "scann"

    def bytes_needed(self, shape: ModelShape) -> int:
        """The item vectors, and ScaNN's own copy with its codes."""
        return shape.vector_bytes + self._bytes_used(shape)

    def settings(self, shape: ModelShape) -> str:
        return (
            f"item vectors, {_usual_leaves(shape.num_items):,} leaves, 4 bits for "
            f"{_DIMENSIONS_PER_BLOCK} dimensions, anisotropic threshold {_ANISOTROPIC}, the best "
            f"{' or '.join(f'{count:,}' for count in _REORDERED)} scored again"
        )

    def unsuited(self, shape: ModelShape) -> str | None:
        if shape.num_items < 1000:
            return (
                f"scann wants at least 1,000 items for its codes, and there are {shape.num_items}"
            )
        return None

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:
        """Train tree and codes: a minute or two for a million items."""
        with needs_extra("peers"):
            from scann.scann_ops.py import scann_ops_pybind
        shape = model.shape
        num_leaves = _usual_leaves(shape.num_items)
        leaves = sorted({min(number, num_leaves) for number in self.leaves})

        def build() -> Any:
            builder = scann_ops_pybind.builder(model.item_vectors(), 10, "dot_product")
            builder.tree(num_leaves, leaves[-1], training_sample_size=min(250_000, shape.num_items))
            builder.score_ah(_DIMENSIONS_PER_BLOCK, anisotropic_quantization_threshold=_ANISOTROPIC)
            return builder.reorder(max(_REORDERED)).set_n_training_threads(threads).build()

        searcher, seconds = timed(build)
        size = self._bytes_used(shape)
        return [
            ScannPeer(number, reordered, size, seconds, searcher, shape.width)
            for reordered in _REORDERED
            for number in leaves
        ]

    def _bytes_used(self, shape: ModelShape) -> int:
        codes = shape.num_items * -(-shape.width // (2 * _DIMENSIONS_PER_BLOCK))
        leaves = 4 * _usual_leaves(shape.num_items) * shape.width + 4 * shape.num_items
        return shape.vector_bytes + codes + leaves


def _usual_leaves(num_items: int) -> int:
    """Return about twice the square root of the number of items, as ScaNN's authors advise."""
    return max(1, round(2 * math.sqrt(num_items)))
