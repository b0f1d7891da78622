"""The shards of a live index: each a part of it, and all of them at any moment that is asked for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import InputError, LiveIndex, LiveSnapshot, StorageError
from recprune.live import division, recent_moments
from recprune.live.change_log import append_record, log_path
from recprune.live.changes import Removal, encode
from recprune.live.division import WHOLE, Division
from recprune.live.generation import generation_folder
from recprune.live.live_index import MomentLostError
from recprune.live.number_runs import NumberRuns
from recprune.live.snapshot import Moment
from recprune.search.top_k import TopK
from recprune.storage import json_checksum
from tests.support.live_cases import Shop, check_snapshot


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "_BLOCK", 16)


@pytest.fixture
def shop(tmp_path: Path) -> Any:
    made = Shop(tmp_path / "shop", np.random.default_rng(0), has_bias=True, ids="strings")
    yield made
    made.live.close()


def opened(shop: Shop, num_shards: int) -> list[LiveIndex]:
    """Return the shards, none of which looks for changes by itself."""
    shards = [LiveIndex.open(shop.folder, shard=shard) for shard in range(num_shards)]
    for shard in shards:
        shard._stop_following()
    return shards


def own(whole: LiveSnapshot, shard: int) -> Any:
    """Return the numbers of the items of a shard."""
    numbers = whole.numbers()
    return numbers[whole.division.shards_of(numbers) == shard]


def assert_parts(parts: list[LiveSnapshot], whole: LiveSnapshot, rng: Any) -> None:
    """The parts have every item of the whole once, and the best of theirs are the best of all."""
    numbers = [part.numbers() for part in parts]
    assert np.array_equal(np.sort(np.concatenate(numbers)), whole.numbers())
    for part, own in zip(parts, numbers, strict=True):
        assert part.num_items == whole.num_items
        assert np.array_equal(part.item_codes(own), whole.item_codes(own))
        bias, expected = part.item_bias(own), whole.item_bias(own)
        assert bias is not None
        assert expected is not None
        assert np.array_equal(bias, expected)
    queries = rng.standard_normal((3, whole.width)).astype(np.float32)
    tops = [part.search(queries, 10) for part in parts]
    ids, scores = merged(tops)
    found = whole.search(queries, 10)
    assert np.array_equal(ids, found.ids)
    assert np.array_equal(scores.view(np.uint32), found.scores.view(np.uint32))


def merged(tops: list[TopK]) -> tuple[Any, Any]:
    """The best ten of several answers, by sorting all of them."""
    ids = np.concatenate([top.ids for top in tops], axis=1)
    scores = np.concatenate([top.scores for top in tops], axis=1)
    rows = [
        sorted(zip(-found, place, strict=True))[:10]
        for found, place in zip(scores, ids, strict=True)
    ]
    return (
        np.array([[place for _, place in row] for row in rows]),
        np.array([[-score for score, _ in row] for row in rows], np.float32),
    )


@pytest.mark.parametrize("seed", range(6))
def test_shards_answer_of_any_recent_moment_in_any_order(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shop = Shop(
        tmp_path / "shop",
        rng,
        num_items=int(rng.choice([0, 3, 200])),
        has_bias=True,
        few_codes=bool(seed % 2),
    )
    num_shards = int(rng.integers(2, 6))
    shop.live.compact(shards=num_shards).result()
    shards = opened(shop, num_shards)
    past = [shop.live.snapshot()]
    for _ in range(60):
        what = rng.choice(["add", "add", "remove", "replace", "seal", "compact", "look", "open"])
        if what == "add":
            shop.add(int(rng.integers(1, 60)))
        elif what in ("remove", "replace"):
            getattr(shop, what)(int(rng.integers(1, 8)))
        elif what == "look":
            shards[rng.integers(num_shards)].refresh()
        elif what == "open":  # one was lost; a new one knows nothing of what was before its log
            place = int(rng.integers(num_shards))
            shards[place] = opened(shop, num_shards)[place]
        else:  # a shard that has not looked for long goes on from the new log
            getattr(shop, what)()
        if what in ("open", "seal", "compact"):
            past.clear()
        past.append(shop.live.snapshot())
        check_snapshot(past[-1], shop, ("auto",))
        whole = past[rng.integers(len(past))]
        assert_parts([shard.at(whole.moment) for shard in shards], whole, rng)
    shop.live.close()


def test_a_shard_has_its_own_items_alone(shop: Shop) -> None:
    shop.add(100)
    shop.live.compact(shards=3).result()
    shop.add(100)
    shop.seal()
    sizes = [len(one.snapshot().numbers()) for one in opened(shop, 3)]
    assert sum(sizes) == 300
    assert max(sizes) < 120
    assert all(len(one.snapshot().segments) == 1 for one in opened(shop, 3))
    changes: list[Callable[[LiveIndex], object]] = [
        lambda one: one.remove([1]),
        lambda one: one.maintain(),  # which would sweep what it does not know
        lambda one: one.compact(),
    ]
    for change in changes:
        with pytest.raises(InputError, match="one shard is not changed"):
            change(opened(shop, 3)[0])
    for wrong in (3, -1):
        with pytest.raises(StorageError, match=f"has no shard {wrong}, but 3 shards"):
            LiveIndex.open(shop.folder, shard=wrong)
    shop.live.compact(shards=1).result()
    assert len(shop.live.snapshot().segments) == 1
    with pytest.raises(InputError, match="num_shards is 0, expected 1 to 256"):
        shop.live.compact(shards=0)


def test_a_moment_is_waited_for_and_then_refused(shop: Shop) -> None:
    shop.live.compact(shards=2).result()
    (shard, _) = opened(shop, 2)
    now = shop.live.snapshot().moment
    begun = time.monotonic()
    with pytest.raises(StorageError, match="asked for change 1, and has read 0"):
        shard.at(Moment(now.sequence + 1, 7), 0.2)
    assert time.monotonic() - begun >= 0.2
    shop.add(1)
    with pytest.raises(MomentLostError, match="change 1 is past, 1 was read"):
        shard.at(Moment(1, 7))  # of changes that never were
    assert shard.at(shop.live.snapshot().moment).sequence == 1


def test_moments_are_forgotten_after_a_while(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_moments, "_DENSE", 1)
    shop.live.compact(shards=2).result()
    shard = opened(shop, 2)[1]
    moments = []
    for _ in range(20):
        shop.add(1)
        moments.append(shop.live.snapshot().moment)
        shard.refresh()
    assert len(shard._moments._kept) < 5  # what is close together is read again
    assert all(shard.at(moment).moment == moment for moment in moments)
    monkeypatch.setattr(recent_moments, "_KEPT_SECONDS", -1.0)
    shop.add(1)
    shard.refresh()
    assert shard.at(shop.live.snapshot().moment).sequence == 21
    with pytest.raises(MomentLostError, match="change 20 is past, 21 was read"):
        shard.at(moments[-1])


def test_a_moment_that_is_kept_needs_no_log(shop: Shop) -> None:
    shop.live.compact(shards=2).result()
    shard = opened(shop, 2)[0]
    kept = []
    for _ in range(4):
        shop.add(20)
        kept.append(shop.live.snapshot())
        shard.refresh()
        shop.compact()
    for whole in reversed(kept):
        part = shard.at(whole.moment)
        assert np.array_equal(part.numbers(), own(whole, 0))


def test_changes_that_were_never_acknowledged_are_a_moment_of_their_own(shop: Shop) -> None:
    shop.live.compact(shards=2).result()
    shop.add(3)
    shards = opened(shop, 2)
    tip = shop.live._tip
    append_record(shop.folder, tip, *encode(Removal(np.array([1], np.uint32))))
    for shard in shards:
        shard.refresh()
    unwritten = shards[0].snapshot().moment
    os.truncate(log_path(shop.folder, tip.log), tip.offset)  # its writer could not flush it
    shop.remove(2)
    now = shop.live.snapshot()
    assert unwritten.sequence == now.sequence
    parts = [shard.at(now.moment, 5.0) for shard in shards]
    assert_parts(parts, now, shop.rng)


def test_another_division_is_another_set_of_shards(shop: Shop) -> None:
    shop.live.compact(shards=2).result()
    shards = opened(shop, 2)
    shop.add(50)
    shop.live.compact(shards=3).result()
    shop.add(50)
    # As long as the logs are there, changes are followed over what there was.
    whole = shop.live.snapshot()
    assert_parts([shard.at(whole.moment) for shard in shards], whole, shop.rng)
    with pytest.raises(StorageError, match="was divided anew"):
        shards[0]._take_newest()
    shop.add(1)
    shop.compact()
    shop.add(1)
    shop.compact()
    with pytest.raises(StorageError, match="was divided anew; open its shards anew"):
        shards[0].at(shop.live.snapshot().moment)


def test_every_number_has_one_shard_and_runs_are_held_against_it() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        num_items, num_shards = int(rng.integers(0, 100)), int(rng.integers(1, 7))
        made = Division.even(num_items, num_shards)
        assert made == WHOLE if num_shards == 1 else made.num_shards == num_shards
        numbers = np.arange(200, dtype=np.uint32)
        owners = made.shards_of(numbers)
        assert set(owners) <= set(range(num_shards))
        sizes = np.bincount(owners[:num_items], minlength=num_shards)
        assert sizes.max() - sizes.min() <= 1 or num_shards == 1
        for shard in range(num_shards):
            made.check(NumberRuns.of(numbers[owners == shard]), shard)
        chosen = np.unique(rng.integers(0, 200, 40)).astype(np.uint32)
        some = np.unique(np.concatenate([chosen + step for step in range(rng.integers(1, 30))]))
        some = some[some < 200].astype(np.uint32)
        shard = int(rng.integers(num_shards))
        if (made.shards_of(some) == shard).all():
            made.check(NumberRuns.of(some), shard)
        else:
            with pytest.raises(StorageError, match="do not all belong to shard"):
                made.check(NumberRuns.of(some), shard)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("cuts", [0, 60, 50, 100], "cuts are not those of"),
        ("cuts", [1, 50, 70, 100], "cuts are not those of"),
        ("cuts", [0, 50, 70, 101], "cuts are not those of"),
        ("cuts", [0, 50, True, 100], "cuts are not those of"),
        ("cuts", [0, 34, 66, 100], "do not all belong to shard"),
        ("cuts", "0", "cuts are not those of"),
        ("shards", [0, 1, 1], "does not name each of 3"),
        ("shards", [0, 1, 3], "does not name each of 3"),
        ("shards", [0, 1], "does not name each of 3"),
        ("shards", None, "does not name each of 3"),
        ("shards", [1, 0, 2], "do not all belong to shard"),
    ],
)
def test_what_a_stranger_says_of_shards_is_checked(
    shop: Shop, name: str, value: object, said: str
) -> None:
    shop.live.compact(shards=3).result()
    path = generation_folder(shop.folder, 1) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["settings"][name] = value
    del manifest["sha256"]
    manifest["sha256"] = json_checksum(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match=said):
        LiveIndex.open(shop.folder)
    if said.startswith("do not"):
        with pytest.raises(StorageError, match=said):
            LiveIndex.open(shop.folder, shard=1)
