"""Catalogues that change at random, beside a plain table of what should be in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune import LiveIndex, LiveSnapshot
from recprune.search import reference
from recprune.types import Float32Array, Json
from tests.support.search_cases import AWKWARD, assert_same, some_boosts


class Shop:
    """A live index and a table of its items: number to code, bias and external id."""

    def __init__(self, folder: Path, rng: np.random.Generator, **shape: Any) -> None:
        self.folder = folder
        self.rng = rng
        self.num_splits = shape.get("num_splits", 8)
        self.num_sub_items = shape.get("num_sub_items", 20)
        self.has_bias = shape.get("has_bias", False)
        self.ids: str | None = shape.get("ids")
        self.few_codes = shape.get("few_codes", False)
        self.items: dict[int, tuple[NDArray[Any], float, Any]] = {}
        self.notes: dict[int, Json] = {}
        self.next_number = 0
        self.names = self._all_names()
        width = 2
        self.embeddings = rng.standard_normal((self.num_splits, self.num_sub_items, width)).astype(
            np.float32
        )
        count = shape.get("num_items", 100)
        codes, bias, names = self.drawn(count)
        self.live = LiveIndex.create(
            folder,
            codes,
            self.embeddings,
            item_bias=bias,
            item_ids=names,
            layout=shape.get("layout", "auto"),
        )
        self._take_in(codes, bias, names)

    def _all_names(self) -> Iterator[Any]:
        number = 0
        while True:
            number += 1
            # Out of order, so that the sorted ids are not the numbers.
            yield f"é{(number * 7919) % 10_007}-{number}" if self.ids == "strings" else -7 * number

    def drawn(self, count: int) -> tuple[NDArray[Any], Float32Array | None, list[Any] | None]:
        """Draw new items: codes, biases, external ids."""
        dtype = np.uint8 if self.num_sub_items <= 256 else np.uint16
        shape = (count, self.num_splits)
        codes = self.rng.integers(0, self.num_sub_items, shape).astype(dtype)
        if self.few_codes and count:  # ties by the dozen, across segments too
            codes = (codes % 2).astype(dtype)
        values = self.rng.choice([0.0, -0.0, 0.5, -3.0], count).astype(np.float32)
        names = [next(self.names) for _ in range(count)] if self.ids else None
        if self.ids == "integers" and names == []:
            return codes, values if self.has_bias else None, np.empty(0, np.int64)  # type: ignore[return-value]
        return codes, values if self.has_bias else None, names

    def _take_in(self, codes: NDArray[Any], bias: Float32Array | None, names: Any) -> None:
        for row, code in enumerate(codes):
            value = 0.0 if bias is None else float(bias[row])
            self.items[self.next_number] = code, value, names[row] if self.ids else None
            self.next_number += 1

    def drawn_notes(self, count: int) -> list[Json | None]:
        """Draw what is said of items, often nothing."""
        kinds: list[Json | None] = [None, {}, {"é": [1, None, True]}, {"deep": {"er": -0.5}}]
        return [
            {"drawn": int(self.rng.integers(1000))} if row % 2 else kinds[self.rng.integers(4)]
            for row in range(count)
        ]

    def _take_notes(self, numbers: list[int], notes: list[Json | None] | None) -> None:
        for number, note in zip(numbers, notes or [], strict=False):
            if note is not None:
                self.notes[number] = note

    def add(self, count: int, *, with_bias: bool = True, with_notes: bool = False) -> None:
        codes, bias, names = self.drawn(count)
        bias = bias if with_bias else None
        notes = self.drawn_notes(count) if with_notes else None
        numbers = self.live.add(codes, bias, item_ids=names, notes=notes)
        assert numbers.tolist() == list(range(self.next_number, self.next_number + count))
        self._take_in(codes, bias, names)
        self._take_notes(numbers.tolist(), notes)

    def note(self, count: int) -> None:
        """Say something else of some items, or nothing any more; of others, more than before."""
        numbers = self.some(count)
        if self.rng.random() < 0.5:
            self.live.note(numbers, lambda place, said: {**(said or {}), "place": place})
            for place, number in enumerate(numbers):
                self.notes[number] = {**self.notes.get(number, {}), "place": place}
            return
        notes = self.drawn_notes(len(numbers))
        self.live.note(numbers, notes)
        for number in numbers:
            self.notes.pop(number, None)
        self._take_notes(numbers, notes)

    def remove(self, count: int) -> None:
        numbers = self.some(count)
        self.live.remove(numbers)
        for number in numbers:
            del self.items[number]
            self.notes.pop(number, None)

    def replace(self, count: int, *, with_bias: bool = True) -> None:
        numbers = self.some(count)
        codes, bias, _ = self.drawn(len(numbers))
        bias = bias if with_bias else None
        self.live.replace(numbers, codes, bias)
        for row, number in enumerate(numbers):
            _, old, name = self.items[number]
            self.items[number] = codes[row], old if bias is None else float(bias[row]), name

    def put(self, count: int, *, with_bias: bool = True, with_notes: bool = False) -> None:
        """Put items of which about half are there."""
        there = self.some(count // 2)
        codes, bias, names = self.drawn(count)
        assert names is not None
        order = self.rng.permutation(count)
        names = [self.items[number][2] for number in there] + names[len(there) :]
        biases: list[float | None] | None = None
        if bias is not None and with_bias:  # some are not given
            biases = [None if row % 3 == 0 else float(value) for row, value in enumerate(bias)]
        put = [names[row] for row in order]
        given = None if biases is None else [biases[row] for row in order]
        notes = self.drawn_notes(count) if with_notes else None
        numbers = self.live.put(put, codes[order], given, replace=True, notes=notes)
        self._take_notes(numbers.tolist(), notes)
        numbered = dict(zip(put, numbers.tolist(), strict=True))
        new = sorted(number for number in numbered.values() if number >= self.next_number)
        assert new == list(range(self.next_number, self.next_number + count - len(there)))
        for row, name in enumerate(names):
            old = self.items[numbered[name]][1] if row < len(there) else 0.0
            given_bias = None if biases is None else biases[row]
            value = old if given_bias is None else given_bias
            self.items[numbered[name]] = codes[row], value, name
        self.next_number += len(new)

    def some(self, count: int) -> list[int]:
        numbers = np.array(sorted(self.items), np.int64)
        found: list[int] = self.rng.permutation(numbers)[:count].tolist()
        return found

    def seal(self) -> None:
        self.live._rewrite(1, everything=False)

    def compact(self) -> None:
        self.live.compact().result()

    def divide(self) -> None:
        self.live.compact(shards=int(self.rng.integers(1, 6))).result()

    def reopen(self) -> None:
        self.live.close()
        self.live = LiveIndex.open(self.folder)

    # Asking --------------------------------------------------------------------------------------

    def table(self) -> tuple[NDArray[np.int64], NDArray[Any], Float32Array | None]:
        numbers = np.array(sorted(self.items), np.int64)
        dtype = np.uint8 if self.num_sub_items <= 256 else np.uint16
        codes = np.array([self.items[number][0] for number in numbers.tolist()], dtype)
        codes = codes.reshape(len(numbers), self.num_splits)
        bias = np.array([self.items[number][1] for number in numbers.tolist()], np.float32)
        return numbers, codes, bias if self.has_bias else None

    def check(self, methods: tuple[str, ...] = ("auto",)) -> None:
        check_snapshot(self.live.snapshot(), self, methods)


def check_snapshot(snapshot: LiveSnapshot, shop: Shop, methods: tuple[str, ...]) -> None:
    """Hold a snapshot against exhaustive scoring of the items that should be there."""
    rng = shop.rng
    numbers, codes, bias = shop.table()
    assert snapshot.num_items == shop.next_number
    assert snapshot.num_present == len(numbers)
    assert np.array_equal(snapshot.numbers(), numbers)
    assert np.array_equal(snapshot.item_codes(numbers), codes)
    shape = (shop.num_splits, shop.num_sub_items)
    kinds = [rng.standard_normal(shape), rng.integers(-2, 3, shape) / 3, rng.choice(AWKWARD, shape)]
    scores = kinds[rng.integers(len(kinds))].astype(np.float32)
    sizes = [1, 2, 10, 129, len(numbers), len(numbers) + 3]
    k = int(rng.choice([max(1, size) for size in sizes]))
    eligible = np.ones(len(numbers), np.bool_)
    exclude = allow = floor = boosts = None
    own_boosts = None
    if shop.next_number and rng.random() < 0.4:  # some have left
        exclude = rng.integers(0, shop.next_number, 20).tolist()
        eligible &= ~np.isin(numbers, exclude)
    if rng.random() < 0.4:
        allow = rng.random(snapshot.num_items) < rng.choice([0.0, 0.05, 0.5, 1.0])
        eligible &= allow[numbers]
    if shop.next_number and rng.random() < 0.4:
        boosts = some_boosts(rng, shop.next_number, rng.choice([0.05, 0.5]))
        here = np.isin(boosts[0], numbers)
        own_boosts = np.searchsorted(numbers, boosts[0][here]), boosts[1][here]
    places, totals = reference.exhaustive(
        scores, codes, k, bias=bias, eligible=eligible, boosts=own_boosts
    )
    if len(totals) and rng.random() < 0.4:
        floor = float(totals[rng.integers(len(totals))])
        places, totals = places[totals >= floor], totals[totals >= floor]
    missing = k - len(places)
    expected = (
        np.concatenate([numbers[places], np.full(missing, -1)]),
        np.concatenate([totals, np.full(missing, -np.inf, np.float32)]),
    )
    for method in methods:
        top = snapshot.search_scores(
            scores, k, method=method, exclude=exclude, allow=allow, floor=floor, boosts=boosts
        )
        assert_same(top, expected, method)
        assert top.stats.exact.all()
        threshold = -np.inf if floor is None else np.float32(floor)
        assert top.stats.threshold[0] == (totals[-1] if k and not missing else threshold)
    assert dict(snapshot.notes) == shop.notes
    assert len(snapshot.notes) == len(shop.notes)
    if shop.ids:
        names = [shop.items[number][2] for number in numbers.tolist()]
        assert snapshot.external_ids(numbers) == names
        assert np.array_equal(snapshot.find(names), numbers)
