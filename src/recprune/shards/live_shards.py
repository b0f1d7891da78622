"""The shards of a live index: what each is called, and what all of them are at one moment.

Shards of a live index are asked in the numbers of the whole, and answer in these: an item that
belongs to another shard is to them one that is not there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np

from recprune.live.division import Division
from recprune.live.snapshot import LiveSnapshot, Moment
from recprune.search.checks import MAX_ITEMS
from recprune.search.index import Index
from recprune.search.index_arrays import bias_extremes
from recprune.search.question import Question
from recprune.shards.answers import ShardedTopK
from recprune.shards.folder import Shard

AnyShard: TypeAlias = "Shard | LiveShard"


@dataclass(frozen=True)
class LiveShard:
    """One shard of a live index."""

    number: int
    num_shards: int
    # What it is asked about: all numbers that there can be.
    first: ClassVar[int] = 0
    stop: ClassVar[int] = MAX_ITEMS

    def __str__(self) -> str:
        return f"shard {self.number} of {self.num_shards}"


@dataclass(frozen=True, eq=False)
class LiveShards:
    """What the shards of a live index have together at one moment."""

    snapshot: LiveSnapshot

    @property
    def moment(self) -> Moment:
        return self.snapshot.moment

    @property
    def num_items(self) -> int:
        return self.snapshot.num_items

    @property
    def vectors(self) -> Index:
        """An index that makes sub-item scores, whatever items it has."""
        return self.snapshot.segments[0].segment.index

    def share_of(self, shards: Iterable[AnyShard]) -> float:
        """Return which share of the items is in these shards."""
        numbers = [shard.number for shard in shards]
        snapshot = self.snapshot
        count = sum(at.num_present for at in snapshot.segments if at.shard in numbers)
        in_tail = np.isin(snapshot.division.shards_of(snapshot.tail.numbers), numbers)
        return (count + int(in_tail.sum())) / max(snapshot.num_present, 1)

    def highest_bias(self, shards: Iterable[AnyShard]) -> float:
        """Return what no bias of an item in these shards exceeds."""
        numbers = [shard.number for shard in shards]
        found = [at.segment.extremes[0] for at in self.snapshot.segments if at.shard in numbers]
        return max([*found, bias_extremes(self.snapshot.tail.item_bias)[0]])

    def largest_bias(self) -> float:
        """Return the largest bias of all items in magnitude."""
        found = [at.segment.extremes[1] for at in self.snapshot.segments]
        return max([*found, bias_extremes(self.snapshot.tail.item_bias)[1]])


@dataclass(frozen=True, eq=False)
class ShardedSnapshot(LiveSnapshot):
    """A live index at one moment, which shards search. All else about it is known here."""

    ask: Callable[[Question], ShardedTopK] = field(kw_only=True)

    @classmethod
    def of(cls, snapshot: LiveSnapshot, ask: Callable[[Question], ShardedTopK]) -> ShardedSnapshot:
        return cls(
            snapshot.segments,
            snapshot.tail,
            snapshot.num_items,
            snapshot.moment,
            snapshot.id_kind,
            snapshot.division,
            notes=snapshot.notes,
            ask=ask,
        )

    def answer(self, question: Question) -> ShardedTopK:
        """Have the shards answer a question that was checked against this snapshot."""
        return self.ask(question)


def live_checksum(identity: str, division: Division) -> str:
    """Return what tells the shards of a live index from all others.

    Those of another division, even of as many shards, have other items.
    """
    return hashlib.sha256(f"{identity} {division.cuts}".encode()).hexdigest()
