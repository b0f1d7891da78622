"""The index: item codes and sub-item vectors, laid out for exact search."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from recprune import _native
from recprune.search.checks import (
    checked_bias,
    checked_codes,
    checked_items,
    checked_queries,
    checked_threads,
    refuse_infinite,
)
from recprune.search.dense import DenseItems, answer_dense, dense_items
from recprune.search.faiss_io import make_faiss, read_faiss
from recprune.search.index_arrays import (
    CELL_PARTS,
    CELLS_FOR_ALL,
    LIST_PARTS,
    Layout,
    checked_size,
)
from recprune.search.methods import (
    Auto,
    Cells,
    Default,
    Method,
    RecJPQPrune,
    Scan,
)
from recprune.search.posting_lists import build_posting_lists
from recprune.search.question import (
    QueryName,
    Question,
    ScoreOverflowError,
    answer_natively,
    checked_question,
    largest_boosts,
)
from recprune.search.reference import score_items
from recprune.search.top_k import TopK
from recprune.storage import Saved, load_folder, reading_threads, save_folder
from recprune.types import (
    CodeArray,
    Float32Array,
    InputError,
    Json,
    StorageError,
    frozen,
)

KIND = "index"
VERSION = 5  # of the format
_OLDEST = 4  # version that is still read
_NEW_CELLS = 5  # version since which cells are as they are


class Index:
    """Finds the exact top K of a catalogue. Immutable, and safe to share between threads."""

    def __init__(
        self,
        arrays: dict[str, NDArray[Any]],
        *,
        num_items: int,
        num_sub_items: int,
        layout: Layout,
        like: Index | None = None,
    ) -> None:
        """Use `Index.build` or `Index.load`; `arrays` are taken over.

        The native core makes a copy of the vectors, or shares that of an index with the same ones.
        """
        for array in arrays.values():
            frozen(array)
        self._arrays = arrays
        self.layout = layout
        self.num_items = num_items
        self.num_sub_items = num_sub_items
        transposed = arrays["transposed_embeddings"]
        self.num_splits = int(transposed.shape[0])
        self.width = int(transposed.shape[0] * transposed.shape[1])  # d
        self._dense: DenseItems | None = None
        self._has_posting_lists = False
        self._finds_codes = "codes" in arrays or not num_items  # of single items
        self._lock = threading.Lock()  # for what is built on first use
        self._native = _native.SearchIndex(num_items, transposed if like is None else like.core)
        if "codes" in arrays:
            wide = arrays["codes"].dtype == np.uint16
            (self._native.set_wide_codes if wide else self._native.set_codes)(arrays["codes"])
        if "list_offsets" in arrays:
            self._native.set_lists(*(arrays[name] for name in LIST_PARTS))
        if "cell_lines" in arrays:
            self._native.set_cells(*(arrays[name] for name in CELL_PARTS))
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

        The full layout has everything that the codes allow (M = 8: 68 bytes an item); the slim one
        leaves out the lists that a scan reads, and what cells can do without (50 bytes); the
        compact one keeps the lists alone, in about M + 2 bytes (10.2). `item_bias` (float32 [n])
        is added to the scores.
        """
        if layout not in get_args(Layout):
            raise InputError(f"layout is {layout!r}, expected one of {', '.join(get_args(Layout))}")
        checked: NDArray[Any]
        checked, embeddings = checked_codes(codes, sub_item_embeddings)
        checked_threads(threads)
        num_items = len(checked)
        num_sub_items = embeddings.shape[1]
        narrow = checked.dtype == np.uint8
        layout = "full" if layout == "auto" else layout
        if layout == "compact" and not narrow:
            raise InputError("the compact layout needs codes of type uint8")
        arrays: dict[str, NDArray[Any]] = {
            # Always a copy: the caller may change its own.
            "transposed_embeddings": np.array(embeddings.transpose(0, 2, 1), order="C")
        }
        if item_bias is not None:
            arrays["item_bias"] = checked_bias(item_bias, num_items)
        if layout != "compact":
            arrays["codes"] = np.array(checked)  # a copy as well
        if narrow and layout != "slim":
            lists = _native.build_lists(checked, num_sub_items, threads)
            arrays |= dict(zip(LIST_PARTS, lists, strict=True))
        if narrow and layout != "compact":
            arrays |= _cells_of(checked, embeddings, threads, last_keys=layout == "full")
        return cls(arrays, num_items=num_items, num_sub_items=num_sub_items, layout=layout)

    @classmethod
    def of_no_items(cls, sub_item_embeddings: Float32Array) -> Index:
        """Return an index that has vectors alone: it makes sub-item scores, and finds nothing."""
        transposed = np.array(sub_item_embeddings.transpose(0, 2, 1), order="C")
        num_sub_items = sub_item_embeddings.shape[1]
        arrays: dict[str, NDArray[Any]] = {"transposed_embeddings": transposed}
        return cls(arrays, num_items=0, num_sub_items=num_sub_items, layout="full")

    @classmethod
    def of_codes(cls, codes: CodeArray, like: Index, item_bias: Float32Array | None) -> Index:
        """Return an index of codes alone, made at once: they are looked at one after the other.

        Codes and biases are taken over, and must be such as those of the index that it is like,
        with which it shares the vectors.
        """
        arrays: dict[str, NDArray[Any]] = {
            "transposed_embeddings": like._arrays["transposed_embeddings"],
            "codes": codes,
        }
        if item_bias is not None:
            arrays["item_bias"] = item_bias
        return cls(
            arrays,
            num_items=len(codes),
            num_sub_items=like.num_sub_items,
            layout=like.layout,
            like=like,
        )

    @classmethod
    def from_faiss(cls, index_pq: Any, *, layout: Layout = "auto", threads: int = 1) -> Index:
        """Take over the codes and centroids of a `faiss.IndexPQ` (inner product, 8 bits).

        Where it turns vectors first, or has ids, `VectorIndex.from_faiss` takes these over too.
        """
        given = read_faiss(index_pq)
        if given.rotation is not None or given.ids is not None:
            more = "turns vectors first" if given.rotation is not None else "has ids of its own"
            raise InputError(f"the index of FAISS {more}: `VectorIndex.from_faiss` takes it")
        return cls.build(given.codes, given.centroids, layout=layout, threads=threads)

    def to_faiss(self) -> Any:
        """Return a `faiss.IndexPQ` with the same codes and vectors; it knows no item bias."""
        if self.item_bias is not None:
            raise InputError("faiss.IndexPQ needs 256 sub-items per split and no item bias")
        return make_faiss(self.item_codes(), self.sub_item_embeddings())

    def save(self, folder: str | Path) -> None:
        """Write the index as a folder, in place of an older index if there is one."""
        save_folder(folder, self.parts())

    def parts(self) -> Saved:
        """Return what makes up the index, to be saved as a folder or as a part of another one."""
        settings: Json = {
            "num_items": self.num_items,
            "num_sub_items": self.num_sub_items,
            "layout": self.layout,
        }
        return Saved(KIND, VERSION, settings, dict(self._arrays))

    @classmethod
    def from_parts(cls, parts: Saved, source: str) -> Index:
        """Return the index that was saved so; `source` says in an error where it came from.

        What cannot have been built by `build` is refused: every array is read once, whoever made
        it, so that no search leaves its memory or finds an item twice.
        """
        parts.check(kind=KIND, version=VERSION, oldest=_OLDEST, source=source)
        arrays = dict(parts.arrays)
        try:
            if parts.version < _NEW_CELLS:
                arrays = _with_new_cells(arrays)
            index = cls(arrays, **checked_size(parts.settings, arrays)._asdict())
            index._native.check(reading_threads())
        except (StorageError, ValueError) as error:
            raise StorageError(f"{source}: {error}") from None
        return index

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = True) -> Index:
        """Memory-map a saved index; `verify` compares every byte with its checksum first."""
        parts = load_folder(folder, kind=KIND, version=VERSION, oldest=_OLDEST, verify=verify)
        return cls.from_parts(parts, str(folder))

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
        boosts: Any = None,
        threads: int = 1,
    ) -> TopK:
        """Return the exact top k for sequence embeddings (float32 [queries, d], or [d]).

        `exclude` are item ids not to return: a sequence of them, for a batch one sequence per query
        (or an array padded with −1). `allow` says which items may be returned at all: a boolean
        mask [n] or [queries, n], or the same as bits in uint64 words, such as `Attributes.where`
        returns. Below `floor`, a score or one for each query, nothing is returned, and less is
        searched. `boosts` are added to the scores of some items, after everything else: a pair
        (item ids, float32 values), for a batch one pair per query. The tie rule is score
        descending, item id ascending.
        """
        return self.answer(
            checked_question(
                self, sequence_embeddings, k, method, exclude, allow, floor, boosts, threads
            )
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
        boosts: Any = None,
        threads: int = 1,
    ) -> TopK:
        """Return the exact top k for sub-item scores S (float32 [queries, M, B], or [M, B])."""
        name: QueryName = "sub_item_scores"
        question = checked_question(
            self, sub_item_scores, k, method, exclude, allow, floor, boosts, threads, name=name
        )
        return self.answer(question)

    def search_visibly(
        self,
        sequence_embedding: Float32Array,
        k: int = 10,
        *,
        method: str | Method = "auto",
        exclude: Any = None,
        allow: Any = None,
        boosts: Any = None,
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
        name: QueryName = "sequence_embedding"
        question = checked_question(
            self, sequence_embedding, k, method, exclude, allow, boosts=boosts, name=name
        )
        top = self.answer(question, marks)
        return top, marks.reshape(self.num_splits, self.num_sub_items).astype(np.bool_)

    def sub_item_scores(self, sequence_embeddings: Float32Array) -> Float32Array:
        """Return S, [queries, M, B] or [M, B]: what `search_scores` searches with."""
        queries, single = checked_queries(sequence_embeddings, "sequence_embeddings", (self.width,))
        refuse_infinite(queries, "sequence_embeddings")
        tables: Float32Array = self._native.sub_item_scores(queries)
        return tables[0] if single else tables

    @property
    def core(self) -> _native.SearchIndex:
        """What the native core searches; it lives as long as this index."""
        return self._native

    @property
    def has_lists(self) -> bool:
        """Whether there are the lists that a scan reads."""
        return "list_offsets" in self._arrays

    @property
    def item_bias(self) -> Float32Array | None:
        """What is added to the scores, [n], if anything is."""
        return self._arrays.get("item_bias")

    def item_codes(self) -> NDArray[Any]:
        """Return the codes of all items, [n, M]; a compact index puts them together."""
        if "codes" in self._arrays:
            return self._arrays["codes"]
        codes: NDArray[Any] = self._native.codes_of_lists()
        return codes

    def sub_item_embeddings(self) -> Float32Array:
        """Return the vectors of the sub-items, [M, B, d/M]."""
        return self._arrays["transposed_embeddings"].transpose(0, 2, 1)

    def score(self, sequence_embeddings: Float32Array, items: Any) -> Float32Array:
        """Return the scores of given items, [queries, items] or [items]: PQTopK on a subset."""
        queries, single = checked_queries(sequence_embeddings, "sequence_embeddings", (self.width,))
        wanted = checked_items(items, self.num_items)
        tables = self.sub_item_scores(queries)
        codes, bias = self.item_codes()[wanted], self.item_bias
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
            "layout": self.layout,
            "parts": sorted(self._arrays),
            "bytes": size,
            "bytes_per_item": round(size / max(self.num_items, 1), 2),
            "instruction_set": instruction_set(),
        }

    def __repr__(self) -> str:
        return f"Index({self.num_items:,} items, {self.num_splits} splits, {self.layout} layout)"

    # Inside --------------------------------------------------------------------------------------

    def answer(self, question: Question, visited: NDArray[np.uint8] | None = None) -> TopK:
        """Answer a question that was checked against an index of this shape."""
        # A search may take 50 µs and finds cold caches: every line here is felt.
        if type(question.method) is Default:
            top = self._answer_dense(question, question.method)
        else:
            if type(question.method) is not Auto:
                self.require_parts(question.method)
            if question.boosts is not None and not self._finds_codes:
                self.find_codes()
            top = answer_natively(self._native.search, question, visited)
        return TopK(top.ids[0], top.scores[0], top.stats) if question.single else top

    def require_parts(self, method: Method) -> None:
        """Refuse a method that needs what this layout or these codes do not have."""
        if isinstance(method, Cells) and not self._may_have_cells():
            raise InputError(
                "method cells needs the full or slim layout and 4 to 16 splits of at most 256 "
                "sub-items"
            )
        if isinstance(method, Scan) and not self.has_lists:
            needed = "another layout" if self.layout == "slim" else "codes of type uint8"
            raise InputError(f"method scan needs {needed}")
        if isinstance(method, RecJPQPrune):
            if "codes" not in self._arrays:
                raise InputError("method recjpqprune needs the full or slim layout")
            with self._lock:
                if not self._has_posting_lists:
                    # Four bytes an item and split that nothing else needs: built when asked for.
                    lists = build_posting_lists(self._arrays["codes"], self.num_sub_items)
                    items: NDArray[Any] = lists.items
                    self._native.set_posting_lists(lists.offsets, items)
                    self._has_posting_lists = True

    def _may_have_cells(self) -> bool:
        """Whether there are cells, or would be if there were more items."""
        return self.layout != "compact" and _native.has_cells(
            max(self.num_items, CELLS_FOR_ALL), self.num_splits, self.num_sub_items
        )

    def find_codes(self) -> None:
        """Make sure that the code of a single item can be found, which boosts need."""
        with self._lock:
            if not self._finds_codes:
                # A byte an item and split that only boosts need: lists find no item by its id.
                self._native.set_gathered_codes(self._native.codes_of_lists())
                self._finds_codes = True

    def _answer_dense(self, question: Question, method: Default) -> TopK:
        if question.are_scores:
            raise InputError("method default needs sequence embeddings, not sub-item scores")
        question.refuse_infinite()
        with self._lock:
            if self._dense is None:
                self._dense = dense_items(
                    self.item_codes(), self.sub_item_embeddings(), self.item_bias, method
                )
        tables = self._native.sub_item_scores(question.queries)
        self.refuse_overflow(tables, largest_boosts=largest_boosts(question))
        return answer_dense(question, self._dense, tables)

    def refuse_overflow(
        self,
        tables: Float32Array,
        largest_bias: float = 0.0,
        largest_boosts: Float32Array | None = None,
    ) -> None:
        """Refuse sub-item scores [queries, M, B] whose sums, or NaN, float32 cannot hold.

        Added to them are a bias, and a boost of its query, of up to the largest in magnitude.
        """
        shape = (self.num_splits, self.num_sub_items)
        if tables.shape[1:] != shape:
            raise InputError(f"tables has shape {list(tables.shape)}, expected [queries, *{shape}]")
        try:
            self._native.refuse_overflow(tables, largest_bias, largest_boosts)
        except _native.QueryOverflowError as error:
            raise ScoreOverflowError(str(error), vars(error)["query"]) from None


def _cells_of(
    codes: NDArray[np.uint8], sub_item_embeddings: Float32Array, threads: int, *, last_keys: bool
) -> dict[str, NDArray[Any]]:
    """Return the cells of an index, if one of its size has any."""
    (num_items, num_splits), num_sub_items = codes.shape, sub_item_embeddings.shape[1]
    if not _native.has_cells(num_items, num_splits, num_sub_items):
        return {}
    # What fills lines up should pass no filter: short vectors have small scores.
    padding = np.square(sub_item_embeddings).sum(axis=2).argmin(axis=1).astype(np.uint8)
    cells = _native.build_cells(codes, num_sub_items, padding, last_keys, threads)
    return dict(zip(CELL_PARTS, cells, strict=True))


def _with_new_cells(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of an older index, with cells that are made anew."""
    kept = {name: array for name, array in arrays.items() if not name.startswith("cell_")}
    codes, vectors = kept.get("codes"), kept.get("transposed_embeddings")
    if codes is None or vectors is None or codes.dtype != np.uint8:
        return kept
    checked, embeddings = checked_codes(codes, vectors.transpose(0, 2, 1))
    return kept | _cells_of(checked, embeddings, reading_threads(), last_keys=True)


def instruction_set() -> str:
    """Return the instruction set in use: the best of this machine, or `RECPRUNE_ISA`."""
    try:
        return str(_native.instruction_set())
    except ValueError as error:
        raise InputError(str(error)) from None
