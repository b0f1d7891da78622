"""What a caller asks for, by external ids, as numbers of the catalogue, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import ExternalId, ExternalIds
from recprune.models.boost_heads import add_boosts
from recprune.recommender.assortment import Assortment
from recprune.search.question import ItemBits
from recprune.types import Boosts, InputError, Int32Array, Int64Array

_LARGEST_BOOST = float(np.finfo(np.float32).max)


class FoundHistories(NamedTuple):
    """Histories as an encoder reads them, and what it does not know."""

    events: list[ExternalId]  # of all histories, one after the other
    known: list[Int32Array]  # internal ids
    unknown: list[list[ExternalId]]
    kept: list[NDArray[np.bool_]]  # which events of each are known


def look_up(item_ids: ExternalIds, histories: Sequence[Sequence[ExternalId]]) -> FoundHistories:
    """Find the items of histories of external ids among those that a model was trained with."""
    if isinstance(histories, str | bytes) or not hasattr(histories, "__iter__"):
        raise InputError(f"histories is {histories!r}, expected a sequence of histories")
    whole: list[ExternalId] = []  # one history after the other
    ends = []
    for place, history in enumerate(histories):
        if isinstance(history, str | bytes) or not hasattr(history, "__iter__"):
            raise InputError(f"histories[{place}] is {history!r}, expected a sequence of ids")
        whole.extend(history)
        ends.append(len(whole))
    found = item_ids.find_all(whole)
    known: list[Int32Array] = []
    unknown: list[list[ExternalId]] = []
    kept: list[NDArray[np.bool_]] = []
    for start, end in pairwise([0, *ends]):
        items = found[start:end]
        is_known = items >= 0
        missing = [] if is_known.all() else np.flatnonzero(~is_known).tolist()
        kept.append(is_known)
        known.append((items[is_known] if missing else items).astype(np.int32))
        unknown.append([whole[start + place] for place in missing])
    return FoundHistories(whole, known, unknown, kept)


def find_known(offered: Assortment, external_ids: Sequence[ExternalId]) -> Int64Array:
    if isinstance(external_ids, str | bytes) or not hasattr(external_ids, "__iter__"):
        raise InputError(f"exclude is {external_ids!r}, expected a sequence of item ids")
    given: list[Any] = list(external_ids)
    if not given:
        return np.empty(0, np.int64)
    for place, value in enumerate(given):
        if isinstance(value, list | tuple | np.ndarray):  # one list is for all histories
            raise InputError(f"exclude[{place}] is {value!r}, expected an item id")
    found = offered.find(given)
    return found[found >= 0]


def boosted_items(offered: Assortment, boosts: Mapping[ExternalId, float] | None) -> Boosts | None:
    """Return the internal ids of boosted items and their boosts."""
    if not boosts:
        return None
    if not isinstance(boosts, Mapping):
        raise InputError(f"boosts is {boosts!r}, expected a mapping from item ids to numbers")
    given = list(boosts)
    items = offered.find(given)
    if len(items) and items.min() < 0:
        raise InputError(f"boosts: {given[int((items < 0).argmax())]!r}: not in the catalogue")
    values = np.empty(len(given), np.float32)
    for place, (item, boost) in enumerate(boosts.items()):
        number = isinstance(boost, int | float | np.integer | np.floating)
        if not number or isinstance(boost, bool) or not abs(boost) <= _LARGEST_BOOST:
            raise InputError(f"boosts[{item!r}] is {boost!r}, expected a finite number")
        values[place] = boost
    return items, values


def allowed_items(
    offered: Assortment, allow: Sequence[ExternalId] | NDArray[np.bool_] | ItemBits | None
) -> NDArray[Any] | None:
    """Return which items are allowed, as a mask or as bits."""
    if allow is None:
        return None
    if isinstance(allow, ItemBits):
        return offered.with_length(allow.words)
    if isinstance(allow, np.ndarray) and allow.dtype == np.bool_:
        return offered.with_length(allow)
    if isinstance(allow, str | bytes) or not hasattr(allow, "__iter__"):
        raise InputError(f"allow is {allow!r}, expected a sequence of item ids, or a mask")
    given = list(allow)
    items = offered.find(given)
    if len(items) and items.min() < 0:
        place = int((items < 0).argmax())
        raise InputError(f"allow[{place}] is {given[place]!r}: not in the catalogue")
    mask = np.zeros(offered.num_items, np.bool_)
    mask[items] = True
    return mask


def left_out_items(
    offered: Assortment, found: FoundHistories, exclude: Sequence[ExternalId], *, seen: bool
) -> list[Int64Array]:
    """Return what each answer has to leave out: `exclude`, and if asked for what was `seen`."""
    further = find_known(offered, exclude)
    if not seen:
        return [further] * len(found.known)
    own: Sequence[NDArray[Any]] = found.known
    if offered.snapshot is not None:  # an item may be there that the encoder does not know
        own = _there(offered, found)
    return [
        np.concatenate([further, items]) if len(further) else items.astype(np.int64)
        for items in own
    ]


def _there(offered: Assortment, found: FoundHistories) -> list[Int64Array]:
    """Return the numbers of what is in histories and there."""
    ends = np.cumsum([len(history) for history in found.kept])
    parts = np.split(offered.find(found.events), ends[:-1]) if found.kept else []
    return [numbers[numbers >= 0] for numbers in parts]


def combined_boosts(
    own: list[Boosts] | None, given: Boosts | None, count: int
) -> list[Boosts | None] | None:
    """Return what the model adds and what the caller adds, for each query."""
    if own is None:
        return None if given is None else [given] * count
    return [add_boosts(boosts, given) for boosts in own]
