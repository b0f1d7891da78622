"""Histories in one SQLite file, shared by the worker processes of a machine.

Write-ahead log with `synchronous=FULL`: a commit returns when the log is on the disk, so what was
acknowledged survives `kill -9` and a power cut, and readers never wait for a writer. The file must
be on a local disk: network file systems do not lock well enough.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from recprune.serve.histories.histories import (
    PATIENCE_S,
    Event,
    HistoriesUnavailableError,
    check_text,
    keys_kept,
)
from recprune.types import StorageError

_APPLICATION_ID = 0x72707268  # "rprh": tells our file from any other SQLite database
_VERSION = 1

# `arrivals` has one row, the last number given out, which decides between equal timestamps.
# Without row ids, a user's events lie together and in order: a history is one range of pages.
_TABLES = """
CREATE TABLE arrivals (last INTEGER NOT NULL);
INSERT INTO arrivals VALUES (0);
CREATE TABLE events (
    user TEXT NOT NULL, timestamp REAL NOT NULL, arrival INTEGER NOT NULL, item TEXT NOT NULL,
    PRIMARY KEY (user, timestamp, arrival)) WITHOUT ROWID;
CREATE TABLE keys (
    user TEXT NOT NULL, key TEXT NOT NULL, arrival INTEGER NOT NULL,
    PRIMARY KEY (user, key)) WITHOUT ROWID;
CREATE INDEX keys_by_arrival ON keys (user, arrival);
"""

_DROP_OLD_EVENTS = """
DELETE FROM events WHERE user = :user AND (timestamp, arrival) <= (
    SELECT timestamp, arrival FROM events WHERE user = :user
    ORDER BY timestamp DESC, arrival DESC LIMIT 1 OFFSET :most)
"""
_DROP_OLD_KEYS = """
DELETE FROM keys WHERE user = :user AND arrival <= (
    SELECT arrival FROM keys WHERE user = :user ORDER BY arrival DESC LIMIT 1 OFFSET :most)
"""

_REASONS = {
    sqlite3.SQLITE_BUSY: "is locked by another process",
    sqlite3.SQLITE_LOCKED: "is locked by another process",
    sqlite3.SQLITE_FULL: "cannot grow: the disk is full",
    sqlite3.SQLITE_IOERR: "cannot be read or written",
    sqlite3.SQLITE_NOTADB: "is not an SQLite database",
    sqlite3.SQLITE_CORRUPT: "is damaged",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened or made; its folder must exist and be writable",
    sqlite3.SQLITE_READONLY: "cannot be written",
    sqlite3.SQLITE_PERM: "cannot be opened: permission denied",
}
# What does not pass by itself, as a lock or a full disk does.
_LASTING = {
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
}


class SqliteHistories:
    """Histories in the SQLite file at `path`."""

    def __init__(self, path: str | Path, most: int) -> None:
        self._path = Path(path)
        self._most = most
        self._writing = threading.Lock()  # threads queue here; SQLite's own waiting only polls
        self._pool = threading.Lock()  # guards the next two
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        try:
            self.ready()
        except HistoriesUnavailableError as error:
            if _lasts(error.__cause__):
                raise StorageError(str(error)) from None

    def append(self, events: Sequence[Event]) -> int:
        """Keep the events in one transaction; return how many were new."""
        if not events:
            return 0
        with self._transaction() as connection:
            arrival = _take_numbers(connection, len(events))
            new = 0
            for event in events:
                arrival += 1
                if event.key is not None:
                    known = connection.execute(
                        "INSERT INTO keys VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                        (event.user, event.key, arrival),
                    )
                    if known.rowcount == 0:
                        continue
                connection.execute(
                    "INSERT INTO events VALUES (?, ?, ?, ?)",
                    (event.user, _moment(connection, event), arrival, event.item),
                )
                new += 1
            for user in {event.user for event in events}:
                connection.execute(_DROP_OLD_EVENTS, {"user": user, "most": self._most})
                connection.execute(_DROP_OLD_KEYS, {"user": user, "most": keys_kept(self._most)})
        return new

    def history(self, user: str) -> list[str]:
        return [item for item, _ in self.dated_history(user)]

    def dated_history(self, user: str) -> list[tuple[str, float]]:
        check_text("user", user)
        with self._connection() as connection:
            rows = connection.execute(
                "SELECT item, timestamp FROM events WHERE user = ?"
                " ORDER BY timestamp DESC, arrival DESC LIMIT ?",
                (user, self._most),
            ).fetchall()
        return rows[::-1]

    def ready(self) -> None:
        """Raise HistoriesUnavailableError unless the file can be written now."""
        with self._transaction() as connection:
            _take_numbers(connection, 1)

    def close(self) -> None:
        """Close the file; a call that is still running closes its connection when it ends."""
        with self._pool:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if not self._writing.acquire(timeout=PATIENCE_S):
            raise HistoriesUnavailableError(f"{self._path} is busy with earlier events")
        try:
            with self._connection() as connection:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
        finally:
            self._writing.release()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection; one that saw an error is closed, which undoes what it had begun."""
        with self._pool:
            if self._closed:
                raise HistoriesUnavailableError(f"{self._path} has been closed")
            connection = self._idle.pop() if self._idle else None
        whole = False
        try:
            if connection is None:
                connection = _connect(self._path)
            yield connection
            whole = True
        except sqlite3.Error as error:
            raise HistoriesUnavailableError(_sentence(self._path, error)) from error
        except StorageError as error:  # another file has taken its place
            raise HistoriesUnavailableError(str(error)) from error
        finally:
            with self._pool:
                whole = whole and not self._closed
                if whole and connection is not None:
                    self._idle.append(connection)
            if not whole and connection is not None:
                connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    """Open the file, as a new or a known one of ours."""
    # Private, as it holds what users had. SQLite's own files beside it follow its permissions.
    # Only a new file is opened here: closing a known one would drop the locks of this process.
    with suppress(OSError):  # SQLite will say what is wrong
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    deadline = time.monotonic() + PATIENCE_S
    while True:
        connection = sqlite3.connect(
            path, timeout=PATIENCE_S, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(path, connection)
        except sqlite3.Error as error:
            connection.close()
            # The first to make a new file's log wins; SQLite refuses the others without waiting.
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        except BaseException:
            connection.close()
            raise
        else:
            return connection


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    """Check whose file it is, set it up if it is empty, and ask for durable commits."""
    if _is_foreign(connection):
        raise StorageError(f"{path} is an SQLite database of something else, not of histories")
    if _pragma(connection, "journal_mode = WAL") != "wal":
        raise StorageError(f"{path} is not in a place where SQLite can keep a write-ahead log")
    connection.execute("PRAGMA synchronous = FULL")
    if _pragma(connection, "application_id") != _APPLICATION_ID:
        connection.execute("BEGIN IMMEDIATE")
        if _pragma(connection, "application_id") != _APPLICATION_ID:  # no other process was faster
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        connection.execute("COMMIT")
    version = _pragma(connection, "user_version")
    if version != _VERSION:
        raise StorageError(f"{path} has histories of version {version}, expected {_VERSION}")


def _is_foreign(connection: sqlite3.Connection) -> bool:
    """Return whether it holds tables of another application, seen at one moment."""
    connection.execute("BEGIN")
    owner = _pragma(connection, "application_id")
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    connection.execute("COMMIT")
    return owner != _APPLICATION_ID and tables > 0


def _pragma(connection: sqlite3.Connection, name: str) -> object:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _take_numbers(connection: sqlite3.Connection, count: int) -> int:
    """Reserve `count` arrival numbers and return the one before them."""
    connection.execute("UPDATE arrivals SET last = last + ?", (count,))
    last = int(connection.execute("SELECT last FROM arrivals").fetchone()[0])
    return last - count


def _moment(connection: sqlite3.Connection, event: Event) -> float:
    """Return when the event counts as having been."""
    moment = float(event.timestamp)
    if event.comes_last:
        newest = "SELECT max(timestamp) FROM events WHERE user = ?"
        (found,) = connection.execute(newest, (event.user,)).fetchone()
        if found is not None:
            return max(moment, float(found))
    return moment


def _code(error: sqlite3.Error) -> int:
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF  # the rest says which kind of it


def _lasts(cause: BaseException | None) -> bool:
    return isinstance(cause, StorageError) or (
        isinstance(cause, sqlite3.Error) and _code(cause) in _LASTING
    )


def _sentence(path: Path, error: sqlite3.Error) -> str:
    reason = _REASONS.get(_code(error))
    return f"{path} {reason}" if reason else f"{path} cannot be used: {error}"
