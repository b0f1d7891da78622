"""A recommender over a catalogue that changes recommends what is there when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recprune import (
    Attributes,
    Index,
    InputError,
    LiveIndex,
    LiveSnapshot,
    Recommender,
    SnapshotIds,
    StorageError,
)
from recprune.cli import main
from recprune.data.identifiers import IntegerIds
from recprune.recommender.item_notes import amended, count_unfitting
from recprune.search.question import mask_of
from recprune.search.reference import score_items
from tests.support.trainings import Trained, assert_same_answers, bits_of, histories_of, questions


class LiveShop:
    """A recommender, its live index, and a table of what is there: number to code and id."""

    def __init__(self, trained: Trained, folder: Path) -> None:
        self.trained = trained
        self.recommender = trained.recommender
        self.live = self.recommender.make_live(folder)
        self.with_live = self.recommender.with_live(self.live)
        self.rng = np.random.default_rng(4)
        codes = self.recommender.index.item_codes()
        names = trained.external([*range(len(codes))])
        self.items = {item: (codes[item], names[item]) for item in range(len(codes))}
        self.num_trained = len(codes)

    def new_id(self, place: int) -> Any:
        return (
            10_000 + place if isinstance(self.recommender.item_ids, IntegerIds) else f"new {place}"
        )

    def codes(self, count: int) -> NDArray[Any]:
        index = self.recommender.index
        shape = (count, index.num_splits)
        return self.rng.integers(0, index.num_sub_items, shape).astype(index.item_codes().dtype)

    def put(self, names: list[Any]) -> None:
        codes = self.codes(len(names))
        numbers = self.live.put(names, codes, replace=True).tolist()
        for number, code, name in zip(numbers, codes, names, strict=True):
            self.items[number] = code, name

    def remove(self, numbers: list[int]) -> None:
        self.live.remove(numbers)
        for number in numbers:
            del self.items[number]

    def change(self) -> None:
        """Let items come and go, change some codes, and let an id return with another number."""
        self.put([self.new_id(place) for place in range(20)])
        gone = [*range(0, self.num_trained, 3)]
        returning = self.items[gone[1]][1]
        self.remove([*gone, self.num_trained + 2])
        self.put([*(self.items[number][1] for number in (1, 4, 7)), returning, self.new_id(30)])

    def numbers(self) -> NDArray[np.int64]:
        return np.array(sorted(self.items))

    def names(self) -> list[Any]:
        return [self.items[number][1] for number in self.numbers().tolist()]


@pytest.fixture
def shop(trained: Trained, tmp_path: Path) -> Iterator[LiveShop]:
    made = LiveShop(trained, tmp_path / "live")
    yield made
    made.live.close()


@pytest.fixture
def strings(sasrec: Trained, tmp_path: Path) -> Iterator[LiveShop]:
    made = LiveShop(sasrec, tmp_path / "live")
    yield made
    made.live.close()


def test_a_live_index_as_it_was_made_changes_nothing(shop: LiveShop) -> None:
    asked = questions(shop.trained)
    found = shop.with_live.recommend(asked, 20)
    expected = shop.recommender.recommend(asked, 20)
    assert_same_answers(found, expected)
    assert np.array_equal(found.scores.view(np.uint32), expected.scores.view(np.uint32))


@pytest.mark.parametrize("exclude_seen", [True, False])
def test_answers_are_those_of_an_index_of_what_is_there(shop: LiveShop, exclude_seen: bool) -> None:
    shop.change()
    numbers, names = shop.numbers(), shop.names()
    codes = np.array([shop.items[number][0] for number in numbers.tolist()])
    rebuilt = Index.build(codes, shop.recommender.index.sub_item_embeddings())
    place_of = {number: place for place, number in enumerate(numbers.tolist())}
    boosted = {names[2]: 1.5, names[-1]: 0.25, names[-4]: -2.0}
    left_out = [names[0], names[-2], shop.new_id(99), shop.trained.external([0])[0]]
    allow = [name for place, name in enumerate(names) if place % 4]
    for history in histories_of(shop.num_trained):
        history_ids = shop.trained.external(history)
        found = shop.with_live.recommend(
            [history_ids],
            30,
            exclude_seen=exclude_seen,
            exclude=left_out,
            allow=allow,
            boosts=boosted,
        )
        encoded = [np.array(history, np.int32)]
        embedding = shop.recommender.encoder.encode(encoded, [None])
        table = rebuilt.sub_item_scores(embedding[0])

        def scores(_: Any, items: NDArray[Any], table: Any = table) -> Any:
            there = np.array([item in place_of for item in items.tolist()])
            values = np.zeros(len(items), np.float32)
            places = [place_of[item] for item in items[there].tolist()]
            values[there] = score_items(table, codes[places], None)
            return values

        heads = shop.recommender.heads
        learnt = heads(embedding, encoded, [None], repeats=not exclude_seen, item_scores=scores)
        total = learnt.total()
        sums: dict[int, np.float32] = {}
        if total is not None:
            given = zip(total[0][0].tolist(), total[0][1], strict=True)
            sums = {place_of[item]: value for item, value in given if item in place_of}
        for name, value in boosted.items():
            place = names.index(name)
            sums[place] = sums.get(place, np.float32(0)) + np.float32(value)
        gone = {*left_out, *(history_ids if exclude_seen else [])}
        top = rebuilt.search(
            embedding,
            30,
            exclude=[[place for place, name in enumerate(names) if name in gone]],
            allow=np.array([name in set(allow) for name in names]),
            boosts=[(np.array([*sums]), np.array([*sums.values()], np.float32))],
        )
        kept = top.ids[0] >= 0
        assert np.array_equal(found.ids[0][kept], numbers[top.ids[0][kept]])
        assert (found.ids[0][~kept] == -1).all()
        assert np.array_equal(found.scores.view(np.uint32), top.scores.view(np.uint32))
        assert found.items[0] == [names[place] for place in top.ids[0][kept].tolist()]
        assert found.stats is not None
        assert found.stats.exact.all()


def test_the_most_popular_are_there_and_new_items_come_last(shop: LiveShop) -> None:
    shop.change()
    numbers, names = shop.numbers(), shop.names()
    popularity = np.zeros(shop.live.num_items, np.int64)
    popularity[: shop.num_trained] = shop.recommender.popularity
    order = sorted(range(len(numbers)), key=lambda place: (-popularity[numbers[place]], place))
    whole = shop.with_live.recommend([[], [shop.new_id(5)]], 500, exclude_seen=True)
    assert whole.by_popularity.all()
    assert whole.items[0] == [names[place] for place in order]
    # What the encoder does not know is unknown, and still seen.
    assert whole.unknown == [[], [shop.new_id(5)]]
    assert whole.items[1] == [name for name in whole.items[0] if name != shop.new_id(5)]
    seen = shop.with_live.recommend([[shop.new_id(5)]], 500, exclude_seen=False)
    assert seen.items[0] == whole.items[0]
    lazily: Any = (iter(history) for history in ([], [shop.new_id(5)]))
    assert shop.with_live.recommend(lazily, 500, exclude_seen=True).items == whole.items
    assert shop.with_live.recommend([], 5).items == []
    boosted = shop.with_live.recommend([[]], 3, boosts={shop.new_id(6): 1e6})
    assert boosted.items[0][0] == shop.new_id(6)
    assert boosted.scores[0, 0] == np.float32(1e6)
    allowed = shop.with_live.recommend([[]], 3, allow=[shop.new_id(8), shop.new_id(7)])
    assert allowed.items == [[shop.new_id(7), shop.new_id(8)]]


def test_what_has_left_is_never_recommended(strings: LiveShop) -> None:
    history = strings.trained.external([5, 17, 3])
    first = strings.with_live.recommend([history], 1).items[0][0]
    snapshot = strings.live.snapshot()
    strings.live.remove(strings.live.find([first]))
    assert first not in strings.with_live.recommend([history], 500).items[0]
    assert first not in strings.with_live.recommend([[]], 500).items[0]
    for name in ("allow", "boosts"):
        given: Any = {first: 100.0} if name == "boosts" else [first]
        with pytest.raises(InputError, match="not in the catalogue"):
            strings.with_live.recommend([history], 1, **{name: given})
    # A snapshot of before still has it, and the recommender of the folder knows of nothing.
    assert strings.with_live.recommend([history], 1, index=snapshot).items == [[first]]
    assert strings.recommender.recommend([history], 1).items == [[first]]


def test_masks_of_before_do_not_allow_what_came_later(strings: LiveShop) -> None:
    mask = np.ones(strings.num_trained, np.bool_)
    strings.put([strings.new_id(place) for place in range(70)])
    for allow in (mask, bits_of(mask)):
        found = strings.with_live.recommend([["a"], []], 500, allow=allow)
        assert found.ids.max() < strings.num_trained
    longer = np.ones(strings.live.num_items, np.bool_)
    assert strings.with_live.recommend([[]], 500, allow=longer).ids.max() == len(longer) - 1
    for wrong in (mask[:-1], np.ones(len(longer) + 1, np.bool_)):
        with pytest.raises(
            InputError, match=r"allow has shape \[\d+\], expected \[90\] to \[160\]"
        ):
            strings.with_live.recommend([[]], 5, allow=wrong)


def test_new_items_have_no_attributes(strings: LiveShop) -> None:
    count = strings.num_trained
    table = {
        "item_id": strings.trained.external([*range(count)]),
        "price": [float(item) for item in range(count)],
        "brand": [f"brand {item % 2}" for item in range(count)],
    }
    attributes = Attributes.from_table(table, strings.recommender.item_ids)
    recommender = strings.recommender.with_attributes(attributes).with_live(strings.live)
    for _ in range(2):  # what was kept of conditions grows with the catalogue
        strings.put([strings.new_id(place) for place in range(strings.live.num_items % 7 + 3)])
        strings.put([strings.new_id(strings.live.num_items)])
        new = {name for number, (_, name) in strings.items.items() if number >= count}
        for history in (["a"], []):
            whole = recommender.recommend([history], 500, exclude_seen=False).items[0]
            cheap = recommender.recommend([history], 500, exclude_seen=False, where="price < 9")
            assert {*cheap.items[0]} == {*strings.trained.external([*range(9)])}
            none = recommender.recommend([history], 500, exclude_seen=False, where="price is null")
            assert none.items[0] == [name for name in whole if name in new]
            limited = recommender.recommend(
                [history], 500, exclude_seen=False, at_most=("brand", 1)
            )
            assert len(limited.items[0]) == 2 + len(new)
    assert recommender.live is strings.live
    assert recommender.with_attributes(None).live is strings.live


def test_attributes_of_new_items_count_once_they_are_given(
    strings: LiveShop, tmp_path: Path
) -> None:
    strings.put(["17", strings.new_id(1)])
    strings.remove([0])
    old = strings.live.snapshot()
    strings.put([strings.new_id(2)])
    names = strings.names()
    table = {"item_id": names, "price": [float(number) for number in strings.numbers()]}
    attributes = Attributes.from_table(table, SnapshotIds(strings.live.snapshot()))
    assert attributes.num_items == strings.live.num_items
    with pytest.raises(InputError, match="attributes are of 93 items, the catalogue has 90"):
        strings.recommender.with_attributes(attributes)
    recommender = strings.with_live.with_attributes(attributes)
    where = f"price >= {strings.num_trained}"
    strings.put([strings.new_id(3)])  # of which nothing is known yet
    # Asked of an older moment first: that takes nothing away from answers of later ones.
    older = recommender.recommend([["b"]], 500, where=where, index=old)
    assert {*older.items[0]} == {"17", strings.new_id(1)}
    for history in (["b"], []):
        found = recommender.recommend([history], 500, where=where)
        assert {*found.items[0]} == {"17", strings.new_id(1), strings.new_id(2)}
        before = recommender.recommend([history], 500, where=where, index=old)
        assert {*before.items[0]} == {"17", strings.new_id(1)}
        limited = recommender.recommend(
            [history], 500, where=where, at_most=("price", 1), index=old
        )
        assert limited.items == before.items
    # Saved is what was trained with.
    recommender.save(tmp_path / "saved")
    loaded = Recommender.load(tmp_path / "saved")
    assert loaded.attributes is not None
    assert loaded.attributes.num_items == strings.num_trained
    assert loaded.recommend([[]], 5, where="price >= 0").by_popularity.all()


CONDITIONS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "price < 5": lambda said: said["price"] is not None and said["price"] < 5,
    "price is null": lambda said: said["price"] is None,
    "in_stock": lambda said: said["in_stock"] is True,
    "not in_stock and brand = 'b'": lambda said: said["in_stock"] is False and said["brand"] == "b",
    "'red' in colours": lambda said: "red" in (said["colours"] or ()),
    "colours is null": lambda said: said["colours"] is None,
    "since >= '2026-01-02'": lambda said: said["since"] is not None and said["since"] >= 2,
}


def drawn_values(rng: np.random.Generator) -> dict[str, Any]:
    """Draw some of what is said of an item, some of it wrong or of columns that are not there."""
    whole: dict[str, Any] = {
        "price": [0, 4.5, 7, None, "cheap", True, 10**400][rng.integers(7)],
        "in_stock": [True, False, None, 1][rng.integers(4)],
        "brand": ["a", "b", "ü", None, 3][rng.integers(5)],
        "colours": [["red", "blue"], [], ["red"], None, [None], "red"][rng.integers(6)],
        "since": [f"2026-01-0{rng.integers(1, 4)}", "soon", None][rng.integers(3)],
        "size": 3,
    }
    return {name: whole[name] for name in whole if rng.random() < 0.4}


def fits(name: str, value: Any) -> bool:
    if value is None:
        return True
    if name == "price":
        return type(value) in (int, float) and value < 1e300
    if name == "colours":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    kinds = {"in_stock": bool, "brand": str, "since": str}
    return name in kinds and type(value) is kinds[name] and value != "soon"


def test_what_is_said_of_items_counts_at_once(strings: LiveShop) -> None:
    """Random changes beside a table of what is said of each item; older moments as they were."""
    rng, live, count = strings.rng, strings.live, strings.num_trained
    given: dict[int, dict[str, Any]] = {
        number: {
            "price": float(number % 9),
            "in_stock": number % 2 == 0,
            "brand": "ab"[number % 2],
            "colours": ["red"] if number % 3 else None,
            "since": 1 + number % 3,
        }
        for number in range(count)
    }
    none = dict.fromkeys(given[0])
    table: dict[str, Any] = {"item_id": strings.trained.external([*range(count)])}
    table |= {name: [said[name] for said in given.values()] for name in none}
    table["since"] = [datetime(2026, 1, day) for day in table["since"]]
    attributes = Attributes.from_table(table, strings.recommender.item_ids)
    recommender = strings.recommender.with_attributes(attributes).with_live(live)
    notes: dict[int, dict[str, Any]] = {}
    moments = []

    def said_of(number: int) -> dict[str, Any]:
        over = {name: one for name, one in notes.get(number, {}).items() if fits(name, one)}
        if over.get("since") is not None:
            over["since"] = int(over["since"][-1])
        return given.get(number, none) | over

    def check(snapshot: LiveSnapshot, expected: dict[int, dict[str, Any]]) -> None:
        for where, is_true in CONDITIONS.items():
            words = recommender.attributes_for("where", snapshot).where(where).words
            mask = mask_of(words, snapshot.num_items)
            assert {*np.flatnonzero(mask)} & {*expected} == {
                number for number, said in expected.items() if is_true(said)
            }, where

    for turn in range(60):
        what = rng.choice(
            ["put", "note", "remove", "compact", "several"], p=[0.3, 0.4, 0.1, 0.1, 0.1]
        )
        for _ in range(3 if what == "several" else 1):
            if what == "put":
                names = [strings.new_id(int(place)) for place in rng.permutation(60)[:3]]
                values = [drawn_values(rng) for _ in names]
                numbers = live.put(
                    names,
                    strings.codes(3),
                    replace=True,
                    notes=[{"attributes": one} for one in values],
                ).tolist()
                notes |= dict(zip(numbers, values, strict=True))
                strings.items |= {n: (None, name) for n, name in zip(numbers, names, strict=True)}
            elif what == "remove":
                gone = rng.permutation([*strings.items])[:2].tolist()
                strings.remove(gone)
                for number in gone:
                    notes.pop(number, None)
            elif what == "compact":
                live.compact().result()
            else:
                number = int(rng.choice([*strings.items]))
                changes = {"attributes": drawn_values(rng)}
                live.note([number], lambda _, before: amended(before, changes, attributes.columns))  # noqa: B023
                notes[number] = notes.get(number, {}) | changes["attributes"]
        expected = {number: said_of(number) for number in strings.items}
        moments.append((live.snapshot(), expected))
        if turn % 3:  # several changes may come between two questions
            check(*moments[-1])
        if turn % 10 == 9:
            check(*moments[int(rng.integers(len(moments)))])
    for moment in moments[::9]:
        check(*moment)
    best = recommender.recommend([[]], 500, where="in_stock", exclude_seen=False).items[0]
    assert {*best} == {
        strings.items[number][1] for number, said in expected.items() if said["in_stock"] is True
    }


def test_what_was_true_is_no_longer_equal_to_one(strings: LiveShop) -> None:
    """As Python has it, 1 is true; a boolean takes the one, and passes over the other."""
    table = {
        "item_id": strings.trained.external([0, 1]),
        "in_stock": [False, False],
        "stock": [3, 3],
    }
    attributes = Attributes.from_table(table, strings.recommender.item_ids)
    recommender = strings.recommender.with_attributes(attributes).with_live(strings.live)

    def in_stock() -> list[int]:
        words = recommender.attributes_for("where", strings.live.snapshot()).where("in_stock").words
        return np.flatnonzero(mask_of(words, strings.live.num_items)).tolist()

    for value, expected in ((True, [0]), (1, []), (True, [0]), (1.0, [])):
        strings.live.note([0], [{"attributes": {"in_stock": value}}])
        assert in_stock() == expected, value


def test_other_columns_pass_over_what_does_not_fit(strings: LiveShop) -> None:
    live = strings.live
    [number] = live.put(["hat"], strings.codes(1), notes=[{"attributes": {"price": 5, "x": 1}}])
    live.note([0, 1], [{"attributes": ["price"]}, {"attributes": {"price": "cheap"}}])
    table = {"item_id": strings.trained.external([0, 1]), "price": [1.0, 2.0]}
    attributes = Attributes.from_table(table, strings.recommender.item_ids)
    recommender = strings.recommender.with_attributes(attributes).with_live(live)
    found = recommender.recommend([[]], 9, where="price > 0", exclude_seen=False).items[0]
    assert {*found} == {"hat", *strings.trained.external([0, 1])}
    assert count_unfitting(live.snapshot().notes, attributes) == 2
    assert (
        recommender.attributes_for("where", live.snapshot()).columns["price"].value_at(int(number))
        == 5.0
    )


def test_whatever_is_looked_up_is_found_or_not(shop: LiveShop) -> None:
    shop.put([shop.new_id(1)])
    first, new = shop.items[1][1], shop.new_id(1)
    odd: list[Any] = [True, None, 1.5, b"a", [first], "\udc80", 10**30, float("nan"), np.float32(5)]
    ids = SnapshotIds(shop.live.snapshot())
    assert ids.find_all([first, *odd, new]).tolist() == [1, *[-1] * len(odd), shop.num_trained]
    assert ids.find_all(["\udc80", "x"]).tolist() == [-1, -1]
    assert ids.find_all([10**30, 2**63]).tolist() == [-1, -1]
    assert ids.find_all([]).tolist() == []
    assert ids.take([shop.num_trained, 1]) == [new, first]
    assert (len(ids), ids[1]) == (shop.num_trained + 1, first)
    found = shop.with_live.recommend([[first, *odd]], 3)
    assert len(found.unknown[0]) == len(odd)


def test_only_a_live_index_of_the_same_items_belongs_to_it(
    trainings: dict[str, Trained], strings: LiveShop, tmp_path: Path
) -> None:
    other = trainings["repeats"].recommender
    with pytest.raises(StorageError, match="was not made from this recommender"):
        other.with_live(strings.live)
    loaded = Recommender.load(strings.trained.saved)
    assert loaded.with_live(strings.live).recommend([["a"]], 3).items
    index = strings.recommender.index
    with (
        LiveIndex.create(
            tmp_path / "by hand", index.item_codes(), index.sub_item_embeddings()
        ) as live,
        pytest.raises(StorageError, match="`recprune index live` makes one"),
    ):
        loaded.with_live(live)
    with pytest.raises(InputError, match="`with_live` takes one"):
        loaded.recommend([["a"]], index=strings.live.snapshot())
    other_live = LiveIndex.create(
        tmp_path / "empty", index.item_codes()[:0], index.sub_item_embeddings()
    )
    with other_live, pytest.raises(InputError, match="index has 0 items .*expected 90 or more"):
        loaded.with_live(strings.live).recommend([["a"]], index=other_live.snapshot())
    with pytest.raises(InputError, match="these have changed"):
        loaded.with_live(strings.live).recommend([["a"]], index=index)
    assert loaded.with_live(strings.live).with_live(None).live is None
    with pytest.raises(StorageError, match="not overwritten"):
        loaded.make_live(strings.live.folder)


def test_the_command_makes_one(
    sasrec: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "live"
    assert main(["index", "live", str(sasrec.saved), "--out", str(out)]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert said[0] == ["items", str(sasrec.prepared.num_items)]
    with LiveIndex.open(out) as live:
        recommender = Recommender.load(sasrec.saved).with_live(live)
        assert recommender.recommend([["a"]], 3).items
    assert main(["index", "live", str(sasrec.saved), "--out", str(out)]) == 2
    assert "already exists and is not empty" in capsys.readouterr().err
