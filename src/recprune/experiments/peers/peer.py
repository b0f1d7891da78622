"""What every peer is: built from the same codes and vectors, asked one query at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from recprune.search.checks import checked_codes, checked_queries, refuse_infinite
from recprune.types import CodeArray, Float32Array, InputError, Int64Array

Built = TypeVar("Built")


class Peer(Protocol):
    """One way to find the best items, with one setting. It uses one thread, and is used by one."""

    @property
    def name(self) -> str:
        """What it is called in a table: `FAISS HNSW, efSearch 64`."""

    @property
    def family(self) -> str:
        """What it is called in a picture, where the points of one family are joined."""

    @property
    def exact(self) -> bool:
        """Whether it is exhaustive over the same scores, up to the order of float additions."""

    @property
    def bytes_used(self) -> int:
        """Memory of what was built; peers that share one structure each name all of it."""

    @property
    def build_seconds(self) -> float:
        """Time to build it; peers that share one structure each name all of it."""

    def search(self, sequence_embedding: Float32Array, k: int) -> Int64Array:
        """Return the k best items for an embedding [d], best first; −1 where there are fewer."""


@dataclass(frozen=True)
class ModelShape:
    """How large a model is: all that is needed to say whether a peer can be built."""

    num_items: int
    num_splits: int = 8
    num_sub_items: int = 256
    width: int = 512  # d

    @property
    def vector_bytes(self) -> int:
        """Bytes of all item vectors, float32 [num_items, width]."""
        return 4 * self.num_items * self.width

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the sub-item embeddings."""
        return 4 * self.num_sub_items * self.width


@dataclass(frozen=True, eq=False)
class CodesAndVectors:
    """A RecJPQ model: codes [n, M] and sub-item embeddings [M, B, d/M]."""

    codes: CodeArray
    sub_item_embeddings: Float32Array

    def __post_init__(self) -> None:
        checked_codes(self.codes, self.sub_item_embeddings)
        if len(self.codes) == 0:
            raise InputError("codes has no items, and a peer needs at least one")

    @property
    def shape(self) -> ModelShape:
        """How large it is."""
        num_splits, num_sub_items, split_width = self.sub_item_embeddings.shape
        return ModelShape(len(self.codes), num_splits, num_sub_items, num_splits * split_width)

    def first(self, num_items: int) -> CodesAndVectors:
        """Return the model of the first items only: some peers take long to build."""
        return CodesAndVectors(self.codes[:num_items], self.sub_item_embeddings)

    def vectors_of(self, items: slice | Int64Array) -> Float32Array:
        """Return the vectors of some items, [items, d]: their sub-item vectors side by side."""
        chosen = self.codes[items]
        num_splits, _, split_width = self.sub_item_embeddings.shape
        # Filled in place: gathering first and joining later would take twice the memory.
        vectors = np.empty((len(chosen), num_splits, split_width), np.float32)
        for split, table in enumerate(self.sub_item_embeddings):
            vectors[:, split] = table[chosen[:, split]]
        return vectors.reshape(len(chosen), num_splits * split_width)

    def item_vectors(self) -> Float32Array:
        """Return the vectors of all items, [n, d]; the caller decides how long they stay."""
        return self.vectors_of(slice(None))


class Family(Protocol):
    """Peers that differ only in how thoroughly they search; its fields are its settings."""

    key: ClassVar[str]  # the short name by which a caller asks for it
    package: ClassVar[str]  # what has to be installed

    def bytes_needed(self, shape: ModelShape) -> int:
        """Return how much memory building takes, the item vectors included if they are needed."""

    def settings(self, shape: ModelShape) -> str:
        """Say what is built for a model of that shape, with all that was chosen."""

    def unsuited(self, shape: ModelShape) -> str | None:
        """Say why a model of that shape can never be built, or return None."""

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:
        """Build one structure and return the peers that search it."""


@contextmanager
def threads_set(count: int, get: Callable[[], int], put: Callable[[int], None]) -> Iterator[None]:
    """Let a library use so many threads for a while. Costs nothing if it does so already."""
    before = get()
    if before == count:
        yield
        return
    put(count)
    try:
        yield
    finally:
        put(before)


def timed(build: Callable[[], Built]) -> tuple[Built, float]:
    """Return what `build` returns, and the seconds that it took."""
    begun = time.perf_counter()
    built = build()
    return built, time.perf_counter() - begun


def checked_query(sequence_embedding: Float32Array, width: int, k: int) -> Float32Array:
    """Return the embedding as [1, d], or say what is wrong with it or k."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise InputError(f"k is {k!r}, expected an integer of at least 1")
    query, single = checked_queries(sequence_embedding, "sequence_embedding", (width,))
    if not single:
        raise InputError(f"sequence_embedding is a batch, expected one embedding [{width}]")
    refuse_infinite(query, "sequence_embedding")
    return query


def padded(ids: NDArray[np.integer], k: int) -> Int64Array:
    """Return ids as int64 [k], with −1 where there are fewer."""
    if len(ids) == k and ids.dtype == np.int64:
        return ids.astype(np.int64, copy=False)
    result = np.full(k, -1, np.int64)
    result[: len(ids)] = ids
    return result
