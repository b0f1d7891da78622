"""What all FAISS peers share: one index, asked with one set of search parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from recprune.experiments.peers.peer import checked_query, threads_set
from recprune.types import Float32Array, Int64Array, needs_extra


@dataclass(frozen=True, eq=False)
class FaissPeer:
    """A FAISS index, asked for one query on one thread."""

    name: str
    family: str
    exact: bool
    bytes_used: int
    build_seconds: float
    index: Any
    parameters: Any = None  # None: the index has none

    def search(self, sequence_embedding: Float32Array, k: int) -> Int64Array:
        query = checked_query(sequence_embedding, self.index.d, k)
        with faiss_threads(1):
            _, ids = self.index.search(query, k, params=self.parameters)
        best: Int64Array = ids[0]
        return best


def faiss_threads(count: int) -> AbstractContextManager[None]:
    """Let FAISS use so many threads for a while."""
    faiss = import_faiss()
    return threads_set(count, faiss.omp_get_max_threads, faiss.omp_set_num_threads)


def import_faiss() -> Any:
    """Return the module; without it, raise an error that says what to install."""
    with needs_extra("bench"):
        import faiss
    return faiss
