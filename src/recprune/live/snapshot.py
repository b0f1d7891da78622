"""A catalogue as it is at one moment: segments, which of their items are there, the newest items.

Frozen: a change makes another one, which shares with it all that stays the same. So a search reads
one reference and is never disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recprune import _native
from recprune.data.identifiers import ExternalId
from recprune.live.division import WHOLE, Division
from recprune.live.item_names import IdKind, NameArray
from recprune.live.notes import NO_NOTES, Notes
from recprune.live.number_runs import NumberRuns
from recprune.live.present_bits import are_present, present_mask
from recprune.live.segment import Items, Segment
from recprune.search.checks import checked_items, checked_queries
from recprune.search.index import Index
from recprune.search.methods import Auto, Default, Method, RecJPQPrune
from recprune.search.question import QueryName, Question, answer_natively, checked_question
from recprune.search.reference import score_items
from recprune.search.top_k import TopK
from recprune.types import CodeArray, Float32Array, InputError, Int64Array, Json, StorageError


class Moment(NamedTuple):
    """Which changes a catalogue has seen: all up to one, and that in only one possible way."""

    sequence: int  # of the last change
    chain: int  # the checksum of its record, which that of all before goes into


@dataclass(frozen=True, eq=False)
class PresentSegment:
    """A segment, and which of its items are there."""

    segment: Segment
    present: NDArray[np.uint64] | None  # a bit for every position; None: all are there
    num_present: int
    shard: int = 0  # which all of its items belong to

    def find(self, numbers: NDArray[Any]) -> Int64Array:
        """Return the positions of numbers, −1 where they are elsewhere or gone."""
        positions = self.segment.runs.positions_of(numbers)
        here = positions >= 0
        here[here] = are_present(self.present, positions[here])
        return np.where(here, positions, -1)

    def items(self) -> Items:
        """Return the items that are there."""
        return self.segment.items(present_mask(self.present, self.segment.index.num_items))


@dataclass(frozen=True, eq=False)
class LiveSnapshot:
    """A live index at one moment: it answers as an `Index` over the items that are there.

    Items keep their numbers: these are what is asked for and what is returned. Made by
    `LiveIndex.snapshot`; safe to share between threads.
    """

    segments: tuple[PresentSegment, ...]  # one at least
    tail: Items  # the newest, in no segment yet; all are there
    num_items: int  # numbers that were ever used: an `allow` mask has this length
    moment: Moment
    id_kind: IdKind
    division: Division = WHOLE
    shard: int | None = None  # whose items are the only ones here; None: all are
    # What is said of items; a shard, which only searches, has none.
    notes: Notes = field(default_factory=lambda: NO_NOTES)
    num_present: int = field(init=False)
    num_splits: int = field(init=False)
    num_sub_items: int = field(init=False)
    width: int = field(init=False)
    _core: _native.SegmentedIndex = field(init=False)
    _tail_index: Index = field(init=False)

    def __post_init__(self) -> None:
        def own(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        first = self.segments[0].segment.index
        own("num_present", sum(at.num_present for at in self.segments) + len(self.tail))
        own("num_splits", first.num_splits)
        own("num_sub_items", first.num_sub_items)
        own("width", first.width)
        own("_tail_index", Index.of_codes(self.tail.codes, first, self.tail.item_bias))
        own("_core", self._make_core())

    def _make_core(self) -> _native.SegmentedIndex:
        parts: list[tuple[Index, NumberRuns, NDArray[np.uint64] | None, int]] = [
            (at.segment.index, at.segment.runs, at.present, at.num_present) for at in self.segments
        ]
        if len(self.tail):
            runs = NumberRuns.of(self.tail.numbers)
            parts.append((self._tail_index, runs, None, len(self.tail)))
        # What the largest has found is a floor for the others. It says which method answered, too.
        parts.sort(key=lambda part: -part[0].num_items)
        core = _native.SegmentedIndex()
        for index, runs, present, num_present in parts:
            core.add(index.core, runs.numbers, runs.positions, present, num_present)
        return core

    def check(self) -> None:
        """Refuse numbers that two items have, or that were never given. For what was opened."""
        try:
            self._core.check(self.num_items)
        except ValueError as error:
            raise StorageError(str(error)) from None
        noted = self.notes.numbers()
        gone = noted[~self.are_there(noted)]
        if len(gone):
            raise StorageError(f"there is a note of item {gone[0]}, which is not there")

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
        """Return the exact top k of the items that are there, as `Index.search` does.

        All ids are numbers. Excluding, allowing or boosting a number that has left changes nothing.
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

    def answer(self, question: Question) -> TopK:
        """Answer a question that was checked against this snapshot."""
        if type(question.method) is not Auto:
            if isinstance(question.method, Default | RecJPQPrune):
                raise InputError(
                    f"method {question.method.name} needs an index in one piece, not a live one"
                )
            self.segments[0].segment.index.require_parts(question.method)
        if question.boosts is not None:
            for at in self.segments:
                at.segment.index.find_codes()
        top = answer_natively(self._core.search, question)
        return TopK(top.ids[0], top.scores[0], top.stats) if question.single else top

    def score(self, sequence_embeddings: Float32Array, items: Any) -> Float32Array:
        """Return the scores of given numbers, [queries, items] or [items]; all must be there."""
        queries, single = checked_queries(sequence_embeddings, "sequence_embeddings", (self.width,))
        wanted = checked_items(items, self.num_items).astype(np.int64)
        codes, bias = self.item_codes(wanted), self.item_bias(wanted)
        tables = self.sub_item_scores(queries)
        rows = [score_items(table, codes, bias) for table in tables]
        scores = np.array(rows, np.float32).reshape(len(queries), len(wanted))
        return scores[0] if single else scores

    def sub_item_scores(self, sequence_embeddings: Float32Array) -> Float32Array:
        """Return S, [queries, M, B] or [M, B]: what `search_scores` searches with."""
        return self.segments[0].segment.index.sub_item_scores(sequence_embeddings)

    # Looking at it -------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """How many changes there were."""
        return self.moment.sequence

    def owns(self, numbers: NDArray[Any]) -> NDArray[np.bool_]:
        """Say which numbers are of items that are here if they are there."""
        if self.shard is None:
            return np.ones(len(numbers), np.bool_)
        owned: NDArray[np.bool_] = self.division.shards_of(numbers) == self.shard
        return owned

    def of_shard(self, shard: int) -> LiveSnapshot:
        """Return the items that belong to one shard."""
        if self.division.num_shards == 1:
            return self
        return LiveSnapshot(
            tuple(at for at in self.segments if at.shard == shard),
            self.tail.take(self.division.shards_of(self.tail.numbers) == shard),
            self.num_items,
            self.moment,
            self.id_kind,
            self.division,
            shard,
        )

    @property
    def has_bias(self) -> bool:
        """Whether items have a bias: all of them, or none."""
        return self.tail.item_bias is not None

    def sub_item_embeddings(self) -> Float32Array:
        """Return the vectors of the sub-items, [M, B, d/M]."""
        return self.segments[0].segment.index.sub_item_embeddings()

    def numbers(self) -> Int64Array:
        """Return the numbers of all items that are there, ascending."""
        found = [
            at.segment.runs.all_numbers()[present_mask(at.present, at.segment.index.num_items)]
            for at in self.segments
        ]
        return np.sort(np.concatenate([*found, self.tail.numbers])).astype(np.int64)

    def item_codes(self, numbers: Any) -> CodeArray:
        """Return the codes of some items that are there, [items, M]."""
        wanted = checked_items(numbers, self.num_items).astype(np.int64)
        codes = np.empty((len(wanted), self.num_splits), self.tail.codes.dtype)
        for index, places, positions in self._located(wanted):
            codes[places] = index.item_codes()[positions]
        return codes

    def item_bias(self, numbers: Any) -> Float32Array | None:
        """Return the biases of some items that are there, None if items have none."""
        if not self.has_bias:
            return None
        wanted = checked_items(numbers, self.num_items).astype(np.int64)
        found = np.empty(len(wanted), np.float32)
        for index, places, positions in self._located(wanted):
            bias = index.item_bias
            found[places] = 0.0 if bias is None else bias[positions]
        return found

    def are_there(self, numbers: NDArray[Any]) -> NDArray[np.bool_]:
        """Say which of some numbers are those of items that are there."""
        there = find_sorted(self.tail.numbers, numbers) >= 0
        for at in self.segments:
            there |= at.find(numbers) >= 0
        return there

    def _located(self, numbers: Int64Array) -> list[tuple[Index, Int64Array, Int64Array]]:
        """Return where items are: an index, their places among `numbers`, their positions."""
        found, missing = [], np.ones(len(numbers), np.bool_)
        parts = [(at.segment.index, at.find(numbers)) for at in self.segments]
        parts.append((self._tail_index, find_sorted(self.tail.numbers, numbers)))
        for index, positions in parts:
            here = positions >= 0
            missing &= ~here
            found.append((index, np.flatnonzero(here), positions[here]))
        refuse_missing(numbers, missing)
        return found

    # External ids --------------------------------------------------------------------------------

    def external_ids(self, numbers: Any) -> list[ExternalId | None]:
        """Return the external ids of numbers, as a search returns them; None for −1."""
        self._refuse_nameless()
        given = np.asarray(numbers, np.int64)
        if given.ndim != 1:
            raise InputError(f"numbers has shape {list(given.shape)}, expected [numbers]")
        wanted = checked_items(given[given >= 0], self.num_items).astype(np.int64)
        names = names_of(self.segments, self.tail, wanted)
        found = iter(() if names is None else names.tolist())
        return [next(found) if number >= 0 else None for number in given.tolist()]

    def find(self, external_ids: Sequence[ExternalId]) -> Int64Array:
        """Return the numbers of items that are there by their external ids, −1 where none is."""
        self._refuse_nameless()
        if isinstance(external_ids, str):  # else taken for a sequence of letters
            raise InputError(f"external_ids is {external_ids!r}, expected a sequence of ids")
        wanted = list(external_ids)
        for name in wanted:
            if not isinstance(name, int | str | np.integer):
                raise InputError(f"external_ids has {name!r}, expected integers or strings")
        found = np.array([self._tail_places.get(name, -1) for name in wanted], np.int64)
        found[found >= 0] = self.tail.numbers[found[found >= 0]]
        for at in self.segments:
            if at.segment.names is None:
                continue
            positions = at.segment.names.find_all(wanted)
            here = positions >= 0
            here[here] = are_present(at.present, positions[here])
            if here.any():
                found[here] = at.segment.runs.numbers_of(positions[here])
        return found

    @cached_property
    def _tail_places(self) -> dict[ExternalId, int]:
        names = self.tail.names
        return {} if names is None else {name: row for row, name in enumerate(names.tolist())}

    def _refuse_nameless(self) -> None:
        if self.id_kind == "none":
            raise InputError("this catalogue was created without external ids")

    def describe(self) -> Json:
        """Say what the catalogue holds and costs."""
        indexes = [at.segment.index.describe() for at in self.segments]
        size = sum(index["bytes"] for index in indexes) + self.tail.codes.nbytes
        held = ", ".join(f"{index['items']:,}" for index in indexes)
        return {
            "items": self.num_present,
            "numbers": self.num_items,
            "changes": self.sequence,
            "splits": self.num_splits,
            "sub_items": self.num_sub_items,
            "width": self.width,
            "layout": indexes[0]["layout"],
            "external_ids": self.id_kind,
            "notes": len(self.notes),
            "shards": self.division.num_shards,
            "segments": f"{len(indexes)}, holding {held} items",
            "tail": len(self.tail),
            "bytes": size,
            "bytes_per_item": round(size / max(self.num_present, 1), 2),
            "instruction_set": indexes[0]["instruction_set"],
        }

    def __repr__(self) -> str:
        return (
            f"LiveSnapshot({self.num_present:,} items, {len(self.segments)} segments, "
            f"change {self.sequence})"
        )


def names_of(
    segments: Sequence[PresentSegment], tail: Items, numbers: NDArray[Any]
) -> NameArray | None:
    """Return the external ids of items that are there, None where items have none."""
    if tail.names is None:
        return None
    names = np.empty(len(numbers), tail.names.dtype)
    in_tail = find_sorted(tail.numbers, numbers)
    missing = in_tail < 0
    names[~missing] = tail.names[in_tail[~missing]]
    for at in segments:
        positions = at.find(numbers)
        here = positions >= 0
        missing &= ~here
        if at.segment.names is not None and here.any():
            names[here] = at.segment.names.take(positions[here])
    refuse_missing(numbers, missing)
    return names


def refuse_missing(numbers: NDArray[Any], missing: NDArray[np.bool_]) -> None:
    """Refuse numbers of items that are not there, naming the first."""
    if missing.any():
        place = int(missing.argmax())
        raise InputError(f"ids[{place}] is {numbers[place]}: no such item is there")


def find_sorted(ascending: NDArray[Any], wanted: NDArray[Any]) -> Int64Array:
    """Return the places of numbers among others that ascend, −1 where they are not."""
    if not len(ascending):
        return np.full(len(wanted), -1, np.int64)
    places = np.minimum(np.searchsorted(ascending, wanted), len(ascending) - 1)
    return np.where(ascending[places] == wanted, places, -1)
