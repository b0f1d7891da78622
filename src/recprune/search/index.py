"""The index: item codes and sub-item vectors, laid out for exact search."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from recprune import _native
from recprune.search.checks import (
    checked_allow,
    checked_bias,
    checked_codes,
    checked_exclude,
    checked_floor,
    checked_items,
    checked_k,
    checked_queries,
    checked_threads,
    eligible,
    refuse_infinite,
)
from recprune.search.dense import dense_top_k
from recprune.search.methods import (
    Auto,
    Cells,
    Default,
    Method,
    RecJPQPrune,
    Scan,
    find_method,
)
from recprune.search.posting_lists import build_posting_lists
from recprune.search.reference import score_items
from recprune.search.top_k import RECORD, RECORD_WORDS, SearchStats, TopK
from recprune.storage import load_folder, save_folder
from recprune.types import (
    CodeArray,
    Float32Array,
    InputError,
    Int64Array,
    Json,
    StorageError,
    frozen,
    needs_extra,
)

Layout = Literal["auto", "full", "compact"]

KIND = "index"
_VERSION = 4
_LIST_PARTS = (
    "list_offsets",
    "list_second_codes",
    "list_bases",
    "list_steps",
    "list_codes",
    "list_items",
)


class Index:
    """Finds the exact top K of a catalogue. Immutable, and safe to share between threads."""

    def __init__(
        self,
        arrays: dict[str, NDArray[Any]],
        *,
        num_items: int,
        num_sub_items: int,
        layout: str,
    ) -> None:
        """Use `Index.build` or `Index.load`; `arrays` are taken over."""
        for array in arrays.values():
            frozen(array)
        self._arrays = arrays
        self._layout = layout
        self.num_items = num_items
        self.num_sub_items = num_sub_items
        transposed = arrays["transposed_embeddings"]
        self.num_splits = int(transposed.shape[0])
        self.width = int(transposed.shape[0] * transposed.shape[1])  # d
        self._dense: Float32Array | None = None
        self._has_posting_lists = False
        self._lock = threading.Lock()  # for what is built on first use
        self._native = _native.SearchIndex(num_items, transposed)
        if "codes" in arrays:
            wide = arrays["codes"].dtype == np.uint16
            (self._native.set_wide_codes if wide else self._native.set_codes)(arrays["codes"])
        if "list_offsets" in arrays:
            self._native.set_lists(*(arrays[name] for name in _LIST_PARTS))
        if "cell_offsets" in arrays:
            self._native.set_cells(
                arrays["cell_offsets"], arrays["cell_keys"], arrays["cell_items"]
            )
        bias = arrays.get("item_bias")
        if bias is not None and num_items:
            self._native.set_item_bias(bias, float(bias.max()), float(np.abs(bias).max()))

    # Making one ----------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        codes: CodeArray,
        sub_item_embeddings: Float32Array,
        *,
        item_bias: Float32Array | None = None,
        layout: Layout = "auto",
        threads: int = 1,
    ) -> Index:
        """Lay out codes (uint8 or uint16 [n, M]) and sub-item embeddings (float32 [M, B, d/M]).

        The full layout has everything that the codes allow; the compact one keeps only the lists
        that a scan reads, in about M + 2 bytes an item (M = 8: 10.2). `item_bias` (float32 [n]) is
        added to the scores.
        """
        if layout not in get_args(Layout):
            raise InputError(f"layout is {layout!r}, expected one of {', '.join(get_args(Layout))}")
        checked: NDArray[Any]
        checked, embeddings = checked_codes(codes, sub_item_embeddings)
        checked_threads(threads)
        num_items, num_splits = checked.shape
        num_sub_items = embeddings.shape[1]
        narrow = checked.dtype == np.uint8
        if layout == "compact" and not narrow:
            raise InputError("the compact layout needs codes of type uint8")
        arrays: dict[str, NDArray[Any]] = {
            # Always a copy: nobody may change an index from outside.
            "transposed_embeddings": np.array(embeddings.transpose(0, 2, 1), order="C")
        }
        if item_bias is not None:
            arrays["item_bias"] = checked_bias(item_bias, num_items)
        if layout != "compact":
            arrays["codes"] = np.array(checked)  # our own: nobody may change it under us
        if narrow:
            lists = _native.build_lists(checked, num_sub_items, threads)
            arrays |= dict(zip(_LIST_PARTS, lists, strict=True))
        if narrow and layout != "compact" and num_splits == 8:
            cells = _native.build_cells(checked, threads)
            arrays |= dict(zip(("cell_offsets", "cell_keys", "cell_items"), cells, strict=True))
        return cls(
            arrays,
            num_items=num_items,
            num_sub_items=num_sub_items,
            layout="compact" if layout == "compact" else "full",
        )

    @classmethod
    def from_faiss(cls, index_pq: Any, *, layout: Layout = "auto", threads: int = 1) -> Index:
        """Take over the codes and centroids of a `faiss.IndexPQ` (inner product, 8 bits)."""
        with needs_extra("bench"):
            import faiss
        if not isinstance(index_pq, faiss.IndexPQ):
            raise InputError(f"index_pq is a {type(index_pq).__name__}, expected a faiss.IndexPQ")
        if index_pq.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise InputError("index_pq does not rank by inner product")
        pq = index_pq.pq
        if pq.nbits != 8:
            raise InputError(f"index_pq has {pq.nbits} bits a code, expected 8")
        codes = faiss.vector_to_array(index_pq.codes).reshape(index_pq.ntotal, pq.M)
        centroids = faiss.vector_to_array(pq.centroids).reshape(pq.M, pq.ksub, pq.dsub)
        return cls.build(codes, centroids, layout=layout, threads=threads)

    def to_faiss(self) -> Any:
        """Return a `faiss.IndexPQ` with the same codes and vectors; it knows no item bias."""
        with needs_extra("bench"):
            import faiss
        if self.num_sub_items != 256 or "item_bias" in self._arrays:
            raise InputError("faiss.IndexPQ needs 256 sub-items per split and no item bias")
        peer = faiss.IndexPQ(self.width, self.num_splits, 8, faiss.METRIC_INNER_PRODUCT)
        embeddings = self._arrays["transposed_embeddings"].transpose(0, 2, 1)
        faiss.copy_array_to_vector(np.ascontiguousarray(embeddings).ravel(), peer.pq.centroids)
        faiss.copy_array_to_vector(np.ascontiguousarray(self._codes()).ravel(), peer.codes)
        peer.ntotal, peer.is_trained = self.num_items, True
        return peer

    def save(self, folder: str | Path) -> None:
        """Write the index as a folder, in place of an older index if there is one."""
        settings, arrays = self.parts()
        save_folder(folder, kind=KIND, version=_VERSION, settings=settings, arrays=arrays)

    def parts(self) -> tuple[Json, dict[str, NDArray[Any]]]:
        """Return the settings and arrays that make up the index, for those who store it."""
        settings: Json = {
            "num_items": self.num_items,
            "num_sub_items": self.num_sub_items,
            "layout": self._layout,
        }
        return settings, dict(self._arrays)

    @classmethod
    def from_parts(cls, settings: Json, arrays: dict[str, NDArray[Any]], source: str) -> Index:
        """Return the index with these parts; `source` says in an error where they came from."""
        try:
            return cls(arrays, **settings)
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"{source}: an incomplete index: {error}") from None

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = False) -> Index:
        """Memory-map a saved index; `verify` compares every byte with its checksum first."""
        settings, arrays = load_folder(folder, kind=KIND, version=_VERSION, verify=verify)
        return cls.from_parts(settings, arrays, str(folder))

    # Asking it -----------------------------------------------------------------------------------

    def search(
        self,
        sequence_embeddings: Float32Array,
        k: int = 10,
        *,
        method: str | Method = "auto",
        exclude: Any = None,
        allow: Any = None,
        floor: Any = None,
        threads: int = 1,
    ) -> TopK:
        """Return the exact top k for sequence embeddings (float32 [queries, d], or [d]).

        `exclude` are item ids not to return: a sequence of them, for a batch one sequence per query
        (or an array padded with −1). `allow` says which items may be returned at all: a boolean
        mask [n] or [queries, n], or the same as bits in uint64 words. Below `floor`, a score or one
        for each query, nothing is returned, and less is searched. The tie rule is score descending,
        item id ascending.
        """
        return self._search(
            sequence_embeddings,
            "sequence_embeddings",
            (self.width,),
            k,
            method,
            exclude,
            allow,
            floor,
            threads,
        )

    def search_scores(
        self,
        sub_item_scores: Float32Array,
        k: int = 10,
        *,
        method: str | Method = "auto",
        exclude: Any = None,
        allow: Any = None,
        floor: Any = None,
        threads: int = 1,
    ) -> TopK:
        """Return the exact top k for sub-item scores S (float32 [queries, M, B], or [M, B])."""
        shape = (self.num_splits, self.num_sub_items)
        return self._search(
            sub_item_scores, "sub_item_scores", shape, k, method, exclude, allow, floor, threads
        )

    def search_visibly(
        self,
        sequence_embedding: Float32Array,
        k: int = 10,
        *,
        method: str | Method = "auto",
        exclude: Any = None,
        allow: Any = None,
    ) -> tuple[TopK, NDArray[np.bool_]]:
        """Search for one sequence embedding [d]; say which sub-item ids were visited, [M, B].

        These are the lists that were looked through, and both sub-item ids of every cell. None for
        the methods that do not go by them.
        """
        if np.shape(sequence_embedding) != (self.width,):
            raise InputError(
                f"sequence_embedding has shape {list(np.shape(sequence_embedding))}, "
                f"expected [{self.width}]: one query at a time"
            )
        marks = np.zeros((1, self.num_splits * self.num_sub_items), np.uint8)
        top = self._search(
            sequence_embedding,
            "sequence_embedding",
            (self.width,),
            k,
            method,
            exclude,
            allow,
            None,
            1,
            marks,
        )
        return top, marks.reshape(self.num_splits, self.num_sub_items).astype(np.bool_)

    def sub_item_scores(self, sequence_embeddings: Float32Array) -> Float32Array:
        """Return S, [queries, M, B] or [M, B]: what `search_scores` searches with."""
        queries, single = checked_queries(sequence_embeddings, "sequence_embeddings", (self.width,))
        refuse_infinite(queries, "sequence_embeddings")
        tables: Float32Array = self._native.sub_item_scores(queries)
        return tables[0] if single else tables

    def item_codes(self) -> NDArray[Any]:
        """Return the codes of all items, [n, M]; a compact index puts them together."""
        return self._codes()

    def sub_item_embeddings(self) -> Float32Array:
        """Return the vectors of the sub-items, [M, B, d/M]."""
        return self._arrays["transposed_embeddings"].transpose(0, 2, 1)

    def score(self, sequence_embeddings: Float32Array, items: Any) -> Float32Array:
        """Return the scores of given items, [queries, items] or [items]: PQTopK on a subset."""
        queries, single = checked_queries(sequence_embeddings, "sequence_embeddings", (self.width,))
        wanted = checked_items(items, self.num_items)
        tables = self.sub_item_scores(queries)
        codes, bias = self._codes()[wanted], self._arrays.get("item_bias")
        chosen_bias = bias[wanted] if bias is not None else None
        rows = [score_items(table, codes, chosen_bias) for table in tables]
        scores = np.array(rows, np.float32).reshape(len(queries), len(wanted))
        return scores[0] if single else scores

    def describe(self) -> Json:
        """Say what the index holds and costs."""
        size = sum(array.nbytes for array in self._arrays.values())
        return {
            "items": self.num_items,
            "splits": self.num_splits,
            "sub_items": self.num_sub_items,
            "width": self.width,
            "layout": self._layout,
            "parts": sorted(self._arrays),
            "bytes": size,
            "bytes_per_item": round(size / max(self.num_items, 1), 2),
            "instruction_set": instruction_set(),
        }

    def __repr__(self) -> str:
        return f"Index({self.num_items:,} items, {self.num_splits} splits, {self._layout} layout)"

    # Inside --------------------------------------------------------------------------------------

    def _search(
        self,
        queries: Any,
        name: str,
        shape: tuple[int, ...],
        k: int,
        method: str | Method,
        exclude: Any,
        allow: Any,
        floor: Any,
        threads: int,
        visited: NDArray[np.uint8] | None = None,
    ) -> TopK:
        # A search may take 50 µs and finds cold caches: every line here is felt.
        chosen, settings = find_method(method)
        k = checked_k(k)
        checked_threads(threads)
        batch, single = checked_queries(queries, name, shape)
        offsets, excluded = checked_exclude(exclude, len(batch), single, self.num_items)
        allowed = checked_allow(allow, len(batch), self.num_items)
        floors = checked_floor(floor, len(batch))
        if type(chosen) is Default:
            refuse_infinite(batch, name)
            ids, scores, records = self._search_dense(
                batch, name, k, chosen, offsets, excluded, allowed, floors
            )
        else:
            if type(chosen) is not Auto:
                self._require_parts(chosen)
            number, step, max_steps, over_inflation, deadline_ns = settings
            ids = np.empty((len(batch), k), np.int64)
            scores = np.empty((len(batch), k), np.float32)
            records = np.empty((len(batch), RECORD_WORDS), np.int64)
            try:
                self._native.search(
                    batch, name == "sub_item_scores", k, number, threads, offsets, excluded,
                    allowed, step, max_steps, over_inflation, deadline_ns, ids, scores, records,
                    visited, floors,
                )  # fmt: skip
            except ValueError as error:
                refuse_infinite(queries, name)
                raise InputError(str(error)) from None
        stats = SearchStats(records)
        return TopK(ids[0], scores[0], stats) if single else TopK(ids, scores, stats)

    def _require_parts(self, method: Method) -> None:
        if isinstance(method, Cells) and "cell_offsets" not in self._arrays:
            raise InputError("method cells needs 8 splits of at most 256 sub-items, full layout")
        if isinstance(method, Scan) and "list_offsets" not in self._arrays:
            raise InputError("method scan needs codes of type uint8")
        if isinstance(method, RecJPQPrune):
            if "codes" not in self._arrays:
                raise InputError("method recjpqprune needs the full layout")
            with self._lock:
                if not self._has_posting_lists:
                    # Four bytes an item and split that nothing else needs: built when asked for.
                    lists = build_posting_lists(self._arrays["codes"], self.num_sub_items)
                    items: NDArray[Any] = lists.items
                    self._native.set_posting_lists(lists.offsets, items)
                    self._has_posting_lists = True

    def _codes(self) -> NDArray[Any]:
        """Return item-major codes; a compact index puts them together from its lists."""
        if "codes" in self._arrays:
            return self._arrays["codes"]
        offsets, second_codes, bases, steps, rows, items = (
            self._arrays[name] for name in _LIST_PARTS
        )
        codes = np.empty((self.num_items, self.num_splits), np.uint8)
        real = items != np.uint32(0xFFFFFFFF)
        lists = np.repeat(np.arange(self.num_sub_items), np.diff(offsets))
        codes[items[real], 0] = np.broadcast_to(lists[:, None], items.shape)[real]
        if self.num_splits > 1:
            bits = np.unpackbits(steps.astype("<u8").view(np.uint8), bitorder="little")
            ranks = bases[:, None] + bits.reshape(items.shape).cumsum(axis=1, dtype=np.uint8)
            codes[items[real], 1] = second_codes[lists[:, None], ranks][real]
        for split in range(2, self.num_splits):
            codes[items[real], split] = rows[split - 2][real]
        return codes

    def _dense_items(
        self, codes: NDArray[Any], embeddings: Float32Array, method: Default
    ) -> Float32Array:
        """Return all item vectors, [n, d]; built on first use if the method allows that much."""
        with self._lock:
            if self._dense is None:
                needed = 4 * self.num_items * self.width
                if needed > method.max_bytes:
                    raise InputError(
                        f"method default needs {needed:,} bytes for all item vectors, more than "
                        f"its max_bytes of {method.max_bytes:,}: Default(max_bytes=...) allows more"
                    )
                parts = [embeddings[m][codes[:, m]] for m in range(self.num_splits)]
                self._dense = np.concatenate(parts, axis=1)
            return self._dense

    def _search_dense(
        self,
        batch: Float32Array,
        name: str,
        k: int,
        method: Default,
        offsets: Int64Array | None,
        excluded: NDArray[np.uint32] | None,
        allowed: NDArray[np.uint64] | None,
        floors: Float32Array | None,
    ) -> tuple[Int64Array, Float32Array, Int64Array]:
        """Answer by method default, one query after the other."""
        if name == "sub_item_scores":
            raise InputError("method default needs sequence embeddings, not sub-item scores")
        codes, bias = self._codes(), self._arrays.get("item_bias")
        embeddings = self._arrays["transposed_embeddings"].transpose(0, 2, 1)
        dense_items = self._dense_items(codes, embeddings, method)
        ids = np.full((len(batch), k), -1, np.int64)
        scores = np.full((len(batch), k), -np.inf, np.float32)
        records = np.zeros(len(batch), RECORD)
        tables = self._native.sub_item_scores(batch)
        largest_sums = np.abs(tables).max(axis=2).sum(axis=1, dtype=np.float64)
        largest_bias = float(np.abs(bias).max(initial=0)) if bias is not None else 0.0
        for number, query in enumerate(batch):
            if not largest_sums[number] + largest_bias < np.finfo(np.float32).max:
                raise InputError(f"query {number}: scores would overflow float32")
            begun = time.perf_counter_ns()
            mask = eligible(number, self.num_items, offsets, excluded, allowed)
            candidates = np.flatnonzero(mask)
            top_ids, top_scores = dense_top_k(
                query, tables[number], dense_items, codes, embeddings, bias, candidates, k
            )
            floor = floors[number] if floors is not None else np.float32(-np.inf)
            found = int((top_scores >= floor).sum())
            ids[number, :found] = top_ids[:found]
            scores[number, :found] = top_scores[:found]
            elapsed = time.perf_counter_ns() - begun
            threshold = float(top_scores[-1] if 0 < k == found else floor)
            records[number] = (
                5, 1, 1, self.num_items, self.num_items, dense_items.nbytes, threshold, -np.inf,
                elapsed,
            )  # fmt: skip
        return ids, scores, records.view(np.int64).reshape(len(batch), RECORD_WORDS)


def instruction_set() -> str:
    """Return the instruction set in use: the best of this machine, or `RECPRUNE_ISA`."""
    try:
        return str(_native.instruction_set())
    except ValueError as error:
        raise InputError(str(error)) from None
