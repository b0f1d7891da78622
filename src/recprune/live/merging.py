"""Which segments are merged, and what becomes of them: as in a log-structured store.

The tail becomes a segment when it is full. It takes with it, one after the other, every segment
that is not clearly larger than what is merged already. So segments are few, each several times as
large as the next, and an item is written a number of times that grows with the logarithm of the
catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator

from recprune.live.division import Division
from recprune.live.present_bits import present_mask
from recprune.live.segment import Segment, build_segment, joined
from recprune.live.snapshot import LiveSnapshot, PresentSegment
from recprune.search.index_arrays import Layout

# Items of a tail that becomes a segment: looking at all of them takes a tenth of a search in a
# million (13 µs with AVX-512), laying them out a tenth of a second.
FULL_TAIL = 65_536
_LARGER = 3  # so many times as large as what is merged already is a segment that is left alone
_MOSTLY_GONE = 0.5  # of the items of a segment: then it is merged whatever its size


def is_full(snapshot: LiveSnapshot) -> bool:
    """Whether the tail is to become a segment."""
    return len(snapshot.tail) >= FULL_TAIL


def to_merge(snapshot: LiveSnapshot, *, everything: bool) -> list[PresentSegment]:
    """Return the segments that are merged with the tail."""
    if everything:
        return list(snapshot.segments)
    chosen, size = [], len(snapshot.tail)
    for at in sorted(snapshot.segments, key=lambda at: at.num_present):
        gone = 1 - at.num_present / max(at.segment.index.num_items, 1)
        if at.num_present <= _LARGER * size or gone > _MOSTLY_GONE:
            chosen.append(at)
            size += at.num_present
    return chosen


def is_settled(snapshot: LiveSnapshot) -> bool:
    """Whether every shard of a catalogue is one segment, and no item has left it."""
    num_parts = 1 if snapshot.shard is not None else snapshot.division.num_shards
    are_whole = all(at.present is None for at in snapshot.segments)
    return len(snapshot.segments) == num_parts and not len(snapshot.tail) and are_whole


def merge(snapshot: LiveSnapshot, chosen: list[PresentSegment], threads: int) -> Segment:
    """Lay out the items of the tail and of some segments as one, without those that have left."""
    # By their first numbers: then little is out of order, mostly nothing.
    parts = [at.items() for at in sorted(chosen, key=lambda at: at.segment.runs.numbers[:1].sum())]
    items = joined([*parts, snapshot.tail])
    parts.clear()
    return build_segment(items, snapshot.sub_item_embeddings(), _layout(snapshot), threads)


def divided(snapshot: LiveSnapshot, division: Division, threads: int) -> Iterator[Segment]:
    """Lay out the items of each shard of another division as one segment, one after the other."""
    for shard in range(division.num_shards):
        parts = [snapshot.tail.take(division.shards_of(snapshot.tail.numbers) == shard)]
        for at in snapshot.segments:
            segment = at.segment
            keep = present_mask(at.present, segment.index.num_items)
            keep &= division.shards_of(segment.runs.all_numbers()) == shard
            parts.append(segment.items(keep))
        items = joined(parts)
        yield build_segment(items, snapshot.sub_item_embeddings(), _layout(snapshot), threads)


def _layout(snapshot: LiveSnapshot) -> Layout:
    return snapshot.segments[0].segment.index.layout
