"""States of users in an SQLite file of their own, beside that of the histories.

Not in the same file: histories are flushed to the disk with every event, and states need not be,
as they can be made anew. After a power cut the file may be damaged; then it is not used, and to be
removed.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recprune.models.continuation import Continuation, KeptState
from recprune.serve.histories.states import (
    READ_PATIENCE_S,
    StatesUnavailableError,
    StoredState,
    head_of,
    rows_of,
    rows_to_add,
)

_APPLICATION_ID = 0x72707374  # "rpst": tells our file from any other SQLite database
_VERSION = 1
_TIDIED_EVERY = 64  # writes, between looks for users that are too many

_TABLES = """
CREATE TABLE IF NOT EXISTS states (
    user TEXT PRIMARY KEY, head BLOB NOT NULL, last INTEGER NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS states_by_use ON states (used);
CREATE TABLE IF NOT EXISTS state_rows (
    user TEXT NOT NULL, place INTEGER NOT NULL, numbers BLOB NOT NULL,
    PRIMARY KEY (user, place)) WITHOUT ROWID;
"""
# SQLite keeps values of any type in any column: cast, what is not ours is bytes that do not fit.
_HEAD = "SELECT CAST(head AS BLOB), CAST(last AS INTEGER) FROM states WHERE user = ?"
_ROWS = "SELECT CAST(numbers AS BLOB) FROM state_rows WHERE user = ? ORDER BY place"
_TOO_MANY = "SELECT user FROM states ORDER BY used DESC LIMIT -1 OFFSET ?"


class SqliteStates:
    """States in the SQLite file at `path`, of the `most` users that were written last."""

    def __init__(self, path: str | Path, most: int) -> None:
        self._path = Path(path)
        self._most = most
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._written = 0
        self._closed = False

    def read(self, user: str) -> StoredState | None:
        with self._transaction("BEGIN") as connection:
            found = connection.execute(_HEAD, (user,)).fetchone()
            if found is None:
                return None
            rows = connection.execute(_ROWS, (user,)).fetchall()
        return StoredState(found[0], [row for (row,) in rows])

    def write(self, user: str, state: KeptState, continuation: Continuation) -> None:
        with self._transaction("BEGIN IMMEDIATE") as connection:
            found = connection.execute(_HEAD, (user,)).fetchone()
            head, last = found or (None, 0)
            new = rows_to_add(head, state, continuation)
            if new is None:
                connection.execute("DELETE FROM state_rows WHERE user = ?", (user,))
                new = len(state.rows)
            numbered = enumerate(rows_of(state, min(new, len(state.rows)), continuation), last + 1)
            connection.executemany(
                "INSERT INTO state_rows VALUES (?, ?, ?)",
                [(user, place, row) for place, row in numbered],
            )
            last += min(new, len(state.rows))
            connection.execute(
                "DELETE FROM state_rows WHERE user = ? AND place <= ?",
                (user, last - len(state.rows)),
            )
            connection.execute(
                "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)",
                (user, head_of(state, continuation), last, time.time()),
            )
            if self._written % _TIDIED_EVERY == 0:
                for (gone,) in connection.execute(_TOO_MANY, (self._most,)).fetchall():
                    connection.execute("DELETE FROM state_rows WHERE user = ?", (gone,))
                    connection.execute("DELETE FROM states WHERE user = ?", (gone,))
            self._written += 1

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._let_go()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        if not self._lock.acquire(timeout=READ_PATIENCE_S):
            raise StatesUnavailableError(f"{self._path} is busy")
        try:
            if self._closed:
                raise StatesUnavailableError(f"{self._path} has been closed")
            if self._connection is None:
                self._connection = self._connected()
            self._connection.execute(begin)
            yield self._connection
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._let_go()  # which undoes what was begun
            raise StatesUnavailableError(f"{self._path}: {error}") from error
        except BaseException:
            self._let_go()
            raise
        finally:
            self._lock.release()

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> sqlite3.Connection:
        with suppress(OSError):  # private, as histories are; SQLite will say what is wrong
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        connection = sqlite3.connect(
            self._path, timeout=READ_PATIENCE_S, isolation_level=None, check_same_thread=False
        )
        try:
            (owner,) = connection.execute("PRAGMA application_id").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if owner != _APPLICATION_ID and tables:
                raise StatesUnavailableError(f"{self._path} is a database of something else")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.executescript(_TABLES)
        except BaseException:
            connection.close()
            raise
        return connection
