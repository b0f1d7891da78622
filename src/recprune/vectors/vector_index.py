"""An index of vectors that somebody else's model made: quantised to codes, then searched exactly.

Exact means exact with respect to the codes. What quantising costs is measured when the index is
built, as recall against the vectors themselves, and can be won back by ranking the first
candidates by their vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import (
    CatalogueIds,
    ExternalId,
    RowNumbers,
    ids_from_arrays,
    sorted_ids,
)
from recprune.preparation.codebook import assign_pq
from recprune.search.checks import (
    MAX_SPLITS,
    checked_codes,
    checked_count,
    checked_k,
    checked_queries,
    refuse_infinite,
)
from recprune.search.faiss_io import read_faiss
from recprune.search.index import Index
from recprune.search.index_arrays import Layout
from recprune.search.methods import Method
from recprune.search.question import ScoreOverflowError, boosts_of, checked_question
from recprune.search.top_k import TopK
from recprune.storage import Saved, load_folder, save_folder
from recprune.types import (
    Boosts,
    CodeArray,
    Float32Array,
    InputError,
    Int64Array,
    Json,
    Progress,
    StorageError,
    frozen,
    no_progress,
    random_generator,
)
from recprune.vectors.rotation import balanced_rotation, checked_matrix, turned

KIND = "vector index"
_VERSION = 1
_CUTOFF = 10  # places of an answer that recall looks at
_QUERIES = 256  # of a sample, if none are given
_RERANKED = 100  # candidates, in the figures of a build
_SPLITS = (8, 16, 32, 64)  # tried in turn until the recall is reached
_PRODUCTS = 1 << 24  # that are computed at a time


@dataclass(frozen=True)
class Recall:
    """What an answer shares with the ten best by the vectors themselves, over some queries."""

    num_splits: int
    bytes_per_item: int  # of a code
    by_codes: float
    reranked: float  # where the best hundred by codes are ranked by their vectors


class VectorIndex:
    """Finds the items with the highest inner product. Immutable, and safe to share by threads."""

    def __init__(
        self,
        index: Index,
        rotation: Float32Array,
        item_ids: CatalogueIds,
        vectors: Float32Array | None,
        recalls: Sequence[Recall],
    ) -> None:
        """Use `build`, `from_codes`, `from_faiss` or `load`."""
        frozen(rotation)
        self.index = index  # of the turned vectors
        self.rotation = rotation  # what vectors and queries are turned by, [width of index, d]
        self.item_ids = item_ids
        self.vectors = vectors  # as they were given, in the order of the ids; None: not kept
        self.recalls = tuple(recalls)  # for every number of splits that was tried, the last is used

    def __repr__(self) -> str:
        kept = "vectors kept" if self.vectors is not None else "codes alone"
        return (
            f"VectorIndex({len(self.item_ids):,} items, d = {self.width}, "
            f"{self.index.num_splits} splits, {kept})"
        )

    @property
    def width(self) -> int:
        """The dimension d of vectors and queries."""
        return int(self.rotation.shape[1])

    @property
    def num_items(self) -> int:
        """Catalogue size."""
        return self.index.num_items

    # Making one ----------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        vectors: Any,
        item_ids: Any = None,
        *,
        num_splits: int | None = None,
        recall: float = 0.9,
        queries: Any = None,
        keep_vectors: bool = True,
        layout: Layout = "auto",
        seed: int = 0,
        threads: int = 1,
        progress: Progress = no_progress,
    ) -> VectorIndex:
        """Quantise vectors (floats [n, d]) and lay their codes out for search.

        `item_ids` are integers or strings, one for each vector; answers then have positions in
        their order, not in that of the vectors. Without `num_splits`, 8, 16, 32 and 64 are tried, a
        byte of a code each, until answers have the wanted `recall`: with vectors kept, of the best
        hundred by codes ranked anew; else of the codes alone. It is measured at ten places on
        `queries` (floats [q, d]), which should be such as will be asked; without any, on some of
        the items. All that was tried is in `recalls`.
        """
        given = checked_vectors(vectors, "vectors")
        ids: CatalogueIds = RowNumbers(len(given))
        if item_ids is not None:
            ids, order = sorted_ids(item_ids, len(given), "vectors")
            given = given[order]
        if not 0.0 < recall <= 1.0:
            raise InputError(f"recall is {recall}, expected more than 0, and at most 1")
        if len(given) < 2:
            raise InputError("vectors has 1 row, expected 2 or more")
        num_sub_items = min(256, len(given))
        if num_splits is not None and not (
            1 <= checked_count(num_splits, "num_splits") <= given.shape[1]
        ):
            raise InputError(f"num_splits is {num_splits}, expected 1 to d = {given.shape[1]}")
        rng = random_generator(seed)
        sample = given[np.sort(rng.permutation(len(given))[:_QUERIES])]
        asked = sample if queries is None else checked_vectors(queries, "queries")[:_QUERIES]
        if asked.shape[1] != given.shape[1]:
            raise InputError(f"queries are of width {asked.shape[1]}, vectors of {given.shape[1]}")
        progress("the best by the vectors themselves")
        wanted = best_products(given, asked, _CUTOFF)
        tried: list[Recall] = []
        sizes = [size for size in _SPLITS if size <= given.shape[1]] or [given.shape[1]]
        for size in sizes if num_splits is None else [num_splits]:
            progress(f"{size} splits")
            rotation = balanced_rotation(given, size, random_generator(seed, size))
            quantised = assign_pq(
                given @ rotation.T,
                num_splits=size,
                num_sub_items=num_sub_items,
                seed=seed,
                threads=threads,
            )
            index = Index.build(
                quantised.codebook.codes,
                quantised.sub_item_embeddings,
                layout=layout,
                threads=threads,
            )
            found = cls(index, rotation, ids, given, ())
            top = found.search(asked, _CUTOFF, threads=threads).ids
            again = found.search(asked, _CUTOFF, rerank=_RERANKED, threads=threads).ids
            tried.append(Recall(size, size, _shared(top, wanted), _shared(again, wanted)))
            if (tried[-1].reranked if keep_vectors else tried[-1].by_codes) >= recall:
                break
        return cls(index, rotation, ids, given if keep_vectors else None, tried)

    @classmethod
    def from_codes(
        cls,
        codes: CodeArray,
        sub_item_embeddings: Float32Array,
        item_ids: Any = None,
        *,
        rotation: Any = None,
        vectors: Any = None,
        layout: Layout = "auto",
        threads: int = 1,
    ) -> VectorIndex:
        """Take codes and sub-item embeddings, as `Index.build` does, that were made elsewhere.

        `item_ids` are those of the codes, as in `build`: answers then have positions in their
        order. `rotation` (floats [M · d/M, d]) is what vectors were multiplied by before they were
        quantised, and queries are before they are searched. `vectors` (floats [n, d]) are those
        that the codes are of, to rank by them again. Nothing is measured: `recalls` are empty.
        """
        given, embeddings = checked_codes(codes, sub_item_embeddings)
        count, width = len(given), embeddings.shape[0] * embeddings.shape[2]
        turning = np.eye(width, dtype=np.float32)
        if rotation is not None:
            turning = checked_vectors(rotation, "rotation").copy()
            if len(turning) != width:
                raise InputError(f"rotation has {len(turning)} rows, expected {width}")
        kept = None if vectors is None else checked_vectors(vectors, "vectors")
        if kept is not None and kept.shape != (count, turning.shape[1]):
            expected = f"[{count}, {turning.shape[1]}]"
            raise InputError(f"vectors are {list(kept.shape)}, expected {expected}")
        ids: CatalogueIds = RowNumbers(count)
        if item_ids is not None:
            ids, order = sorted_ids(item_ids, count, "codes")
            given, kept = given[order], None if kept is None else kept[order]
        index = Index.build(given, embeddings, layout=layout, threads=threads)
        return cls(index, turning, ids, kept, ())

    @classmethod
    def from_faiss(
        cls, index: Any, *, vectors: Any = None, layout: Layout = "auto", threads: int = 1
    ) -> VectorIndex:
        """Take over a `faiss.IndexPQ` (inner product, 8 bits) and what stands around it.

        That may be an `IndexPreTransform` of an `OPQMatrix`, or of other linear transforms without
        bias, and an `IndexIDMap`, whose ids become those of the items. `vectors`, in the order of
        FAISS, and everything else as in `from_codes`.
        """
        given = read_faiss(index)
        return cls.from_codes(
            given.codes,
            given.centroids,
            given.ids,
            rotation=given.rotation,
            vectors=vectors,
            layout=layout,
            threads=threads,
        )

    # Asking it -----------------------------------------------------------------------------------

    def search(
        self,
        queries: Any,
        k: int = 10,
        *,
        rerank: int = 0,
        method: str | Method = "auto",
        exclude: Any = None,
        allow: Any = None,
        boosts: Any = None,
        threads: int = 1,
    ) -> TopK:
        """Return the top k for queries (floats [q, d] or [d]): positions, by their codes.

        With `rerank`, so many of the best by codes, at least k, are ranked by their vectors: exact
        among these, approximate with respect to all vectors, as nothing says what codes have left
        out. Equal scores are ranked by position. `method`, `exclude`, `allow` and `boosts` are
        those of `Index.search`, by position; boosts are added to products with vectors as well.
        """
        asked, single = self._checked(queries)
        k, rerank = checked_k(k, self.num_items), checked_count(rerank, "rerank")
        if rerank < 0:
            raise InputError(f"rerank is {rerank}, expected 0 or more")
        if single:
            exclude = None if exclude is None else [exclude]
            boosts = None if boosts is None else [boosts]
        question = checked_question(
            self.index,
            turned(asked, self.rotation, "queries"),
            max(k, min(rerank, self.num_items)),
            method,
            exclude,
            allow,
            boosts=boosts,
            threads=threads,
        )
        top = self.index.answer(question)
        if rerank:
            added = [boosts_of(question, query) for query in range(len(asked))]
            top = self.reranked(asked, top, k, boosts=added)
        return TopK(top.ids[0], top.scores[0], top.stats) if single else top

    def turned(self, queries: Any) -> Float32Array:
        """Return queries as `index` takes them, and a live index of the same codes."""
        asked, single = self._checked(queries)
        found = turned(asked, self.rotation, "queries")
        return found[0] if single else found

    def reranked(
        self,
        queries: Float32Array,
        top: TopK,
        k: int,
        *,
        boosts: Sequence[Boosts | None] | None = None,
    ) -> TopK:
        """Return the best k of answers to queries (float32 [q, d]), by the vectors themselves.

        `top` is what `index` has found for them, as they are when `turned`. Its statistics stay:
        they are about the codes. `boosts`, if the candidates were found with any, are added last.
        """
        if self.vectors is None:
            raise InputError("rerank needs the vectors, which this index was built without")
        ids = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        for query, row in enumerate(top.ids):
            # By ascending id, so that a stable sort keeps the tie rule.
            candidates = np.sort(row[row >= 0])
            added = None if boosts is None else boosts[query]
            totals = _products(self.vectors, candidates, queries[query])
            if added is not None:
                _add(totals, candidates, added)
            if not np.isfinite(totals).all():
                raise ScoreOverflowError(
                    f"queries[{query}]: its product with a vector is more than float32 can hold",
                    query,
                )
            best = np.argsort(-totals, kind="stable")[:k]
            ids[query, : len(best)] = candidates[best]
            scores[query, : len(best)] = totals[best]
        return TopK(ids, scores, top.stats)

    def external_ids(self, top: TopK) -> list[list[ExternalId]]:
        """Return the external ids of an answer, a list for each query; padding is left out."""
        rows = np.atleast_2d(top.ids)
        return [list(self.item_ids.take(row[row >= 0].tolist())) for row in rows]

    def _checked(self, queries: Any) -> tuple[Float32Array, bool]:
        """Return queries as [q, d], and whether there was just one without a batch."""
        given = _narrow(_floats(queries, "queries", "[q, d] or [d]"))
        asked, single = checked_queries(given, "queries", (self.width,))
        refuse_infinite(asked, "queries")
        return asked, single

    # Keeping it ----------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the index as a folder, in place of an older one if there is one."""
        arrays: dict[str, Any] = {"rotation": self.rotation}
        if self.vectors is not None:
            arrays["vectors"] = self.vectors
        if not isinstance(self.item_ids, RowNumbers):
            arrays |= self.item_ids.to_arrays("item_ids")
        settings: Json = {"recalls": [asdict(recall) for recall in self.recalls]}
        parts = {"index": self.index.parts()}
        save_folder(folder, Saved(KIND, _VERSION, settings, arrays, parts))

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = True) -> VectorIndex:
        """Memory-map a saved index; `verify` compares every byte with its checksum first."""
        saved = load_folder(folder, kind=KIND, version=_VERSION, verify=verify)
        index = Index.from_parts(saved.part("index", str(folder)), str(folder))
        try:
            ids = ids_from_arrays(saved.arrays, "item_ids") or RowNumbers(index.num_items)
            if len(ids) != index.num_items:
                raise StorageError(f"{len(ids)} item_ids, the index has {index.num_items} items")
            rotation = checked_matrix(saved.arrays["rotation"], index.width, "rotation")
            vectors = None
            if "vectors" in saved.arrays:
                vectors = checked_matrix(saved.arrays["vectors"], index.num_items, "vectors")
                if vectors.shape[1] != rotation.shape[1]:
                    raise StorageError("vectors and rotation are of different widths")
            recalls = [_saved_recall(recall) for recall in saved.settings["recalls"]]
        except (KeyError, TypeError) as error:
            raise StorageError(f"{folder}: the vector index has no proper {error}") from None
        except StorageError as error:
            raise StorageError(f"{folder}: {error}") from None
        return cls(index, rotation, ids, vectors, recalls)


def _saved_recall(values: Any) -> Recall:
    recall = Recall(**values)
    counts, shares = astuple(recall)[:2], astuple(recall)[2:]
    if not all(type(count) is int and 1 <= count <= MAX_SPLITS for count in counts) or not all(
        type(share) is float and 0.0 <= share <= 1.0 for share in shares
    ):
        raise StorageError(f"a recall is {values!r:.200}, expected counts of bytes, and shares")
    return recall


def _products(vectors: Float32Array, rows: Int64Array, query: Float32Array) -> Float32Array:
    """Return the inner product of a query with each of some rows, in the order of the rows.

    A row has the same bits in any company, and equal rows have the same: BLAS adds up the rows of a
    block in other orders than those of the rest. Products of float32 are exact in float64.
    """
    found = np.empty(len(rows), np.float32)
    step = max(1, _PRODUCTS // len(query))
    for first in range(0, len(rows), step):
        some = vectors[rows[first : first + step]]
        with np.errstate(over="ignore"):  # beyond float32 is infinity
            found[first : first + step] = (some * query.astype(np.float64)).sum(axis=1)
    return found


def _add(scores: Float32Array, items: Int64Array, boosts: Boosts) -> None:
    """Add boosts to the scores of those items, ascending, that they are of."""
    boosted, values = boosts
    places = np.minimum(np.searchsorted(items, boosted), max(0, len(items) - 1))
    found = items[places] == boosted if len(items) else np.zeros(len(boosted), np.bool_)
    with np.errstate(over="ignore"):
        scores[places[found]] += values[found]


def best_products(vectors: Float32Array, queries: Float32Array, k: int) -> Int64Array:
    """Return the k vectors of the highest inner product with each query, in no order, [q, k]."""
    k = min(k, len(vectors))
    step = max(1, _PRODUCTS // len(vectors))
    found = [
        np.argpartition(-(queries[start : start + step] @ vectors.T), k - 1, axis=1)[:, :k]
        for start in range(0, len(queries), step)
    ]
    return np.concatenate(found)


def checked_vectors(vectors: Any, name: str) -> Float32Array:
    """Return floats [n, d] as float32: of NumPy, a list, or whatever has `__array__`."""
    given = _floats(vectors, name, "[n, d]")
    if given.ndim != 2 or 0 in given.shape:
        raise InputError(f"{name} is {given.dtype}{list(given.shape)}, expected floats [n, d]")
    narrow = _narrow(given)
    finite = np.isfinite(narrow).all(axis=1)
    if not finite.all():
        row = int(finite.argmin())
        raise InputError(f"{name}[{row}] holds NaN, infinity or what float32 cannot hold")
    return narrow


def _floats(given: Any, name: str, shape: str) -> NDArray[Any]:
    """Return numbers as an array of their own type; `shape` is what an error says of its sizes."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} cannot be read as an array: {error}") from None
    if array.dtype.kind not in "fiu":
        raise InputError(f"{name} is {array.dtype}{list(array.shape)}, expected floats {shape}")
    return array


def _narrow(given: NDArray[Any]) -> Float32Array:
    """Return numbers as float32; those that it cannot hold are infinite."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(given, np.float32).reshape(given.shape)


def _shared(found: Int64Array, wanted: Int64Array) -> float:
    """Return the share of what was wanted that was found, the mean over queries."""
    return float(
        np.mean([np.isin(row, best).mean() for row, best in zip(wanted, found, strict=True)])
    )
