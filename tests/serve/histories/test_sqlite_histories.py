"""Histories in a SQLite file: flushed, and whole whatever happens to disk, folder and file."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from recprune.serve.histories.histories import Event, HistoriesUnavailableError, open_histories
from recprune.types import StorageError
from tests.support.histories_places import MOST, bought, opened

NOBODY = 65534


def test_sqlite_paths_are_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened("sqlite:///odd name?x=1%20é.db") as histories:
        histories.append(bought("ann", "a"))
    assert [path.name for path in tmp_path.iterdir()] == ["odd name?x=1%20é.db"]
    with opened(f"sqlite:///{tmp_path}/odd name?x=1%20é.db") as histories:
        assert histories.history("ann") == ["a"]


def test_what_users_had_is_for_nobody_else_to_read(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path}/histories.db") as histories:
        histories.append(bought("ann", "a"))
        files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        names = ["histories.db", "histories.db-shm", "histories.db-wal"]
        assert files == dict.fromkeys(names, 0o600)


def test_a_new_file_can_be_opened_by_many_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        for attempt in range(10):
            url = f"sqlite:///{tmp_path}/{attempt}.db"
            together = threading.Barrier(8)

            def write(thread: int, url: str = url, together: threading.Barrier = together) -> int:
                together.wait()
                with opened(url) as histories:
                    return histories.append([Event(f"user {thread}", "a", 1.0)])

            assert list(threads.map(write, range(8))) == [1] * 8
            with opened(url) as histories:
                assert all(histories.history(f"user {thread}") == ["a"] for thread in range(8))


def test_opening_waits_while_another_process_sets_the_file_up(tmp_path: Path) -> None:
    path = tmp_path / "histories.db"
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as other,
        ThreadPoolExecutor(1) as thread,
    ):
        other.execute("BEGIN IMMEDIATE")  # SQLite itself would not wait for this one
        opening = thread.submit(open_histories, f"sqlite:///{path}", MOST)
        with pytest.raises(TimeoutError):
            opening.result(timeout=0.2)
        other.execute("ROLLBACK")
        with closing(opening.result(timeout=20)) as histories:
            assert histories.append(bought("ann", "a")) == 1


def test_every_commit_reaches_the_disk(tmp_path: Path) -> None:
    """Power cannot be cut here: that the log is flushed is taken from the system calls."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace (Debian: apt install strace)")
    calls = tmp_path / "calls"
    code = (
        "import sys, os; from recprune.serve.histories.histories import Event, open_histories\n"
        "histories = open_histories(sys.argv[1], 5)\n"
        "for at in range(3):\n"
        "    os.write(2, b'append'); histories.append([Event('ann', 'a', 1.0)]); os.write(2, b'done')\n"
    )
    subprocess.run(
        [strace, "-f", "-y", "-e", "trace=write,pwrite64,fsync,fdatasync", "-o", str(calls),
         sys.executable, "-c", code, f"sqlite:///{tmp_path}/histories.db"],
        check=True, capture_output=True,
    )  # fmt: skip
    text = calls.read_text()
    appends = [part.split('"done"')[0] for part in text.split('"append"')[1:]]
    assert len(appends) == 3
    for append in appends:
        last = [line for line in append.splitlines() if "histories.db-wal" in line][-1]
        assert "sync(" in last, "the log's last write is followed by a flush"


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Let writes beyond `size` fail, as those to a full disk do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a small disk; the limit on file sizes is tested")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_file_that_cannot_grow_loses_nothing_and_recovers(tmp_path: Path) -> None:
    events = [Event("ann", f"item {at}", float(at), key=str(at)) for at in range(3000)]
    with opened(f"sqlite:///{tmp_path}/histories.db", most=5000) as histories:
        assert histories.append(events[:10]) == 10
        with files_no_larger_than(100_000):
            with pytest.raises(HistoriesUnavailableError, match="histories.db cannot be"):
                histories.append(events)
            assert histories.history("ann") == [f"item {at}" for at in range(10)]
            assert histories.append(events[:11]) == 1, "a small one still fits"
        assert histories.append(events) == 3000 - 11
        assert histories.history("ann") == [f"item {at}" for at in range(3000)]


def test_a_full_disk_loses_nothing_and_recovers(tmp_path: Path) -> None:
    with small_disk(tmp_path):
        filler = tmp_path / "filler"
        with opened(f"sqlite:///{tmp_path}/histories.db", most=5000) as histories:
            histories.append(bought("ann", "abc"))
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            kept = 0
            with suppress(HistoriesUnavailableError):
                while kept < 1000:  # the log may have room for a few
                    histories.append([Event("ann", "d", 9.0)])
                    kept += 1
            assert kept < 1000
            for call in (histories.ready, lambda: histories.append(bought("ann", "z"))):
                with pytest.raises(HistoriesUnavailableError, match="the disk is full"):
                    call()
            assert histories.history("ann") == list("abc") + ["d"] * kept
            with opened(f"sqlite:///{tmp_path}/histories.db") as later:  # opens all the same
                assert later.history("ann") == (list("abc") + ["d"] * kept)[-MOST:]
            filler.unlink()
            histories.ready()
            assert histories.append([Event("ann", "e", 10.0)]) == 1
            assert histories.history("ann")[-1] == "e"
        with closing(sqlite3.connect(tmp_path / "histories.db")) as plain:
            assert plain.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_locked_file_is_unavailable_until_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recprune.serve.histories.sqlite_histories.PATIENCE_S", 0.1)
    path = tmp_path / "histories.db"
    with opened(f"sqlite:///{path}") as histories:
        histories.append(bought("ann", "a"))
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(HistoriesUnavailableError, match="locked by another process"):
                histories.append(bought("ann", "b"))
            with pytest.raises(HistoriesUnavailableError, match="locked by another process"):
                histories.ready()
            assert histories.history("ann") == ["a"], "readers do not wait for writers"
            with opened(f"sqlite:///{path}") as second:  # also those that come later
                assert second.history("ann") == ["a"]
        histories.ready()
        assert histories.append([Event("ann", "b", 1.0)]) == 1
        assert histories.history("ann") == ["a", "b"]


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write anywhere, so be somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach, as pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="recprune-"))
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_folder_is_refused_at_once(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    with without_privileges(), pytest.raises(StorageError, match="must exist and be writable"):
        open_histories(f"sqlite:///{open_folder}/histories.db", MOST)
    assert list(open_folder.iterdir()) == []


def test_a_read_only_file_is_refused_at_once(open_folder: Path) -> None:
    path = open_folder / "histories.db"
    with opened(f"sqlite:///{path}") as histories:
        histories.append(bought("ann", "a"))
    path.chmod(0o444)
    open_folder.chmod(0o555)
    with (
        without_privileges(),
        pytest.raises(StorageError, match="histories.db (cannot be written|cannot be opened)"),
    ):
        open_histories(f"sqlite:///{path}", MOST)
    path.chmod(0o644)
    open_folder.chmod(0o755)
    with opened(f"sqlite:///{path}") as histories:
        assert histories.history("ann") == ["a"]


def test_a_missing_folder_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="folder must exist"):
        open_histories(f"sqlite:///{tmp_path}/nowhere/histories.db", MOST)
    with pytest.raises(StorageError, match="cannot be opened"):
        open_histories(f"sqlite:///{tmp_path}", MOST)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "histories.db"
    path.write_bytes(b"not a database, but somebody's letter. " * 100)
    with pytest.raises(StorageError, match="histories.db is not an SQLite database"):
        open_histories(f"sqlite:///{path}", MOST)
    assert path.read_bytes() == b"not a database, but somebody's letter. " * 100


def test_a_database_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE events (what TEXT)")
    before = path.read_bytes()
    with pytest.raises(StorageError, match="database of something else"):
        open_histories(f"sqlite:///{path}", MOST)
    assert path.read_bytes() == before


def test_histories_of_a_later_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "histories.db"
    with opened(f"sqlite:///{path}") as histories:
        histories.append(bought("ann", "a"))
    with closing(sqlite3.connect(path)) as later:
        later.execute("PRAGMA user_version = 2")
    with pytest.raises(StorageError, match="version 2, expected 1"):
        open_histories(f"sqlite:///{path}", MOST)


def test_a_file_that_is_damaged_meanwhile_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "histories.db"
    with opened(f"sqlite:///{path}", most=10_000) as histories:
        histories.append([Event(f"user {at}", "x" * 500, 1.0) for at in range(2000)])
    whole = path.read_bytes()
    with opened(f"sqlite:///{path}") as histories:
        path.write_bytes(whole[:8192] + b"\xff" * (len(whole) - 8192))
        with pytest.raises(HistoriesUnavailableError, match="is damaged"):
            histories.history("user 1000")
        path.write_bytes(whole)
        assert histories.history("user 1000") == ["x" * 500]
