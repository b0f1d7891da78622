"""A question to an index: queries and what may answer them, checked once, then frozen.

`Index` and `ShardedIndex` take the same arguments; both make this of them before anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune import _native
from recprune.search.checks import (
    checked_allow,
    checked_boosts,
    checked_exclude,
    checked_floor,
    checked_k,
    checked_queries,
    checked_threads,
    refuse_infinite,
)
from recprune.search.methods import Method, find_method, native_settings
from recprune.search.top_k import RECORD_WORDS, SearchStats, TopK
from recprune.types import Boosts, Float32Array, InputError

QueryName: TypeAlias = Literal["sequence_embeddings", "sequence_embedding", "sub_item_scores"]


class ScoreOverflowError(InputError):
    """A query whose scores float32 cannot hold."""

    def __init__(self, message: str, query: int) -> None:
        super().__init__(message)
        self.query = query  # its number in the batch


class IndexShape(Protocol):
    """What a question is checked against."""

    @property
    def num_items(self) -> int: ...
    @property
    def num_splits(self) -> int: ...
    @property
    def num_sub_items(self) -> int: ...
    @property
    def width(self) -> int: ...


class Searchable(IndexShape, Protocol):
    """What answers like an `Index`."""

    def search(
        self,
        sequence_embeddings: Float32Array,
        k: int = 10,
        *,
        method: str | Method = "auto",
        exclude: Any = None,
        allow: Any = None,
        boosts: Any = None,
        threads: int = 1,
    ) -> TopK:
        """Return the exact top k, as `Index.search` does."""
        ...


class Question(NamedTuple):  # as frozen as a dataclass, and made in a quarter of the time
    """A batch of queries, checked."""

    queries: Float32Array  # [queries, values]
    name: QueryName  # of the argument that the queries came as
    row_shape: tuple[int, ...]  # of one query there: (d,), or (M, B)
    single: bool  # one query without a batch: its answer has no axis for queries either
    k: int
    method: Method
    threads: int
    exclude: _native.BatchExclusions | None  # items that are not to be returned
    allow: NDArray[np.uint64] | None  # [1 or queries, words]
    floors: Float32Array | None  # [queries]
    boosts: _native.BatchBoosts | None  # what is added to some scores, last

    @property
    def are_scores(self) -> bool:
        """Whether the queries are sub-item scores, and not sequence embeddings."""
        return self.name == "sub_item_scores"

    def refuse_infinite(self) -> None:
        """Refuse NaN and infinity among the queries, naming the first one's position."""
        given = self.queries.reshape(-1, *self.row_shape)
        refuse_infinite(given[0] if self.single else given, self.name)


def checked_question(
    index: IndexShape,
    queries: Any,
    k: Any,
    method: str | Method = "auto",
    exclude: Any = None,
    allow: Any = None,
    floor: Any = None,
    boosts: Any = None,
    threads: Any = 1,
    *,
    name: QueryName = "sequence_embeddings",
) -> Question:
    """Return the question that the arguments of a search ask; `name` is that of the queries."""
    # A search may take 50 µs and finds cold caches: every line here is felt.
    chosen = find_method(method)
    k = checked_k(k, index.num_items)
    checked_threads(threads)
    are_scores = name == "sub_item_scores"
    row_shape = (index.num_splits, index.num_sub_items) if are_scores else (index.width,)
    rows, single = checked_queries(queries, name, row_shape)
    return Question(
        rows,
        name,
        row_shape,
        single,
        k,
        chosen,
        threads,
        checked_exclude(exclude, len(rows), single, index.num_items),
        checked_allow(
            allow.words if isinstance(allow, ItemBits) else allow, len(rows), index.num_items
        ),
        checked_floor(floor, len(rows)),
        checked_boosts(boosts, len(rows), single, index.num_items),
    )


def answer_natively(search: Callable[..., None], question: Question, *more: Any) -> TopK:
    """Have the native core answer a question: `search` is that of what is searched.

    `more` are arguments that it takes beyond those of all.
    """
    count, k = len(question.queries), question.k
    ids = np.empty((count, k), np.int64)
    scores = np.empty((count, k), np.float32)
    records = np.empty((count, RECORD_WORDS), np.int64)
    try:
        search(
            question.queries,
            question.are_scores,
            k,
            question.threads,
            native_settings(question.method),
            question.exclude,
            question.allow,
            question.floors,
            question.boosts,
            ids,
            scores,
            records,
            *more,
        )
    except ValueError as error:
        if isinstance(error, _native.QueryOverflowError):
            question.refuse_infinite()  # NaN and infinity end up there too
            raise ScoreOverflowError(str(error), vars(error)["query"]) from None
        raise InputError(str(error)) from None
    return TopK(ids, scores, SearchStats(records))


def eligible(question: Question, number: int, num_items: int) -> NDArray[np.bool_]:
    """Return which items one of the queries may return, as a mask."""
    allow, exclude = question.allow, question.exclude
    mask = np.ones(num_items, np.bool_)
    if allow is not None:
        mask &= mask_of(allow[number if len(allow) > 1 else 0], num_items)
    if exclude is not None:
        mask[exclude.items[slice(*exclude.offsets[number : number + 2].tolist())]] = False
    return mask


def boosts_of(question: Question, number: int) -> Boosts:
    """Return the boosts of one of the queries: items and values."""
    boosts = question.boosts
    if boosts is None:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    part = slice(*boosts.offsets[number : number + 2].tolist())
    return boosts.items[part], boosts.values[part]


def largest_boosts(question: Question) -> Float32Array | None:
    """Return the largest boost of every query in magnitude, None if nothing is boosted."""
    if question.boosts is None:
        return None
    numbers = range(len(question.queries))
    largest = [np.abs(boosts_of(question, number)[1]).max(initial=0) for number in numbers]
    return np.array(largest, np.float32)


class ItemBits(NamedTuple):
    """A set of items as bits over the catalogue. A type of its own: an array may be one of ids."""

    words: NDArray[np.uint64]


def mask_of(words: NDArray[np.uint64], num_items: int) -> NDArray[np.bool_]:
    """Return a set of items, given as bits, as a mask."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(octets, count=num_items, bitorder="little").view(np.bool_)
