"""FAISS inverted files: items grouped around centroids, the nearest groups searched; approximate.

`IndexIVFFlat` keeps item vectors, `IndexIVFPQ` RecJPQ's own codes. Groups are those of Euclidean
k-means, and a query visits those whose centroids have the largest inner product with it: a little
better on trained models than groups by inner product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from recprune.experiments.peers.faiss_peer import FaissPeer, faiss_threads, import_faiss
from recprune.experiments.peers.faiss_pq import CENTROIDS, centroids_of, too_many_sub_items
from recprune.experiments.peers.peer import CodesAndVectors, ModelShape, Peer, timed
from recprune.types import Float32Array, Int32Array, random_generator

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
        return f"item vectors, {_lists_in_words(shape, self.roots)}"

    def unsuited(self, shape: ModelShape) -> str | None:  # noqa: ARG002
        return None

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:
        """Train the centroids and sort the vectors into lists."""
        faiss, width = import_faiss(), model.shape.width

        groups = _groups_of(model, self.roots, threads)

        def build() -> Any:
            index = faiss.IndexIVFFlat(
                groups.by_inner_product(), width, groups.number, faiss.METRIC_INNER_PRODUCT
            )
            _fill(index, groups, model, model.vectors_of)
            return index

        index, seconds = timed(build)
        size = self._bytes_used(model.shape)
        return _peers("FAISS IVF-Flat", index, self.probes, size, groups.seconds + seconds)

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
        return f"RecJPQ's codes, {_lists_in_words(shape, self.roots)}"

    def unsuited(self, shape: ModelShape) -> str | None:
        return too_many_sub_items(self.key, shape)

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:
        """Train the centroids and sort the codes into lists."""
        faiss, shape = import_faiss(), model.shape

        groups = _groups_of(model, self.roots, threads)

        def build() -> Any:
            index = faiss.IndexIVFPQ(
                groups.by_inner_product(),
                shape.width,
                groups.number,
                shape.num_splits,
                8,
                faiss.METRIC_INNER_PRODUCT,
            )
            index.by_residual = False  # the codes stand for whole vectors
            faiss.copy_array_to_vector(centroids_of(model), index.pq.centroids)
            _fill(index, groups, model, lambda items: model.codes[items])
            return index

        index, seconds = timed(build)
        size = self._bytes_used(shape)
        return _peers("FAISS IVF-PQ", index, self.probes, size, groups.seconds + seconds)

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
    # The sample, and what k-means and a chunk of assigned items take beside it; and the groups of
    # all items, which are kept for other families.
    sample = _TRAINING_ITEMS_PER_LIST * number_of_lists(shape.num_items, roots)
    vectors = min(shape.num_items, sample) + min(shape.num_items, _CHUNK)
    return 4 * shape.width * vectors + 4 * shape.num_items


@dataclass(frozen=True, eq=False)
class _Groups:
    """Centroids [groups, d], the group of every item [n], and how long it took to find them."""

    centroids: Float32Array
    of_item: Int32Array
    seconds: float

    @property
    def number(self) -> int:
        return len(self.centroids)

    def by_inner_product(self) -> Any:
        """Return the index by which a query finds its groups."""
        quantiser = import_faiss().IndexFlatIP(self.centroids.shape[1])
        quantiser.add(self.centroids)
        return quantiser


# Vectors and codes of one model are grouped alike, and that takes most of the time.
_groups: WeakKeyDictionary[CodesAndVectors, dict[tuple[int, int], _Groups]] = WeakKeyDictionary()


def _groups_of(model: CodesAndVectors, roots: int, threads: int) -> _Groups:
    """Return the groups of a model, made once for all families."""
    known = _groups.setdefault(model, {})
    if (roots, threads) not in known:
        with faiss_threads(threads):
            centroids, training_seconds = timed(lambda: _train(model, roots))
            of_item, seconds = timed(lambda: _nearest(centroids, model))
        known[roots, threads] = _Groups(centroids, of_item, training_seconds + seconds)
    return known[roots, threads]


def _train(model: CodesAndVectors, roots: int) -> Float32Array:
    """Return centroids by k-means over some of the items."""
    shape = model.shape
    num_lists = number_of_lists(shape.num_items, roots)
    size = min(shape.num_items, _TRAINING_ITEMS_PER_LIST * num_lists)
    sample = random_generator(0).choice(shape.num_items, size, replace=False)
    kmeans = import_faiss().Kmeans(
        shape.width,
        num_lists,
        niter=_ITERATIONS,
        seed=0,
        min_points_per_centroid=1,
        max_points_per_centroid=_TRAINING_ITEMS_PER_LIST,
    )
    kmeans.train(model.vectors_of(np.sort(sample)))
    centroids: Float32Array = kmeans.centroids
    return centroids


def _nearest(centroids: Float32Array, model: CodesAndVectors) -> Int32Array:
    """Return the nearest centroid of every item."""
    index = import_faiss().IndexFlatL2(centroids.shape[1])
    index.add(centroids)
    nearest = np.empty(len(model.codes), np.int32)
    for items in _runs(model):
        nearest[items] = index.search(model.vectors_of(items), 1)[1][:, 0]
    return nearest


def _runs(model: CodesAndVectors) -> Iterator[slice]:
    for start in range(0, len(model.codes), _CHUNK):
        yield slice(start, min(start + _CHUNK, len(model.codes)))


def _fill(
    index: Any,
    groups: _Groups,
    model: CodesAndVectors,
    payload: Callable[[slice], NDArray[Any]],
) -> None:
    """Put what an index keeps of every item into the list of its group.

    Going by stand-alone codes (list number, then payload) lets us choose the lists, and keeps
    RecJPQ's codes from being computed anew.
    """
    index.is_trained = True
    for items in _runs(model):
        lists = groups.of_item[items, None].astype("<i8").view(np.uint8)
        kept = np.ascontiguousarray(payload(items)).view(np.uint8)
        codes = np.concatenate([lists[:, : index.coarse_code_size()], kept], axis=1)
        index.add_sa_codes(codes, np.arange(items.start, items.stop))


def _peers(kind: str, index: Any, probes: tuple[int, ...], size: int, seconds: float) -> list[Peer]:
    """Return one peer for every number of probes; more than all lists are all lists."""
    parameters = import_faiss().SearchParametersIVF
    family = f"{kind}, {index.nlist:,} lists"
    return [
        FaissPeer(
            f"{family}, nprobe {probe}",
            family,
            False,
            size,
            seconds,
            index,
            parameters(nprobe=probe),
        )
        for probe in sorted({min(probe, index.nlist) for probe in probes})
    ]
