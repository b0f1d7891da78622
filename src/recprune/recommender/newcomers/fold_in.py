"""Items that a recommender does not know get codes: by their first events, their content, or both.

So they can be recommended, by the model as it is, until one is trained with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import ExternalId, coerce_ids
from recprune.data.interactions import Interactions
from recprune.recommender.newcomers.code_finder import MOST_PASSERS, CodeFinder
from recprune.recommender.newcomers.content_places import ContentPlaces, GrowingIds, find_places
from recprune.recommender.newcomers.evidence import Evidence, NumberedLog
from recprune.recommender.recommender import Recommender
from recprune.types import (
    InputError,
    Int64Array,
    Progress,
    frozen,
    no_progress,
)

_AT_ONCE = 1024  # items, between two words of progress
DEFAULT_EVENTS = 10  # of each item: those that come first say most of it, in a time that is bounded


@dataclass(frozen=True, eq=False)
class FoldedItems:
    """New items and their codes, and what these go by."""

    item_ids: list[ExternalId]
    codes: NDArray[np.unsignedinteger]  # [items, M]
    events: Int64Array  # of each: how many were looked at
    by_content: NDArray[np.bool_]
    left_out: list[ExternalId]  # that nothing speaks for: no event after a known item, no content

    def __post_init__(self) -> None:
        for array in (self.codes, self.events, self.by_content):
            frozen(array)

    def __len__(self) -> int:
        return len(self.item_ids)


def fold_in(
    recommender: Recommender,
    log: Interactions | None = None,
    *,
    items: Sequence[ExternalId] | None = None,
    content: str | Path | None = None,
    content_item: str | None = None,
    events: int = DEFAULT_EVENTS,
    seed: int = 0,
    progress: Progress = no_progress,
) -> FoldedItems:
    """Find codes for the items that the recommender does not know: to `LiveIndex.put` them.

    A code is such that the item would have been recommended to those who took it, in the first
    `events` of a `log`, and not to everybody; what is drawn at random from the log says who else
    there is. `content` is a file with texts or vectors of new and old items alike, as
    `read_content` reads it, with their ids in the column `content_item`: new ones then begin
    between the old ones that they are like, and need no event. `items` are those to be folded in;
    by default all of the log and the file.
    """
    if isinstance(events, bool) or not isinstance(events, int) or events < 1:
        raise InputError(f"events is {events!r}, expected a positive number of each item")
    if log is None and content is None:
        raise InputError("nothing to go by: give a log, or content, or both")
    ids = GrowingIds(recommender)
    num_known = len(ids)
    numbers = np.empty(0, np.int64)  # of the log's items
    if log is not None:
        numbers = ids.find_all(coerce_ids(ids, log.item_ids.take(range(log.num_items))))
    places = None
    if content is not None:
        places = find_places(recommender, content, ids, content_item, progress)
    wanted = np.arange(num_known, len(ids))
    if items is not None:
        wanted = np.unique(ids.find_all(coerce_ids(ids, items)))
        if len(wanted) and wanted[0] < num_known:
            known = ids.take(wanted[:1].tolist())[0]
            raise InputError(f"items: {known!r} is an item that the recommender knows")
    names = ids.take(wanted.tolist())
    _check_names(names, ids)
    width = recommender.index.width
    found = Evidence(
        np.zeros((len(wanted), width)),
        np.zeros(len(wanted), np.int64),
        np.empty((0, width), np.float32),
    )
    if log is not None:
        known_log = NumberedLog(log, numbers, num_known, recommender.encoder)
        found = known_log.evidence(
            wanted, most=events, passers=MOST_PASSERS, seed=seed, progress=progress
        )
    return _with_codes(
        CodeFinder(recommender.index, found.passing), wanted, names, found, places, progress
    )


def _with_codes(
    finder: CodeFinder,
    wanted: Int64Array,
    names: list[ExternalId],
    found: Evidence,
    places: ContentPlaces | None,
    progress: Progress,
) -> FoldedItems:
    codes, kept, by_content, left_out = [], [], [], []
    for row, number in enumerate(wanted.tolist()):
        if row % _AT_ONCE == 0:
            progress(f"codes {row:,} of {len(wanted):,}")
        count, place = int(found.counts[row]), None if places is None else places.get(number)
        if not count and place is None:
            left_out.append(names[row])
            continue
        codes.append(finder.code(found.state_sums[row], count, place))
        kept.append(row)
        by_content.append(place is not None)
    return FoldedItems(
        [names[row] for row in kept],
        np.array(codes, finder.dtype).reshape(len(kept), finder.num_splits),
        found.counts[kept],
        np.array(by_content, np.bool_),
        left_out,
    )


def _check_names(names: list[ExternalId], ids: GrowingIds) -> None:
    """Refuse ids that a catalogue like the recommender's cannot have."""
    kind = str if ids.are_strings else int
    for name in names:
        if not isinstance(name, kind):
            raise InputError(
                f"{name!r} is not an id as the recommender's are: {kind.__name__} is expected"
            )
