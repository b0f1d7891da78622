"""At any moment, a live index answers as one that is built from scratch over what is there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recprune import Auto, Index, InputError, LiveIndex, Scan, StorageError
from recprune._native import instruction_sets
from recprune.live import division, merging
from recprune.live.given_changes import ChangedItemError
from recprune.search import reference
from recprune.search.question import Searchable
from tests.support.live_cases import Shop, check_snapshot
from tests.support.search_cases import assert_same

ISAS = instruction_sets()
FUZZ = int(os.environ.get("RECPRUNE_FUZZ", "0"))


@pytest.fixture
def shop(tmp_path: Path) -> Any:
    made = Shop(tmp_path / "shop", np.random.default_rng(0))
    yield made
    made.live.close()


@settings(max_examples=FUZZ // 100 or 40, derandomize=not FUZZ, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_items=st.sampled_from([0, 1, 63, 64, 65, 300, 1000]),
    shape=st.fixed_dictionaries(
        {
            "num_splits": st.sampled_from([8, 8, 4, 1, 3, 16]),
            "num_sub_items": st.sampled_from([2, 7, 20, 256, 300]),
            "has_bias": st.booleans(),
            "few_codes": st.booleans(),
            "ids": st.sampled_from([None, None, "integers", "strings"]),
            "layout": st.sampled_from(["auto", "full", "slim", "compact"]),
        }
    ),
)
def test_whatever_happens_answers_are_those_of_a_fresh_index(
    seed: int, num_items: int, shape: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(seed)
    if shape["num_sub_items"] > 256 and shape["layout"] == "compact":
        shape = shape | {"layout": "auto"}
    folder = tmp_path_factory.mktemp("live") / "shop"
    shop = Shop(folder, rng, num_items=num_items, **shape)
    methods = ["auto", "pqtopk"]
    narrow = shape["num_sub_items"] <= 256
    if narrow and shape["layout"] != "slim":
        methods.append("scan")
    if narrow and shape["layout"] != "compact" and shape["num_splits"] in (4, 8, 16):
        methods.append("cells")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(division, "_BLOCK", 16)
        for _ in range(12):
            what = rng.choice(
                [
                    *("add", "remove", "replace", "seal", "compact", "reopen", "few", "put"),
                    *("divide", "note"),
                ]
            )
            bits: dict[str, bool] = {
                name: bool(rng.integers(2)) for name in ("with_bias", "with_notes")
            }
            if what == "add":
                shop.add(int(rng.integers(0, 200)), **bits)
            elif what == "put":
                if shop.ids:
                    shop.put(int(rng.integers(0, 50)), **bits)
            elif what == "note":
                shop.note(int(rng.integers(0, 30)))
            elif what == "few":
                for _ in range(int(rng.integers(1, 6))):
                    shop.add(1)
                    shop.remove(1)
                    shop.replace(1)
            elif what in ("remove", "replace"):
                share = rng.choice([0.01, 0.3, 1.0]) if what == "remove" else 0.2
                getattr(shop, what)(int(share * len(shop.items)))
            else:
                getattr(shop, what)()
            patch.setenv("RECPRUNE_ISA", str(rng.choice(ISAS)))
            shop.check(tuple(methods))
    shop.live.close()


@pytest.mark.parametrize("isa", ISAS)
def test_large_segments_are_pruned_and_stay_exact(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells and scans with items that have left, behind floors that other segments have found."""
    monkeypatch.setenv("RECPRUNE_ISA", isa)
    rng = np.random.default_rng(7)
    embeddings = rng.standard_normal((8, 256, 4)).astype(np.float32)
    codes = rng.integers(0, 256, (60_000, 8)).astype(np.uint8)
    with LiveIndex.create(tmp_path / "shop", codes, embeddings, threads=2) as live:
        more = rng.integers(0, 256, (15_000, 8)).astype(np.uint8)
        live.add(more)
        live._rewrite(1, everything=False)
        live.add(more[:5000])
        assert [len(live.snapshot().segments), len(live.snapshot().tail)] == [2, 5000]
        live.remove(rng.permutation(80_000)[:4000])
        snapshot = live.snapshot()
        numbers = snapshot.numbers()
        present = snapshot.item_codes(numbers)
        for query in range(6):
            scores = (rng.standard_normal((8, 256)) * np.exp(rng.random((8, 1)))).astype(np.float32)
            # The best have left: a search that counts them stops too early.
            best, _ = reference.exhaustive(scores, present, 30)
            live.remove(numbers[best])
            numbers = np.delete(numbers, best)
            present = np.delete(present, best, axis=0)
            allow = rng.random(live.num_items) < 0.3
            for k in (1, 10, 100, 1000):
                places, totals = reference.exhaustive(scores, present, k)
                eligible = allow[numbers]
                some = reference.exhaustive(scores, present, k, eligible=eligible)
                for method in ("auto", "cells", "scan", "pqtopk"):
                    top = live.search_scores(scores, k, method=method)
                    assert_same(top, (numbers[places], totals), (query, k, method))
                    top = live.search_scores(scores, k, method=method, allow=allow)
                    assert_same(top, (numbers[some[0]], some[1]), (query, k, method, "allow"))


def test_batches_on_threads_with_a_mask_for_each_query(shop: Shop) -> None:
    rng = shop.rng
    shop.add(50)
    shop.seal()
    shop.add(70)
    shop.remove(30)
    live = shop.live
    phi = rng.standard_normal((9, live.width)).astype(np.float32)
    allow = rng.random((9, live.num_items)) < 0.5
    exclude = [rng.integers(0, live.num_items, 5) for _ in range(9)]
    numbers, codes, _ = shop.table()
    fresh = Index.build(codes, shop.embeddings)
    kept = [np.flatnonzero(np.isin(numbers, row)) for row in exclude]
    expected = fresh.search(phi, 7, allow=np.ascontiguousarray(allow[:, numbers]), exclude=kept)
    for threads in (1, 3):
        top = live.search(phi, 7, allow=allow, exclude=exclude, threads=threads)
        assert np.array_equal(top.ids, np.where(expected.ids < 0, -1, numbers[expected.ids]))
        assert np.array_equal(top.scores, expected.scores)
    some = numbers[[3, 0, 40]]
    assert np.array_equal(live.score(phi, some), fresh.score(phi, [3, 0, 40]))
    assert live.score(phi[0], some).shape == (3,)


def test_a_search_that_stops_early_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (60_000, 8)).astype(np.uint8)
    embeddings = rng.standard_normal((8, 256, 2)).astype(np.float32)
    with LiveIndex.create(tmp_path / "shop", codes[:40_000], embeddings) as live:
        live.add(codes[40_000:])
        live.remove([0])
        scores = rng.standard_normal((8, 256)).astype(np.float32)
        ids, totals = reference.exhaustive(scores, codes[1:], 10)
        top = live.search_scores(scores, 10, method=Scan(max_steps=2))
        assert not top.stats.exact[0]
        lost = np.setdiff1d(ids + 1, top.ids)
        best = totals[np.isin(ids + 1, lost)].max()
        assert best <= top.stats.upper_bound[0]
        whole = live.search_scores(scores, 10, method=Auto(deadline_us=1e9))
        assert whole.stats.exact[0]
        assert np.array_equal(whole.ids, ids + 1)


def test_a_snapshot_stays_as_it_was(shop: Shop) -> None:
    shop.add(40)
    told = Shop.__new__(Shop)
    shop.note(20)
    before = shop.live.snapshot()
    told.__dict__.update(shop.__dict__, items=dict(shop.items), notes=dict(shop.notes))
    shop.remove(60)
    shop.note(20)
    shop.replace(30)
    shop.compact()
    shop.add(10)
    shop.compact()
    shop.compact()
    check_snapshot(before, told, ("auto", "cells", "scan"))
    shop.check()


def test_it_can_be_asked_wherever_an_index_can(shop: Shop) -> None:
    asked: list[Searchable] = [
        shop.live,
        shop.live.snapshot(),
        Index.build(shop.table()[1], shop.embeddings),
    ]
    phi = shop.rng.standard_normal(shop.live.width).astype(np.float32)
    assert len({tuple(index.search(phi, 5).ids.tolist()) for index in asked}) == 1
    assert len({(index.num_items, index.num_splits, index.width) for index in asked}) == 1


def test_numbers_are_never_used_twice(shop: Shop) -> None:
    first = shop.live.add(shop.drawn(3)[0])
    shop.live.remove(first)
    shop.live.compact().result()
    with LiveIndex.open(shop.folder) as again:
        assert again.num_items == 103
        assert again.add(shop.drawn(1)[0]).tolist() == [103]
    shop.live.refresh()
    assert shop.live.add(shop.drawn(1)[0]).tolist() == [104]


def test_a_tail_that_is_full_becomes_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "FULL_TAIL", 200)
    shop = Shop(tmp_path / "shop", np.random.default_rng(1), num_items=3000)
    for _ in range(30):
        shop.add(90)
        shop.replace(2)
        shop.check()
        time.sleep(0.01)
    deadline = time.monotonic() + 20
    while len(shop.live.snapshot().tail) >= 200 and time.monotonic() < deadline:
        time.sleep(0.02)
        shop.live.maintain()
    snapshot = shop.live.snapshot()
    assert len(snapshot.tail) < 200
    assert len(snapshot.segments) <= 6
    assert shop.live.describe()["generation"] >= 2
    shop.check(("auto", "cells", "scan"))
    shop.reopen()
    shop.check()
    shop.live.close()
    assert len(list((tmp_path / "shop" / "generations").iterdir())) <= 2
    assert len(list((tmp_path / "shop" / "logs").iterdir())) <= 4


def test_an_empty_catalogue_fills_and_empties(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "shop", np.random.default_rng(2), num_items=0)
    for _ in range(2):
        shop.check()
        shop.add(5)
        shop.check()
        shop.compact()
        shop.remove(5)
        shop.check()
        shop.compact()
        shop.reopen()
    assert shop.live.num_items == 10
    assert shop.live.num_present == 0
    shop.live.close()


# What is refused ---------------------------------------------------------------------------------


def test_wrong_changes_are_refused_and_change_nothing(shop: Shop) -> None:
    live = shop.live
    codes = shop.drawn(2)[0]
    live.remove([7])
    wrong: list[tuple[list[Any], str]] = [
        ([7], r"ids\[0\] is 7: no such item is there"),
        ([3, 100], r"ids\[1\] is 100"),
        ([-1], r"ids\[0\] is -1"),
        ([3, 4, 3], "holds 3 twice"),
        ([1.5], "expected item numbers"),
        ([[1]], "expected item numbers"),
    ]
    for ids, message in wrong:
        with pytest.raises(InputError, match=message):
            live.remove(ids)
        with pytest.raises(InputError, match=message):
            live.replace(ids, shop.drawn(len(ids))[0])
    with pytest.raises(InputError, match="2 rows for 1 ids"):
        live.replace([1], codes)
    with pytest.raises(InputError, match=r"codes\[0, 0\] is 200, expected less than 20"):
        live.add(np.full((1, 8), 200, np.uint8))
    with pytest.raises(InputError, match="created without biases"):
        live.add(codes, np.zeros(2, np.float32))
    with pytest.raises(InputError, match="created without external ids"):
        live.add(codes, item_ids=["a", "b"])
    with pytest.raises(InputError, match="created without external ids"):
        live.find(["a"])
    with pytest.raises(InputError, match=r"ids\[0\] is 7: no such item"):
        live.score(np.zeros(live.width, np.float32), [7])
    live.remove([])
    assert len(live.add(codes[:0])) == 0
    assert (live.num_items, live.num_present, live.snapshot().sequence) == (100, 99, 1)


def test_external_ids_are_of_one_kind_and_there_once(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "shop", np.random.default_rng(5), num_items=3, ids="strings")
    live, codes = shop.live, shop.drawn(2)[0]
    known = live.external_ids([0])[0]
    for names, message in [
        (["a", "a"], r"item_ids\[1\] is 'a', which is there twice"),
        (["a", known], r"item_ids\[1\] is .*, which is there already"),
        (["a", 5], r"item_ids\[1\] is 5, expected one of strings"),
        (["a", "\ud800"], r"item_ids\[1\] is"),
        (["a"], "item_ids has 1 ids for 2 items"),
        ("ab", "item_ids is a str"),
        (None, "item_ids is missing"),
    ]:
        with pytest.raises(InputError, match=message):
            live.add(codes, item_ids=names)
    live.remove([0])
    assert live.add(codes, item_ids=["a", known]).tolist() == [3, 4]
    assert live.find([known, "a", "nothing", 7]).tolist() == [4, 3, -1, -1]  # type: ignore[list-item]
    assert live.external_ids([4, -1, 3]) == [known, None, "a"]
    live.close()


def test_methods_that_need_one_piece_are_refused(shop: Shop) -> None:
    phi = np.zeros(shop.live.width, np.float32)
    for method in ("default", "recjpqprune"):
        with pytest.raises(InputError, match=f"method {method} needs an index in one piece"):
            shop.live.search(phi, method=method)
    with pytest.raises(InputError, match="overflow"):
        shop.live.search_scores(np.full((8, 20), 1e38, np.float32))


def test_a_folder_with_anything_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    codes, embeddings = np.zeros((2, 2), np.uint8), np.zeros((2, 2, 1), np.float32)
    with pytest.raises(StorageError, match="already exists and is not empty"):
        LiveIndex.create(tmp_path / "full", codes, embeddings)
    with pytest.raises(StorageError, match="not a live index"):
        LiveIndex.open(tmp_path / "full")
    with pytest.raises(StorageError, match="not a live index"):
        LiveIndex.open(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    LiveIndex.create(tmp_path / "empty", codes, embeddings).close()
    with pytest.raises(StorageError, match="already exists and is not empty"):
        LiveIndex.create(tmp_path / "empty", codes, embeddings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]


def test_a_closed_index_changes_no_more(shop: Shop) -> None:
    shop.live.close()
    for change in (lambda: shop.live.remove([0]), shop.live.refresh, shop.live.compact):
        with pytest.raises(InputError, match="closed"):
            change()
    shop.check()  # what it knew, it knows


def test_an_item_is_put_once_and_then_replaced_if_that_is_said(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "shop", np.random.default_rng(2), ids="strings", num_items=3)
    live, codes = shop.live, shop.drawn(2)[0]
    there = shop.items[1][2]
    before = live.snapshot()
    with pytest.raises(InputError, match=r"item_ids\[1\] is .*, which is there already"):
        live.put(["new", there], codes)
    with pytest.raises(InputError, match=r"item_ids\[1\] is 'new', which is there twice"):
        live.put(["new", "new"], codes, replace=True)
    with pytest.raises(InputError, match="created without biases"):
        live.put(["new", "newer"], codes, [None, 0.5])
    assert live.snapshot() is before  # all or none
    assert live.put(["new", there], codes, replace=True).tolist() == [3, 1]
    live.close()
    with LiveIndex.open(shop.folder) as again:
        assert again.snapshot().sequence == 1  # one change, on disk as one
        assert np.array_equal(again.snapshot().item_codes([3, 1]), codes)
        assert again.external_ids([3, 1]) == ["new", there]
    nameless = Shop(tmp_path / "nameless", np.random.default_rng(2)).live
    with nameless, pytest.raises(InputError, match="created without external ids"):
        nameless.put([1], codes[:1])


def test_an_item_is_put_only_if_it_is_what_it_is_expected_to_be(tmp_path: Path) -> None:
    with Shop(tmp_path / "shop", np.random.default_rng(2), ids="strings", num_items=3).live as live:
        names = live.external_ids([0, 1])
        first, second = live.snapshot().item_codes([0, 1])
        other = (first + 1) % live.num_sub_items
        threefold = np.array([other] * 3)
        before = live.snapshot()
        cases: list[tuple[list[Any], int]] = [
            ([None, None, second], 0),  # it is there
            ([first, None, other], 2),  # has another code
            ([first, second, second], 1),  # is not there
        ]
        for expected, place in cases:
            with pytest.raises(ChangedItemError, match=rf"item_ids\[{place}\] is") as error:
                live.put([names[0], "new", names[1]], threefold, replace=True, expected=expected)
            assert error.value.external_id == [names[0], "new", names[1]][place]
        with pytest.raises(InputError, match="expected has 1 codes for 2 items"):
            live.put(names, threefold[:2], replace=True, expected=[None])
        assert live.snapshot() is before
        as_it_is = [first, None, second]
        live.put([names[0], "new", names[1]], threefold, replace=True, expected=as_it_is)
        assert live.snapshot().item_codes([0, 1, 3]).tolist() == threefold.tolist()


def test_what_others_change_while_an_item_is_put_is_seen(tmp_path: Path) -> None:
    """It is compared when nobody else can change it any more, by what is on the disk."""
    with Shop(tmp_path / "shop", np.random.default_rng(2), ids="strings", num_items=3).live as live:
        name: Any = live.external_ids([1])[0]
        code = live.snapshot().item_codes([1])
        live._stop_following()  # it does not know what others do
        with LiveIndex.open(live.folder) as elsewhere:
            elsewhere.remove([1])
        with pytest.raises(ChangedItemError):
            live.put([name], code, replace=True, expected=[code[0]])
        assert live.find([name]).tolist() == [-1]


@pytest.mark.parametrize("made_from", [None, "0f" * 32])
def test_what_it_was_made_from_stays_known(tmp_path: Path, made_from: str | None) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 4, (5, 2)).astype(np.uint8)
    vectors = rng.standard_normal((2, 4, 3)).astype(np.float32)
    with LiveIndex.create(tmp_path / "shop", codes, vectors, made_from=made_from) as live:
        live.add(codes)
        live.compact().result()
    with LiveIndex.open(tmp_path / "shop") as live:
        assert live.made_from == made_from
        assert live.origin == live.identity
    with LiveIndex.create(tmp_path / "next", codes, vectors, origin=live.origin) as following:
        following.add(codes)
        following.compact().result()
    with LiveIndex.open(tmp_path / "next") as following:
        assert following.identity != live.identity
        assert following.origin == live.identity
    with pytest.raises(InputError, match="origin is 'x', expected 32 hexadecimal digits"):
        LiveIndex.create(tmp_path / "other", codes, vectors, origin="x")
    if made_from is None:
        with pytest.raises(InputError, match="made_from is 'x', expected 64 hexadecimal digits"):
            LiveIndex.create(tmp_path / "other", codes, vectors, made_from="x")


# When work in the background fails ---------------------------------------------------------------


def short_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "FULL_TAIL", 64)


@pytest.mark.parametrize("error", [MemoryError("none left"), OSError(5, "I/O error")])
def test_what_fails_in_the_background_is_told_and_not_tried_at_once(
    shop: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    short_tail(monkeypatch)
    monkeypatch.setattr("recprune.live.live_index.merge", fail)
    shop.add(100)
    for _ in range(2000):
        if shop.live.fault is not None:
            break
        time.sleep(0.01)
    assert type(error).__name__ in shop.live.fault
    time.sleep(0.3)  # ten looks
    assert len(list((shop.folder / "logs").iterdir())) <= 3
    shop.check()


def test_a_generation_that_cannot_be_named_leaves_nothing_behind(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise StorageError("no room")

    shop.add(10)
    before = sorted((shop.folder / "segments").iterdir())
    monkeypatch.setattr("recprune.live.live_index.write_generation", fail)
    with pytest.raises(StorageError, match="no room"):
        shop.live.compact().result()
    assert sorted((shop.folder / "segments").iterdir()) == before
    monkeypatch.undo()
    shop.live.compact().result()
    shop.check()


def test_checksums_that_were_waived_stay_waived(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from recprune.live import generation, live_index

    asked = []
    load = generation.load_current

    def noted(*given: Any, **named: Any) -> Any:
        asked.append(named["verify"])
        return load(*given, **named)

    monkeypatch.setattr(live_index, "load_current", noted)
    with LiveIndex.open(shop.folder, verify=False) as reader:
        shop.add(10)
        shop.live.compact().result()
        for _ in range(300):
            if len(asked) > 1:
                break
            time.sleep(0.01)
        reader.refresh()
    assert asked[:2] == [False, False]


def test_a_torn_end_that_pretends_to_be_changes_is_refused_in_time(shop: Any) -> None:
    from recprune.live.change_log import _MARK, _RECORD

    shop.add(5)
    folder = shop.folder
    shop.live.close()
    [log] = sorted((folder / "logs").iterdir())[-1:]
    claim = _RECORD.pack(_MARK, 1, 200_000, 0, 99)
    with log.open("ab") as file:
        file.write(b"\x00" * 7 + claim * 40_000)
    with pytest.raises(StorageError, match="a damaged record"):  # not read for minutes
        LiveIndex.open(folder)
    with log.open("rb+") as file:
        file.truncate(log.stat().st_size - 7 - 40_000 * _RECORD.size)
    shop.live = LiveIndex.open(folder)
    shop.check()
