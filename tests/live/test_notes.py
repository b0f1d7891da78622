"""What is said of items comes, changes and goes with them, and is never more than a JSON object."""

from __future__ import annotations

import json
import threading
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import InputError, LiveIndex, StorageError
from recprune.live.change_log import append_record
from recprune.live.changes import Noting, encode
from recprune.live.generation import current_number, generation_folder
from recprune.live.notes import MOST_NOTE_BYTES, Notes, SavedNotes
from recprune.storage import read_manifest
from recprune.types import Json
from tests.support.live_cases import Shop


@pytest.fixture
def shop(tmp_path: Path) -> Any:
    made = Shop(tmp_path / "shop", np.random.default_rng(0), ids="strings")
    yield made
    made.live.close()


def version_of(shop: Shop) -> int:
    place = generation_folder(shop.folder, current_number(shop.folder))
    return int(read_manifest(place, "generation")["version"])


def test_notes_stay_with_their_items_until_these_leave(shop: Shop) -> None:
    codes = shop.drawn(3)[0]
    added = shop.live.add(codes, item_ids=["a", "b", "c"], notes=[{"name": "é"}, None, {}])
    a, b, c = added.tolist()
    shop.live.replace([a], codes[:1])
    put = shop.live.put(["a", "b"], codes[:2], replace=True, notes=[None, {"name": "b"}])
    assert put.tolist() == [a, b]
    expected: dict[int, Json] = {a: {"name": "é"}, b: {"name": "b"}, c: {}}
    notes = shop.live.snapshot().notes
    assert dict(notes) == expected
    assert [a in notes, 0 in notes, -1 in notes, len(notes)] == [True, False, False, 3]
    notes[a]["name"] = "other"  # of what was returned
    assert notes[a] == {"name": "é"}
    shop.live.note([a, b], [None, {"name": "B"}])
    shop.live.remove([c])
    assert dict(shop.live.snapshot().notes) == {b: {"name": "B"}}
    assert dict(notes) == expected  # a snapshot's never change
    shop.live.put(["c"], codes[:1])  # another item of the same id
    assert dict(shop.live.snapshot().notes) == {b: {"name": "B"}}


def test_a_catalogue_is_of_an_older_format_as_long_as_nothing_is_said(shop: Shop) -> None:
    shop.add(3)
    shop.compact()
    assert version_of(shop) == 1
    shop.live.compact(shards=2).result()
    assert version_of(shop) == 2
    shop.note(3)
    shop.live.note([5], [{"x": 1}])
    shop.compact()
    assert version_of(shop) == 3
    with LiveIndex.open(shop.folder, shard=1) as part:  # which only searches
        assert not part.snapshot().notes
    shop.live.note([*shop.live.snapshot().notes], lambda *_: None)
    shop.compact()
    assert version_of(shop) == 2


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ([{}], r"notes has 1 objects for 2 items"),
        ({1: {}}, r"notes is a dict, expected a sequence or a function"),
        ("ab", r"notes\[0\] is a str, expected an object of JSON, or None"),
        ([{}, "text"], r"notes\[1\] is a str, expected an object of JSON, or None"),
        ([{}, {"x": {1, 2}}], r"notes\[1\] cannot be written as JSON: .*set"),
        ([{}, {"x": float("nan")}], r"notes\[1\] cannot be written as JSON"),
        ([{}, {"x": "\ud800"}], r"notes\[1\] cannot be written as JSON"),
        ([{}, {"x": "é" * 9000}], r"notes\[1\] has 18,008 bytes, expected at most 16,384"),
    ],
)
def test_what_is_no_note_is_refused_and_changes_nothing(
    shop: Shop, notes: Any, message: str
) -> None:
    before = shop.live.snapshot()
    codes = shop.drawn(2)[0]
    with pytest.raises(InputError, match=message):
        shop.live.note([1, 2], notes)
    with pytest.raises(InputError, match=message):
        shop.live.put(["a", "b"], codes, notes=notes)
    with pytest.raises(InputError, match=message):
        shop.live.add(codes, item_ids=["a", "b"], notes=notes)
    assert shop.live.snapshot() is before


def test_a_note_of_no_item_is_refused(shop: Shop) -> None:
    shop.live.remove([5])
    for ids, message in (([5], "5"), ([100], "100"), ([1, 1], "ids holds 1 twice")):
        with pytest.raises(InputError, match=message):
            shop.live.note(ids, [{}] * len(ids))


def test_what_two_writers_make_of_a_note_is_not_lost(shop: Shop) -> None:
    def count(live: LiveIndex) -> None:
        for _ in range(20):
            live.note([7], lambda _, said: {"count": (said or {"count": 0})["count"] + 1})

    with LiveIndex.open(shop.folder) as other:
        writers = [threading.Thread(target=count, args=(live,)) for live in (shop.live, other)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        other.refresh()
        assert dict(other.snapshot().notes) == {7: {"count": 40}}


def test_what_has_changed_between_two_moments_is_known(shop: Shop) -> None:
    moments: list[tuple[Notes, dict[int, Json]]] = []
    for turn in range(40):
        for _ in range(int(shop.rng.integers(1, 4))):
            shop.note(int(shop.rng.integers(1, 9)))
        if turn % 7 == 3:
            shop.remove(2)
            shop.add(4, with_notes=True)
        if turn % 11 == 5:
            shop.compact()
        moments.append((shop.live.snapshot().notes, dict(shop.notes)))
    for notes, expected in moments:
        assert dict(notes) == expected
        for before, said in moments[::5]:
            differing = sorted(
                number
                for number in expected.keys() | said.keys()
                if expected.get(number) != said.get(number)
            )
            assert notes.changed_since(before) == differing


def test_notes_of_many_changes_are_saved_as_they_are() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        saved, expected = SavedNotes.checked({}, 0), dict[int, bytes]()
        for _ in range(3):
            numbers = rng.choice(30, rng.integers(0, 20), replace=False).tolist()
            changes = {
                number: None if rng.random() < 0.3 else b'{"x":%d}' % rng.integers(10**9)
                for number in numbers
            }
            expected |= {number: text for number, text in changes.items() if text is not None}
            expected = {n: text for n, text in expected.items() if changes.get(n, text) is not None}
            saved = saved.changed(changes)
            assert list(saved.texts()) == sorted(expected.items())
            assert saved.has(np.arange(30, dtype=np.uint32)).tolist() == [
                number in expected for number in range(30)
            ]


def test_saving_notes_takes_the_memory_of_one_copy() -> None:
    text = b'{"x":"' + b"y" * 1000 + b'"}'
    count = 8_000
    notes = Notes(SavedNotes.checked({}, 0).changed(dict.fromkeys(range(count), text)))
    tracemalloc.start()
    try:
        saved = notes.changed({17: b"{}"}).saved()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert saved.text(17) == b"{}"
    assert peak < 2 * count * len(text)


def test_a_note_is_copied_a_number_of_times_that_hardly_grows() -> None:
    """Notes of one item each: as many layers as a number has digits, and all are still found."""
    notes = Notes()
    for number in range(3_000):
        notes = notes.changed({number: b"{}"})
    assert len(notes) == 3_000
    assert len(notes._layers) < 15
    assert all(number in notes for number in range(3_000))


# Strangers ---------------------------------------------------------------------------------------


BAD_TEXTS = [
    b"[]", b"1", b'"x"', b"{", b"{}x", b'{"x": NaN}', b'{"x": -Infinity}', b'{"x": "\xff"}', b"null",
    b'{"x": "\\ud800"}', b'{"x":' * 3000, b'{"x":"' + b"y" * MOST_NOTE_BYTES + b'"}',
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_what_is_no_note_is_not_opened(shop: Shop, text: bytes) -> None:
    shop.live.close()
    kind, content = encode(Noting(np.array([3], np.uint32), [text]))
    append_record(shop.folder, shop.live._tip, kind, content)
    with pytest.raises(StorageError, match="an impossible change: a note"):
        LiveIndex.open(shop.folder)
    arrays = SavedNotes(
        np.array([3], np.uint32), np.array([0, len(text)]), np.frombuffer(text, np.uint8)
    ).to_arrays()
    with pytest.raises(StorageError, match="a note"):
        SavedNotes.checked(arrays, 100)


@pytest.mark.parametrize("numbers", [[100], [5], [2, 2], [2**32 - 1]])
def test_a_note_of_an_item_that_is_not_there_is_not_opened(shop: Shop, numbers: list[int]) -> None:
    shop.live.remove([5])
    shop.live.close()
    texts = [b"{}"] * len(numbers)
    kind, content = encode(Noting(np.array(numbers, np.uint32), texts))
    append_record(shop.folder, shop.live._tip, kind, content)
    with pytest.raises(StorageError, match="an impossible change"):
        LiveIndex.open(shop.folder)


def test_records_of_strangers_are_read_or_refused(shop: Shop) -> None:
    """Bytes of a change with notes are changed, before its checksums are made."""
    records: list[tuple[int, bytes]] = []

    def taken(folder: Path, tip: Any, kind: int, content: bytes) -> Any:
        records.append((kind, content))
        return append_record(folder, tip, kind, content)

    codes = shop.drawn(3)[0]
    tip = shop.live._tip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recprune.live.live_index.append_record", taken)
        names = ["a", "b", shop.items[3][2]]
        shop.live.put(names, codes, replace=True, notes=[{"x": 1}, None, {"é": "ü"}])
        shop.live.note([3, 100], [None, {"x": 2}])
    shop.live.close()
    rng = np.random.default_rng(2)
    opened = 0
    for turn in range(400):
        kind, content = records[turn % 2]
        changed = bytearray(content)
        place = int(rng.integers(len(changed)))
        changed[place] = int(rng.choice([changed[place] ^ (1 << int(rng.integers(8))), 0, 255, 34]))
        following = tip
        if kind == records[1][0]:
            following = append_record(shop.folder, tip, *records[0])
        append_record(shop.folder, following, kind, bytes(changed))
        with suppress(StorageError), LiveIndex.open(shop.folder) as live:
            snapshot = live.snapshot()
            assert {*snapshot.notes} <= {*snapshot.numbers().tolist()}
            json.dumps(dict(snapshot.notes), ensure_ascii=False, allow_nan=False).encode()
            opened += 1
    assert 20 < opened < 380


def saved_arrays() -> dict[str, Any]:
    pool = b'{"x":1}{}{"y":2}'
    return {
        "note_numbers": np.array([3, 4, 9], np.uint32),
        "note_offsets": np.array([0, 7, 9, 16]),
        "note_pool": np.frombuffer(pool, np.uint8),
    }


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("note_numbers", np.array([3, 3, 9], np.uint32)),
        ("note_numbers", np.array([4, 3, 9], np.uint32)),
        ("note_numbers", np.array([3, 4, 10], np.uint32)),
        ("note_numbers", np.array([3, 4, 9])),
        ("note_numbers", np.array([[3, 4, 9]], np.uint32)),
        ("note_offsets", np.array([0, 7, 9])),
        ("note_offsets", np.array([1, 7, 9, 16])),
        ("note_offsets", np.array([0, 7, 9, 15])),
        ("note_offsets", np.array([0, 7, 2**62, 16])),
        ("note_offsets", np.array([0, 9, 7, 16])),
        ("note_offsets", np.array([0, 6, 9, 16])),
        ("note_offsets", np.array([], np.int64)),
        ("note_pool", np.frombuffer(b'{"x":1}{}{"y":2', np.uint8)),
        ("note_pool", np.frombuffer(b'{"x":1}{}{"y":2}', np.int8)),
        ("note_pool", None),
        ("note_numbers", None),
    ],
)
def test_arrays_that_are_no_notes_are_refused(name: str, array: Any) -> None:
    arrays = saved_arrays()
    assert dict(Notes(SavedNotes.checked(arrays, 10))) == {3: {"x": 1}, 4: {}, 9: {"y": 2}}
    del arrays[name]
    if array is not None:
        arrays[name] = array
    with pytest.raises(StorageError, match="note"):
        SavedNotes.checked(arrays, 10)
