"""Who took items that the model does not know: one SQLite file, shared by the workers of a machine.

Counts are of distinct users. What is lost with the file, or with a worker that is killed, are
counts: an item is then folded in later, and nothing else is wrong. So commits do not wait for the
disk.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

from recprune.types import StorageError

_APPLICATION_ID = 0x72707274  # "rprt": tells our file from any other SQLite database
_WAITING_S = 5.0
MOST_ITEMS = 100_000  # those that were taken least lately go first
NEVER = 1 << 62  # a count that is not reached

# `due` is the count at which an item is folded in next. `code` is the one of ours that the
# catalogue is known to have, and `intended` one that was about to be put, and may have reached it
# or not. `used` ascends with time. `origin` tells catalogues that took everything
# along from others.
_TABLES = """
CREATE TABLE items (
    item TEXT PRIMARY KEY, users INTEGER NOT NULL, due INTEGER NOT NULL, code BLOB,
    intended BLOB, used INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX items_by_use ON items (used);
CREATE INDEX items_that_are_due ON items (item) WHERE users >= due;
CREATE TABLE takers (
    item TEXT NOT NULL, user TEXT NOT NULL, place INTEGER NOT NULL,
    PRIMARY KEY (item, user)) WITHOUT ROWID;
CREATE TABLE catalogue (identity TEXT NOT NULL, origin TEXT NOT NULL);
INSERT INTO catalogue VALUES ('', '');
"""


class DueItem(NamedTuple):
    """An item that has been taken often enough to be folded in."""

    item: str
    users: int
    due: int
    code: bytes | None  # of ours, that is known to be in the catalogue
    intended: bytes | None  # that may be there


class Takers:
    """The users who took each of some items, in the file at `path`. For one thread."""

    def __init__(self, path: Path, *, first: int, most: int) -> None:
        """Items are due at `first` users, and of each item `most` users are kept."""
        self._path, self._first, self._most = path, first, most
        # Private, as it says what users had.
        with suppress(OSError):  # SQLite will say what is wrong
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        self._connection = sqlite3.connect(
            path, timeout=_WAITING_S, isolation_level=None, check_same_thread=False
        )
        deadline = time.monotonic() + _WAITING_S
        with self._told():
            while not self._is_prepared():
                if time.monotonic() > deadline:
                    raise StorageError(f"{path} is locked by another process")
                time.sleep(0.01)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def note(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Note items and the users who took them."""
        with self._transaction() as connection:
            (used,) = connection.execute("SELECT coalesce(max(used), 0) FROM items").fetchone()
            for item, user in pairs:
                used += 1
                connection.execute(
                    "INSERT INTO items VALUES (?, 0, ?, NULL, NULL, ?)"
                    " ON CONFLICT DO UPDATE SET used = excluded.used",
                    (item, self._first, used),
                )
                new = connection.execute(
                    "INSERT INTO takers SELECT item, ?, users FROM items"
                    " WHERE item = ? AND users < ? ON CONFLICT DO NOTHING",
                    (user, item, self._most),
                )
                if new.rowcount:
                    connection.execute("UPDATE items SET users = users + 1 WHERE item = ?", (item,))
            (count,) = connection.execute("SELECT count(*) FROM items").fetchone()
            if count > MOST_ITEMS:
                self._forget_oldest(connection, count - MOST_ITEMS)

    def catalogue(self) -> str:
        """Return the identity of the catalogue that items were put into; empty at first."""
        with self._told():
            (identity,) = self._connection.execute("SELECT identity FROM catalogue").fetchone()
        return str(identity)

    def begin(self, catalogue: str, origin: str) -> None:
        """Have everything put into another catalogue, which has taken the place of the one before.

        But for items that others had removed or changed there. Of the same origin, it took along
        what was there, so what was put and is absent has been removed.
        """
        with self._transaction() as connection:
            (before,) = connection.execute("SELECT origin FROM catalogue").fetchone()
            connection.execute("UPDATE catalogue SET identity = ?, origin = ?", (catalogue, origin))
            connection.execute(
                "UPDATE items SET due = ? WHERE code IS NOT NULL OR due < ?", (self._first, NEVER)
            )
            if before != origin:
                connection.execute("UPDATE items SET code = NULL, intended = NULL")

    def due(self) -> DueItem | None:
        """Return an item that is due."""
        with self._told():
            row = self._connection.execute(
                "SELECT item, users, due, code, intended FROM items WHERE users >= due LIMIT 1"
            ).fetchone()
        return None if row is None else DueItem(*row)

    def users(self, item: str) -> list[str]:
        """Return who took an item, in the order in which they first did."""
        with self._told():
            rows = self._connection.execute(
                "SELECT user FROM takers WHERE item = ? ORDER BY place", (item,)
            ).fetchall()
        return [user for (user,) in rows]

    def intend(self, item: str, present: bytes | None, code: bytes) -> None:
        """Keep the code that the catalogue has of an item, and the one that it is about to get."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE items SET code = ?, intended = ? WHERE item = ?", (present, code, item)
            )

    def settle(self, item: str, due: int, code: bytes | None) -> None:
        """Say when an item is due next, and which code of ours the catalogue has."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE items SET due = ?, code = ?, intended = NULL WHERE item = ?",
                (due, code, item),
            )

    def forget(self, item: str) -> None:
        with self._transaction() as connection:
            connection.execute("DELETE FROM takers WHERE item = ?", (item,))
            connection.execute("DELETE FROM items WHERE item = ?", (item,))

    def _forget_oldest(self, connection: sqlite3.Connection, count: int) -> None:
        for table in ("takers", "items"):
            connection.execute(
                f"DELETE FROM {table} WHERE item IN"  # noqa: S608 # names of our own
                " (SELECT item FROM items ORDER BY used LIMIT ?)",
                (count,),
            )

    def _is_prepared(self) -> bool:
        """Set the file up if it is new; False where another process is just doing that."""
        connection = self._connection
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            # The first to make a new file's log wins; SQLite refuses the others without waiting.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return False
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        (owner,) = connection.execute("PRAGMA application_id").fetchone()
        connection.execute("COMMIT")
        if owner != _APPLICATION_ID:
            raise StorageError(f"{self._path} is an SQLite database of something else")
        return True

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._told():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(f"{self._path} cannot be used: {error}") from error
