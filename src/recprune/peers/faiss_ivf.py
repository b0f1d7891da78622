"""FAISS inverted files: items grouped around centroids, the nearest groups searched; approximate.

`IndexIVFFlat` keeps item vectors, `IndexIVFPQ` RecJPQ's own codes. Groups are those of Euclidean
k-means, and a query visits those whose centroids have the largest inner product with it: a little
better on trained models than groups by inner product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from recprune.peers.faiss_peer import FaissPeer, import_faiss
from recprune.peers.faiss_pq import CENTROIDS, centroids_of, too_many_sub_items
from recprune.peers.peer import CodesAndVectors, ModelShape, Peer, threads_set, timed
from recprune.types import Float32Array, random_generator

_CHUNK = 65_536  # items whose vectors are put together at a time
_TRAINING_ITEMS_PER_LIST = 64
_ITERATIONS = 10  # of k-means


_PROBES = tuple(4**power for power in range(9))  # 1 … 65,536; more than all lists are all lists
_MANY, _FEW = 4, 1  # lists, in square roots of the number of items: FAISS's rule is 4 to 16


def number_of_lists(num_items: int, roots: int) -> int:
    """Return so many times the square root of the number of items, as the nearest power of two."""
    return min(num_items, int(2 ** round(np.log2(roots * num_items**0.5))))


@dataclass(frozen=True)
class FaissIVFFlat:
    """Groups of item vectors, several numbers of groups searched."""

    probes: tuple[int, ...] = _PROBES

    roots: ClassVar[int] = _MANY
    key: ClassVar[str] = "faiss_ivfflat"
    package: ClassVar[str] = "faiss"

    def bytes_needed(self, shape: ModelShape) -> int:
        """The lists, which take up to twice the room while they grow, and vectors for training."""
        return 2 * self._bytes_used(shape) + _training_bytes(shape, self.roots)

    def settings(self, shape: ModelShape) -> str:
        """Say what is built."""
        return f"item vectors, {_lists_in_words(shape, self.roots)}"

    def unsuited(self, shape: ModelShape) -> str | None:  # noqa: ARG002
        """Take any model."""
        return None

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:
        """Train the centroids and sort the vectors into lists."""
        faiss, width = import_faiss(), model.shape.width

        def build() -> Any:
            centroids = _train(model, self.roots, threads)
            index = faiss.IndexIVFFlat(
                _by_inner_product(centroids), width, len(centroids), faiss.METRIC_INNER_PRODUCT
            )
            _fill(index, centroids, model, threads, lambda items, vectors: vectors)  # noqa: ARG005
            return index

        index, seconds = timed(build)
        return _peers("FAISS IVF-Flat", index, self.probes, self._bytes_used(model.shape), seconds)

    def _bytes_used(self, shape: ModelShape) -> int:
        return shape.vector_bytes + 8 * shape.num_items + _centroid_bytes(shape, self.roots)


@dataclass(frozen=True)
class FaissIVFPQ:
    """Groups of RecJPQ codes, several numbers of groups searched."""

    probes: tuple[int, ...] = _PROBES

    roots: ClassVar[int] = _MANY
    key: ClassVar[str] = "faiss_ivfpq"
    package: ClassVar[str] = "faiss"

    def bytes_needed(self, shape: ModelShape) -> int:
        """The lists, which take up to twice the room while they grow, and vectors for training."""
        return 2 * self._bytes_used(shape) + _training_bytes(shape, self.roots)

    def settings(self, shape: ModelShape) -> str:
        """Say what is built."""
        return f"RecJPQ's codes, {_lists_in_words(shape, self.roots)}"

    def unsuited(self, shape: ModelShape) -> str | None:
        """Take any model whose codes are bytes."""
        return too_many_sub_items(self.key, shape)

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:
        """Train the centroids and sort the codes into lists."""
        faiss, shape = import_faiss(), model.shape

        def build() -> Any:
            centroids = _train(model, self.roots, threads)
            index = faiss.IndexIVFPQ(
                _by_inner_product(centroids), shape.width, len(centroids), shape.num_splits, 8,
                faiss.METRIC_INNER_PRODUCT,
            )  # fmt: skip
            index.by_residual = False  # the codes stand for whole vectors
            faiss.copy_array_to_vector(centroids_of(model), index.pq.centroids)
            _fill(index, centroids, model, threads, lambda items, vectors: model.codes[items])  # noqa: ARG005
            return index

        index, seconds = timed(build)
        return _peers("FAISS IVF-PQ", index, self.probes, self._bytes_used(shape), seconds)

    def _bytes_used(self, shape: ModelShape) -> int:
        codes = (shape.num_splits + 8) * shape.num_items
        return codes + 4 * CENTROIDS * shape.width + _centroid_bytes(shape, self.roots)


@dataclass(frozen=True)
class FaissIVFFlatFewLists(FaissIVFFlat):
    """Fewer, larger groups of item vectors."""

    roots: ClassVar[int] = _FEW
    key: ClassVar[str] = "faiss_ivfflat_few"


@dataclass(frozen=True)
class FaissIVFPQFewLists(FaissIVFPQ):
    """Fewer, larger groups of codes."""

    roots: ClassVar[int] = _FEW
    key: ClassVar[str] = "faiss_ivfpq_few"


def _lists_in_words(shape: ModelShape, roots: int) -> str:
    return (
        f"{number_of_lists(shape.num_items, roots):,} lists by {_ITERATIONS} iterations of "
        f"k-means over up to {_TRAINING_ITEMS_PER_LIST} items a list"
    )


def _centroid_bytes(shape: ModelShape, roots: int) -> int:
    return 4 * number_of_lists(shape.num_items, roots) * shape.width


def _training_bytes(shape: ModelShape, roots: int) -> int:
    # The sample, and what k-means and a chunk of assigned items take beside it.
    sample = _TRAINING_ITEMS_PER_LIST * number_of_lists(shape.num_items, roots)
    return 4 * shape.width * (min(shape.num_items, sample) + min(shape.num_items, _CHUNK))


def _train(model: CodesAndVectors, roots: int, threads: int) -> Float32Array:
    """Return centroids [lists, d] by k-means over some of the items."""
    faiss, shape = import_faiss(), model.shape
    num_lists = number_of_lists(shape.num_items, roots)
    size = min(shape.num_items, _TRAINING_ITEMS_PER_LIST * num_lists)
    sample = random_generator(0).choice(shape.num_items, size, replace=False)
    kmeans = faiss.Kmeans(
        shape.width, num_lists, niter=_ITERATIONS, seed=0, min_points_per_centroid=1,
        max_points_per_centroid=_TRAINING_ITEMS_PER_LIST,
    )  # fmt: skip
    with threads_set(threads, faiss.omp_get_max_threads, faiss.omp_set_num_threads):
        kmeans.train(model.vectors_of(np.sort(sample)))
    centroids: Float32Array = kmeans.centroids
    return centroids


def _by_inner_product(centroids: Float32Array) -> Any:
    """Return the index by which a query finds its groups."""
    quantiser = import_faiss().IndexFlatIP(centroids.shape[1])
    quantiser.add(centroids)
    return quantiser


def _fill(
    index: Any,
    centroids: Float32Array,
    model: CodesAndVectors,
    threads: int,
    payload: Callable[[slice, Float32Array], NDArray[Any]],
) -> None:
    """Put what an index keeps of every item into the list of its nearest centroid.

    `payload` gets a run of items and their vectors. Going by stand-alone codes (list number, then
    payload) lets us choose the lists, and keeps RecJPQ's codes from being computed anew.
    """
    faiss = import_faiss()
    index.is_trained = True
    nearest = faiss.IndexFlatL2(centroids.shape[1])
    nearest.add(centroids)
    with threads_set(threads, faiss.omp_get_max_threads, faiss.omp_set_num_threads):
        for start in range(0, len(model.codes), _CHUNK):
            items = slice(start, min(start + _CHUNK, len(model.codes)))
            vectors = model.vectors_of(items)
            _, lists = nearest.search(vectors, 1)
            prefix = lists.astype("<i8").view(np.uint8)[:, : index.coarse_code_size()]
            kept = np.ascontiguousarray(payload(items, vectors)).view(np.uint8)
            codes = np.concatenate([prefix, kept], axis=1)
            index.add_sa_codes(codes, np.arange(items.start, items.stop))


def _peers(kind: str, index: Any, probes: tuple[int, ...], size: int, seconds: float) -> list[Peer]:
    """Return one peer for every number of probes; more than all lists are all lists."""
    parameters = import_faiss().SearchParametersIVF
    family = f"{kind}, {index.nlist:,} lists"
    return [
        FaissPeer(
            f"{family}, nprobe {probe}", family, False, size, seconds, index,
            parameters(nprobe=probe),
        )
        for probe in sorted({min(probe, index.nlist) for probe in probes})
    ]  # fmt: skip
