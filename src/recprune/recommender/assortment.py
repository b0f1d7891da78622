"""The assortment: what can be recommended at one moment, whether or not the catalogue changes.

Items are known by their numbers. Those that a model was trained with have their internal ids, for
good; items that came later have higher numbers, and no interactions.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recprune.attributes.attributes import Attributes
from recprune.attributes.diversity import Limit, within
from recprune.data.identifiers import ExternalId, ExternalIds, FoundIds
from recprune.live.notes import NO_NOTES, Notes
from recprune.live.snapshot import LiveSnapshot
from recprune.live.snapshot_ids import SnapshotIds
from recprune.recommender.item_notes import following
from recprune.search.index import Index
from recprune.search.question import Searchable, mask_of
from recprune.types import Boosts, Float32Array, InputError, Int64Array

_FIRST_LOOK = 1024  # items of the popular ones: enough for most answers


@dataclass(frozen=True, eq=False)
class Assortment:
    """Items, what finds the best of them, and how popular they are. Frozen."""

    index: Searchable
    item_ids: FoundIds
    popularity: Int64Array  # training interactions of the items that the model was trained with
    by_popularity: Int64Array  # these items, the most popular first
    attributes: AttributesSource
    snapshot: LiveSnapshot | None = None  # of a catalogue that changes

    @property
    def num_items(self) -> int:
        """How many numbers there are, of items that have left too."""
        return self.index.num_items

    # By external id ------------------------------------------------------------------------------

    def find(self, external_ids: Sequence[object]) -> Int64Array:
        """Return the numbers of items that are there, −1 where none is."""
        return self.item_ids.find_all(external_ids)

    def names(self, numbers: Int64Array) -> list[ExternalId]:
        """Return the external ids of items that are there."""
        return [*self.item_ids.take(numbers.tolist())]

    def with_length(self, allowed: NDArray[Any]) -> NDArray[Any]:
        """Return a mask, or bits, over all numbers; what came after it was made is not allowed."""
        is_mask = allowed.dtype == np.bool_
        most, least = (
            count if is_mask else -(-count // 64)
            for count in (self.num_items, len(self.popularity))
        )
        if allowed.ndim != 1 or not least <= len(allowed) <= most:
            expected = f"[{most}]" if least == most else f"[{least}] to [{most}]"
            raise InputError(f"allow has shape {list(allowed.shape)}, expected {expected}")
        if len(allowed) == most:
            return allowed
        return np.concatenate([allowed, np.zeros(most - len(allowed), allowed.dtype)])

    # By popularity -------------------------------------------------------------------------------

    def most_popular(
        self,
        k: int,
        excluded: Int64Array,
        allowed: NDArray[Any] | None,
        boosted: Boosts | None,
        limit: Limit | None,
    ) -> tuple[Int64Array, Float32Array]:
        """Return the best k by numbers of interactions and boosts, and these sums."""
        wanted = k
        while True:
            best, totals = self._most_popular(wanted, excluded, allowed, boosted)
            if limit is None:
                return best, totals
            taken = np.flatnonzero(within(limit, best))[:k]
            if len(taken) == k or len(best) < wanted:
                return best[taken], totals[taken]
            wanted *= 4  # sorted anew: the more, the fewer times

    def _most_popular(
        self,
        k: int,
        excluded: Int64Array,
        allowed: NDArray[Any] | None,
        boosted: Boosts | None,
    ) -> tuple[Int64Array, Float32Array]:
        nothing = self.by_popularity[:0], np.empty(0, np.float32)
        items, boosts = boosted if boosted is not None else nothing
        mask = None
        if allowed is not None:
            mask = allowed if allowed.dtype == np.bool_ else mask_of(allowed, self.num_items)
            items, boosts = items[mask[items]], boosts[mask[items]]
        # Enough, whichever of them are excluded or sink.
        leading = self._leading(k + len(excluded) + len(items), mask)
        best = np.union1d(leading, items)
        totals = self._popularity_of(best).astype(np.float32)
        totals[np.searchsorted(best, items)] += boosts
        kept = ~np.isin(best, excluded)
        best, totals = best[kept], totals[kept]
        order = np.lexsort((best, -totals))[:k]
        return best[order], totals[order]

    def _leading(self, count: int, mask: NDArray[np.bool_] | None) -> Int64Array:
        """Return the most popular items that are there and allowed, at most so many."""
        trained = len(self.by_popularity)
        found: list[Int64Array] = []
        begin, size, missing = 0, max(count, _FIRST_LOOK), count
        while missing > 0 and begin < self.num_items:
            end = min(begin + size, self.num_items)
            # What came later has no interactions, and stands behind all others that have none.
            later = np.arange(max(begin, trained), end, dtype=np.int64)
            part = np.concatenate([self.by_popularity[begin:end], later])
            if mask is not None:
                part = part[mask[part]]
            if self.snapshot is not None:
                part = part[self.snapshot.are_there(part)]
            found.append(part[:missing])
            missing -= len(found[-1])
            begin, size = end, 4 * size
        return np.concatenate(found) if found else self.by_popularity[:0]

    def _popularity_of(self, numbers: Int64Array) -> Int64Array:
        popularity = np.zeros(len(numbers), np.int64)
        trained = numbers < len(self.popularity)
        popularity[trained] = self.popularity[numbers[trained]]
        return popularity


class _AttributesAt(NamedTuple):
    """Attributes, and the notes that lie over them."""

    attributes: Attributes
    notes: Notes
    sequence: int  # of the moment


class AttributesSource:
    """The attributes of a catalogue that changes: those that were given, with its notes over them.

    Items that came after them have the values that their notes say, and no others. What has
    changed is taken over when a condition is first asked of a moment, and kept for the next one.
    Safe to share between threads.
    """

    def __init__(self, attributes: Attributes | None) -> None:
        self._given = attributes
        self._latest: _AttributesAt | None = None
        self._lock = threading.Lock()  # one thread makes them, for all that ask

    def of(self, snapshot: LiveSnapshot | None) -> Attributes | None:
        """Return the attributes at a moment, or None if there are none."""
        given = self._given
        if given is None or snapshot is None:
            return given
        latest = self._latest
        if latest is not None and _is_of(latest, snapshot):
            return latest.attributes
        with self._lock:
            return self._made(given, snapshot)

    def _made(self, given: Attributes, snapshot: LiveSnapshot) -> Attributes:
        latest = self._latest or _AttributesAt(given, NO_NOTES, -1)
        if _is_of(latest, snapshot):  # another thread was faster
            return latest.attributes
        before, num_items = latest.attributes, snapshot.num_items
        # At an older moment, which is rare, there are fewer; those are not kept, as the values of
        # the others would be lost.
        is_longer = before.num_items <= num_items
        attributes = before.extended(num_items) if is_longer else before.shortened(num_items)
        changed = snapshot.notes.changed_since(latest.notes)
        changed = [number for number in changed if number < num_items]
        made = following(attributes, latest.notes, snapshot.notes, given, changed)
        if is_longer and snapshot.sequence >= latest.sequence:
            self._latest = _AttributesAt(made, snapshot.notes, snapshot.sequence)
        return made


def _is_of(at: _AttributesAt, snapshot: LiveSnapshot) -> bool:
    return at.attributes.num_items == snapshot.num_items and at.notes is snapshot.notes


class Assortments:
    """The assortments of one recommender: that of its training, and those of a live index."""

    def __init__(
        self,
        index: Index,
        item_ids: ExternalIds,
        popularity: Int64Array,
        attributes: Attributes | None,
    ) -> None:
        by_popularity = np.argsort(-popularity, kind="stable")
        self.trained = Assortment(
            index, item_ids, popularity, by_popularity, AttributesSource(attributes)
        )
        self._latest = self.trained

    def at(self, snapshot: LiveSnapshot) -> Assortment:
        """Return that of a moment; asked again for the same one, the same."""
        latest = self._latest
        if latest.snapshot is not snapshot:
            trained = self.trained
            self._check_shape(snapshot)
            latest = Assortment(
                snapshot,
                SnapshotIds(snapshot),
                trained.popularity,
                trained.by_popularity,
                trained.attributes,
                snapshot,
            )
            self._latest = latest
        return latest

    def _check_shape(self, snapshot: LiveSnapshot) -> None:
        """Refuse what cannot be of the live index that belongs to these items."""
        index = self.trained.index
        ours, theirs = ((of.num_splits, of.num_sub_items, of.width) for of in (index, snapshot))
        if ours != theirs or snapshot.num_items < index.num_items:
            raise InputError(
                f"index has {snapshot.num_items} items and splits, sub-items and width {theirs}, "
                f"expected {index.num_items} or more and {ours}"
            )

    def over(self, index: Searchable) -> Assortment:
        """Return that of the training, searched by another index of the same items."""
        trained = self.trained
        if index is trained.index:
            return trained
        if (index.num_items, index.width) != (trained.index.num_items, trained.index.width):
            raise InputError(
                f"index has {index.num_items} items of width {index.width}, expected "
                f"{trained.index.num_items} of width {trained.index.width}"
            )
        return Assortment(
            index,
            trained.item_ids,
            trained.popularity,
            trained.by_popularity,
            trained.attributes,
        )


def fingerprint(index: Index, item_ids: ExternalIds) -> str:
    """Return what tells the items of a recommender: their codes, vectors, biases and external ids.

    A live index that was made from these belongs to any recommender that has them, in whichever
    layout and with whichever attributes it was saved.
    """
    digest = hashlib.sha256()
    arrays: dict[str, NDArray[Any]] = {
        "codes": index.item_codes(),
        "sub_item_embeddings": index.sub_item_embeddings(),
        **item_ids.to_arrays("item_ids"),
    }
    if index.item_bias is not None:
        arrays["item_bias"] = index.item_bias
    for name, array in sorted(arrays.items()):
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        digest.update(f"{name} {plain.dtype.str} {plain.shape}\n".encode())
        digest.update(plain.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
