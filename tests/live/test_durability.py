"""What was acknowledged is there, whatever happened to the process, the file or the disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import LiveIndex, StorageError
from recprune.live import live_index
from recprune.live.change_log import append_record, log_path
from recprune.live.changes import Removal, encode
from recprune.live.file_lock import LockedError, locked
from tests.support.live_cases import Shop
from tests.support.live_writer import (
    NUM_SPLITS,
    NUM_SUB_ITEMS,
    catalogue_after,
    first_codes,
)
from tests.support.small_disk import small_disk

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shop(tmp_path: Path) -> Any:
    made = Shop(tmp_path / "shop", np.random.default_rng(0))
    yield made
    made.live.close()


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    """Start processes that write; returns their ids."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.support.live_writer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    given, told = program.stdin, program.stdout

    def start_one(*words: object) -> int:
        given.write(" ".join(map(str, words)) + "\n")
        given.flush()
        return int(told.readline())

    yield start_one
    given.close()
    program.wait(30)
    told.close()


def create(folder: Path) -> None:
    embeddings = np.random.default_rng(1).standard_normal((NUM_SPLITS, NUM_SUB_ITEMS, 2))
    LiveIndex.create(folder, first_codes(), embeddings.astype(np.float32)).close()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_killed_writer_loses_nothing_and_leaves_no_half_change(
    tmp_path: Path, start: Callable[..., int]
) -> None:
    folder, notes = tmp_path / "shop", tmp_path / "notes"
    create(folder)
    rng = random.Random(0)
    before = 0
    for _ in range(24):
        process = start("forever", folder, notes)
        wait_for(partial(_is_past, notes, before))
        time.sleep(rng.random() * 0.15)
        os.kill(process, signal.SIGKILL)
        wait_for(partial(_is_gone, process))
        acknowledged = _acknowledged(notes)
        with LiveIndex.open(folder) as live:
            snapshot = live.snapshot()
            assert acknowledged <= snapshot.sequence <= acknowledged + 1
            numbers = snapshot.numbers()
            codes = snapshot.item_codes(numbers)
            found = {
                number: (code.tobytes(), snapshot.notes.get(number, {}).get("said"))
                for number, code in zip(numbers.tolist(), codes, strict=True)
            }
            assert found == catalogue_after(snapshot.sequence)
        before = snapshot.sequence
    assert before > 100
    with LiveIndex.open(folder) as live:  # what was given up half written is swept
        live.remove(live.snapshot().numbers()[:1])
        live.compact().result()
        live.remove(live.snapshot().numbers()[:1])
        live.compact().result()
    for name, most in (("segments", 2), ("generations", 2), ("logs", 2)):
        assert len(list((folder / name).iterdir())) <= most, name


def _is_past(notes: Path, changes: int) -> bool:
    return notes.exists() and _acknowledged(notes) > changes


def _is_gone(process: int) -> bool:
    return not is_running(process)


def _acknowledged(notes: Path) -> int:
    lines = notes.read_text().split("\n")[:-1]
    return int(lines[-1]) if lines else 0


def test_two_processes_write_at_once(tmp_path: Path, start: Callable[..., int]) -> None:
    folder = tmp_path / "shop"
    create(folder)
    with LiveIndex.open(folder) as reader:
        processes = [start("some", folder, tmp_path / f"notes-{who}", who) for who in range(3)]
        wait_for(lambda: reader.num_items == 700)  # which it sees without being asked to look
        wait_for(lambda: not any(map(is_running, processes)))
        lines = "".join((tmp_path / f"notes-{who}").read_text() for who in range(3)).split("\n")
        noted = {int(line.split()[0]): int(line.split()[1]) for line in lines if line}
        assert sorted(noted) == list(range(400, 700))
        codes = reader.snapshot().item_codes(sorted(noted))
        assert codes[:, 0].tolist() == [noted[number] for number in sorted(noted)]


def test_others_see_a_change_soon(shop: Shop) -> None:
    with LiveIndex.open(shop.folder) as reader:
        for _ in range(5):
            shop.add(3)
            shop.remove(1)
            wait_for(lambda: reader.snapshot().sequence == shop.live.snapshot().sequence, 1)
        shop.compact()
        shop.add(1)
        wait_for(lambda: reader.snapshot().sequence == shop.live.snapshot().sequence, 1)
        wait_for(lambda: reader.describe()["generation"] == 1, 5)
        assert len(reader.snapshot().segments) == 1
        shop.live, mine = reader, shop.live
        shop.check()
        shop.live = mine
        assert reader.fault is None


# Damage ------------------------------------------------------------------------------------------


def last_record(shop: Shop) -> tuple[Path, int, int]:
    """Make a last change; return its file, and where its record begins and ends."""
    begin = shop.live._tip.offset
    shop.live.remove([0])
    return log_path(shop.folder, shop.live._tip.log), begin, shop.live._tip.offset


@pytest.mark.parametrize("rest", ["nothing", "zeros", "noise"])
def test_what_is_said_of_an_item_is_cut_off_with_it(tmp_path: Path, rest: str) -> None:
    """An item that is added or replaced and its note are there both, or neither."""
    shop = Shop(tmp_path / "shop", np.random.default_rng(0), ids="strings", num_items=30)
    known = shop.items[3][2]
    shop.live.note([3], [{"name": "old"}])
    begin = shop.live._tip.offset
    codes = shop.drawn(2)[0]
    shop.live.put(["é", known], codes, replace=True, notes=[{"name": "hat"}, {"name": "new"}])
    path = log_path(shop.folder, shop.live._tip.log)
    shop.live.close()
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    for length in range(begin, len(whole)):
        missing = len(whole) - length
        filler = {"nothing": b"", "zeros": bytes(missing), "noise": rng.bytes(missing)}[rest]
        path.write_bytes(whole[:length] + filler)
        with LiveIndex.open(shop.folder) as live:
            snapshot = live.snapshot()
            assert (snapshot.num_items, dict(snapshot.notes)) == (30, {3: {"name": "old"}})
            assert np.array_equal(snapshot.item_codes([3])[0], shop.items[3][0])
    path.write_bytes(whole)
    with LiveIndex.open(shop.folder) as live:
        snapshot = live.snapshot()
        assert dict(snapshot.notes) == {3: {"name": "new"}, 30: {"name": "hat"}}
        assert np.array_equal(snapshot.item_codes([30, 3]), codes)


@pytest.mark.parametrize("rest", ["nothing", "zeros", "noise"])
def test_a_record_that_was_cut_short_is_cut_off(shop: Shop, rest: str) -> None:
    shop.add(3)
    path, begin, end = last_record(shop)
    shop.live.close()
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for length in range(begin, end):
        missing = end - length
        filler = {"nothing": b"", "zeros": bytes(missing), "noise": rng.bytes(missing)}[rest]
        path.write_bytes(whole[:length] + filler)
        with LiveIndex.open(shop.folder) as live:
            assert (live.snapshot().sequence, live.num_present) == (1, 103)
            live.remove([5, 6])
            assert live.num_present == 101
        with LiveIndex.open(shop.folder) as live:
            assert (live.snapshot().sequence, live.num_present) == (2, 101)
            assert 0 in live.snapshot().numbers()


def test_nothing_is_left_of_what_was_cut_short(shop: Shop) -> None:
    path, begin, end = last_record(shop)
    with path.open("ab") as file:
        file.write(b"half a record, and a long one" * 100)
    shop.live.remove([1])
    assert path.stat().st_size == 2 * end - begin == shop.live._tip.offset


def test_a_changed_byte_is_found_wherever_it_is(shop: Shop) -> None:
    shop.add(2, with_notes=True)
    shop.replace(1)
    path, begin, _ = last_record(shop)
    shop.live.close()
    whole = path.read_bytes()
    refused = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        if place >= begin:  # as if it had never been written whole
            with LiveIndex.open(shop.folder) as live:
                assert live.snapshot().sequence == 2
            continue
        with pytest.raises(StorageError, match=str(path)):
            LiveIndex.open(shop.folder)
        refused += 1
    assert refused == begin
    path.write_bytes(whole)
    current = shop.folder / "CURRENT"
    text = current.read_bytes()
    for place in range(len(text) - 1):
        damaged = bytearray(text)
        damaged[place] ^= 1
        current.write_bytes(damaged)
        with pytest.raises(StorageError, match="CURRENT"):
            LiveIndex.open(shop.folder)


def test_records_of_another_catalogue_are_refused(shop: Shop, tmp_path: Path) -> None:
    other = Shop(tmp_path / "other", np.random.default_rng(1))
    other.add(1)
    other.live.close()
    shop.live.close()
    path = log_path(shop.folder, 0)
    own = path.read_bytes()
    shutil.copy(log_path(other.folder, 0), path)
    with pytest.raises(StorageError, match="a log of another catalogue"):
        LiveIndex.open(shop.folder)
    # With the right head, and changes that another history has made.
    path.write_bytes(own + log_path(other.folder, 0).read_bytes()[len(own) :] * 2)
    with pytest.raises(StorageError, match="change 1, which does not follow change 1"):
        LiveIndex.open(shop.folder)


def test_a_change_follows_the_one_that_was_before_it(shop: Shop, tmp_path: Path) -> None:
    """The second change of a copy, behind another first one: both are whole, and of the catalogue."""
    shop.live.close()
    shutil.copytree(shop.folder, tmp_path / "copy")
    whole = []
    for folder, number in ((shop.folder, 1), (tmp_path / "copy", 2)):
        with LiveIndex.open(folder) as live:
            live.remove([number])
            end = live._tip.offset
            live.remove([3])
        whole.append(log_path(folder, 0).read_bytes())
    log_path(shop.folder, 0).write_bytes(whole[0][:end] + whole[1][end:])
    with pytest.raises(StorageError, match="change 2, which does not follow change 1"):
        LiveIndex.open(shop.folder)


@pytest.mark.parametrize("ids", [[0, 0], [5], [100], [2**32 - 70]])
def test_a_change_that_cannot_be_is_refused(shop: Shop, ids: list[int]) -> None:
    shop.live.remove([5])
    shop.live.close()
    kind, content = encode(Removal(np.array(ids, np.uint32)))
    append_record(shop.folder, shop.live._tip, kind, content)
    with pytest.raises(StorageError, match="byte .*: an impossible change"):
        LiveIndex.open(shop.folder)


@pytest.mark.parametrize("content", [b"", bytes(15), bytes(8) + b"\xff" * 8, bytes(17)])
@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 5, 6, 7])
def test_content_of_a_wrong_size_is_refused(shop: Shop, kind: int, content: bytes) -> None:
    shop.live.close()
    append_record(shop.folder, shop.live._tip, kind, content)
    with pytest.raises(StorageError, match="byte .*: an impossible change"):
        LiveIndex.open(shop.folder)


@pytest.mark.parametrize("instead", ["nothing", "as long", "longer", "as long, and more"])
def test_a_reader_that_saw_what_was_never_acknowledged_sees_the_right_thing(
    shop: Shop, instead: str
) -> None:
    shop.add(3)
    with LiveIndex.open(shop.folder) as reader:
        tip = shop.live._tip
        kind, content = encode(Removal(np.array([1], np.uint32)))
        append_record(shop.folder, tip, kind, content)  # and its writer could not flush it
        reader.refresh()
        assert reader.num_present == 102
        os.truncate(log_path(shop.folder, tip.log), tip.offset)
        if instead == "longer":
            shop.add(1)
        elif instead != "nothing":
            shop.remove(1)
        if "more" in instead:
            shop.add(2)
        reader.refresh()
        shop.live, mine = reader, shop.live
        shop.check()
        shop.live = mine
        assert reader.fault is None


def test_a_reader_whose_logs_are_gone_begins_anew(shop: Shop) -> None:
    with LiveIndex.open(shop.folder) as reader:
        reader._stop_following()  # it does not look by itself
        for _ in range(3):
            shop.add(4)
            shop.remove(2)
            shop.compact()
        shop.add(1)
        assert reader.num_items == 100
        reader.refresh()
        assert reader.snapshot().sequence == shop.live.snapshot().sequence
        assert reader.add(shop.drawn(1)[0]).tolist() == [113]


# While others work -------------------------------------------------------------------------------


def test_nothing_is_lost_while_it_is_compacted(shop: Shop) -> None:
    stop = threading.Event()

    def compact() -> None:
        while not stop.is_set():
            shop.live.compact().result()

    compactor = threading.Thread(target=compact)
    compactor.start()
    for _ in range(60):
        shop.add(7)
        shop.remove(3)
        shop.replace(3)
        shop.check()
    stop.set()
    compactor.join()
    assert shop.live.describe()["generation"] > 2
    shop.check()
    shop.reopen()
    shop.check()


def test_it_can_be_opened_while_it_is_compacted(shop: Shop) -> None:
    """What a process is just opening may be swept: then it begins anew."""
    stop = threading.Event()

    def compact() -> None:
        while not stop.is_set():
            shop.live.remove(shop.live.snapshot().numbers()[:1])
            shop.live.add(shop.drawn(1)[0])
            shop.live.compact().result()

    compactor = threading.Thread(target=compact)
    compactor.start()
    try:
        for _ in range(40):
            before = shop.live.snapshot().sequence
            with LiveIndex.open(shop.folder) as live:
                assert live.snapshot().sequence >= before
                assert live.num_present in (99, 100)
    finally:
        stop.set()
        compactor.join()


def test_a_long_log_is_left_behind(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_index, "_LONG_LOG", 1000)
    for _ in range(60):  # though the tail never fills up
        shop.replace(1)
    wait_for(lambda: shop.live.describe()["generation"] > 0)
    shop.live.maintain()
    shop.check()
    shop.reopen()
    shop.check()
    logs = list((shop.folder / "logs").iterdir())
    assert sum(path.stat().st_size for path in logs) < 60 * 60


def test_a_writer_that_holds_the_lock_too_long_is_named(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "LOCK", 1),
        pytest.raises(LockedError, match="LOCK: held by another process for 0.05 s"),
        locked(tmp_path / "LOCK", 0.05),
    ):
        pass
    with locked(tmp_path / "LOCK", 0):
        pass


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        shop = Shop(disk.place / "shop", np.random.default_rng(4))
        shop.add(20)
        path = log_path(shop.folder, 0)
        size = path.stat().st_size
        with disk.full():
            codes = shop.drawn(5000)[0]
            with pytest.raises(StorageError, match=r"00000000\.log: cannot be written: No space"):
                shop.live.add(codes)
            assert path.stat().st_size == size
            with pytest.raises(StorageError, match="cannot be written: No space"):
                shop.live.compact().result()
            shop.check()
        shop.add(30)
        shop.compact()
        shop.check()
        shop.reopen()
        shop.check()
        shop.live.close()
