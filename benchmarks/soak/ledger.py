"""What the catalogue is by the changes that were acknowledged: an oracle that knows no index.

Changes are made one after the other, so the catalogue has a version after each. An answer must be
that of one version: none older than what was acknowledged a while before the question, and none
newer than what was sent when the answer came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recprune.search import reference
from recprune.types import CodeArray, Float32Array

Answer = tuple[tuple[str, float], ...]  # items and scores
Said = Mapping[str, Any]  # new values of some attributes; None: not known any more
_EVER = np.iinfo(np.int64).max
_PATIENCE_S = 5.0  # a version that was acknowledged so long before a question must be seen


@dataclass(frozen=True)
class Condition:
    """A condition on attributes, as text, and as the oracle understands it."""

    text: str
    is_true: Callable[[Attributes], bool]


@dataclass(frozen=True)
class Attributes:
    """What an item is like; None: not known."""

    price: float | None = None
    brand: str | None = None


NOTHING_KNOWN = Attributes()

CONDITIONS = (
    Condition("price < 50", lambda item: item.price is not None and item.price < 50),
    Condition("price >= 95 or price is null", lambda item: item.price is None or item.price >= 95),
    Condition("brand in ('a', 'b')", lambda item: item.brand in ("a", "b")),
    Condition(
        "not (brand == 'c') and price > 20",
        lambda item: (
            item.brand is not None
            and item.brand != "c"
            and item.price is not None
            and item.price > 20
        ),
    ),
    Condition("brand is null", lambda item: item.brand is None),
)


@dataclass(frozen=True)
class Filters:
    """What a question leaves out."""

    exclude: Sequence[str] = ()
    condition: Condition | None = None


@dataclass
class Change:
    """When a change was first sent, and when it was acknowledged."""

    sent: float
    acknowledged: float = np.inf

    def acknowledge(self) -> None:
        self.acknowledged = time.monotonic()


class Ledger:
    """All items that ever were, a row for each code that one had. One thread changes it, others ask.

    Row by row: since which version and until which it counts, and what conditions are true of it.
    """

    def __init__(
        self, codes: CodeArray, external_ids: Sequence[str], attributes: Sequence[Attributes]
    ) -> None:
        count = len(codes)
        self.changes: list[Change] = []
        self.num_numbers = count
        self._lock = threading.Lock()
        self._names = [*external_ids]
        self._known = [*attributes]
        self._there = {name: place for place, name in enumerate(external_ids)}  # its row
        self._rows = {name: [place] for place, name in enumerate(external_ids)}  # all it ever had
        self._codes = codes.copy()
        self._numbers = np.arange(count)
        self._since = np.zeros(count, np.int64)
        self._until = np.full(count, _EVER)
        self._truths = np.array([_truths(known) for known in attributes], np.bool_)

    # Changing it ---------------------------------------------------------------------------------

    def begin(self) -> Change:
        """Note that a change is being sent: from now on it may be seen."""
        with self._lock:
            self.changes.append(Change(time.monotonic()))
            return self.changes[-1]

    def put(self, external_ids: Sequence[str], codes: CodeArray, said: Sequence[Said]) -> list[int]:
        """Note what the last change does; return the numbers that the items must have.

        An item that is there keeps its number, and what is known of it but for what is said.
        """
        with self._lock:
            version, numbers, known = len(self.changes), [], []
            for name, values in zip(external_ids, said, strict=True):
                before = self._there.get(name)
                if before is None:
                    numbers.append(self.num_numbers)
                    known.append(replace(NOTHING_KNOWN, **values))
                    self.num_numbers += 1
                else:
                    numbers.append(int(self._numbers[before]))
                    known.append(replace(self._known[before], **values))
                    self._until[before] = version
                self._there[name] = len(self._names)
                self._rows.setdefault(name, []).append(len(self._names))
                self._names.append(name)
            count = len(external_ids)
            self._known += known
            self._codes = np.concatenate([self._codes, codes])
            self._numbers = np.append(self._numbers, numbers)
            self._since = np.append(self._since, np.full(count, version))
            self._until = np.append(self._until, np.full(count, _EVER))
            self._truths = np.concatenate([self._truths, [_truths(one) for one in known]])
            return numbers

    def remove(self, external_id: str) -> None:
        """Note that the last change lets an item leave."""
        with self._lock:
            self._until[self._there.pop(external_id)] = len(self.changes)

    def renumber(self, numbers: Mapping[str, int], num_numbers: int) -> None:
        """Note that with the last change all items that are there have other numbers.

        So it is where another live index takes the place of one.
        """
        with self._lock:
            version, names = len(self.changes), [*self._there]
            rows = np.array([self._there[name] for name in names])
            first = len(self._names)
            self._until[rows] = version
            for place, name in enumerate(names, first):
                self._there[name] = place
                self._rows[name].append(place)
            self._names += names
            self._known += [self._known[row] for row in rows.tolist()]
            self._codes = np.concatenate([self._codes, self._codes[rows]])
            self._numbers = np.append(self._numbers, [numbers[name] for name in names])
            self._since = np.append(self._since, np.full(len(names), version))
            self._until = np.append(self._until, np.full(len(names), _EVER))
            self._truths = np.concatenate([self._truths, self._truths[rows]])
            self.num_numbers = num_numbers

    # Asking it -----------------------------------------------------------------------------------

    def present(self) -> list[str]:
        with self._lock:
            return [*self._there]

    def code_of(self, external_id: str) -> CodeArray:
        with self._lock:
            code: CodeArray = self._codes[self._there[external_id]].copy()
            return code

    def versions(self, begun: float, ended: float) -> Iterator[tuple[int, float]]:
        """Yield the versions that an answer may be of, and by how many seconds each is late.

        Those that are not late come first.
        """
        with self._lock:
            changes = [*self.changes]
        newest = sum(change.sent <= ended for change in changes)
        fresh = sum(change.acknowledged <= begun for change in changes)
        for version in range(fresh, newest + 1):
            yield version, 0.0
        for version in range(fresh - 1, -1, -1):
            late = begun - changes[version].acknowledged  # by the change that it does not have
            if late > _PATIENCE_S:
                return
            yield version, late

    def answer(
        self, version: int, sub_item_scores: Float32Array, k: int, filters: Filters
    ) -> Answer:
        """Return the best items of a version, by scoring all of them."""
        with self._lock:
            eligible = (self._since <= version) & (version < self._until)
            if filters.condition is not None:
                eligible &= self._truths[:, CONDITIONS.index(filters.condition)]
            for name in filters.exclude:
                eligible[self._rows.get(name, [])] = False
            rows = np.flatnonzero(eligible)
            codes, numbers = self._codes[rows], self._numbers[rows]
        scores = reference.score_items(sub_item_scores, codes, None)
        best = np.lexsort((numbers, -scores))[:k]
        return tuple((self._names[rows[place]], float(scores[place])) for place in best)


def _truths(item: Attributes) -> list[bool]:
    return [condition.is_true(item) for condition in CONDITIONS]
