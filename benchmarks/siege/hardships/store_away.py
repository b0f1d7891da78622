"""The histories' store goes away and comes back: Redis ends or hangs, SQLite's file is locked."""

from __future__ import annotations

import random
import signal
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

from benchmarks.siege.diary import Diary
from benchmarks.siege.places import Redis


class RedisAway:
    """By turns killed with -9 and started again, and stopped for a while."""

    name = "Redis away"

    def __init__(self, redis: Redis, diary: Diary, every: float) -> None:
        self._redis = redis
        self._diary = diary
        self._every = every
        self._strikes = 0

    def pause(self, rng: random.Random) -> float:
        return self._every * rng.uniform(0.8, 1.2)

    def strike(self, rng: random.Random) -> None:
        self._strikes += 1
        if self._strikes % 2:
            with self._diary.noting(self.name, "kill -9", store_is_away=True):
                self._redis.kill()
                time.sleep(rng.uniform(1.0, 4.0))
                self._redis.start_if_gone()
        else:
            with self._diary.noting(self.name, "hangs", store_is_away=True):
                self._redis.signal(signal.SIGSTOP)
                time.sleep(rng.uniform(1.0, 8.0))
                self._redis.signal(signal.SIGCONT)

    def close(self) -> None:
        self._redis.start_if_gone()


class SqliteLocked:
    """Another process, such as a backup, holds the file for a while."""

    name = "SQLite locked"

    def __init__(self, path: Path, diary: Diary, every: float) -> None:
        self._path = path
        self._diary = diary
        self._every = every

    def pause(self, rng: random.Random) -> float:
        return self._every * rng.uniform(0.8, 1.2)

    def strike(self, rng: random.Random) -> None:
        with (
            self._diary.noting(self.name, "locked", store_is_away=True),
            suppress(sqlite3.OperationalError),  # on a full disk, nothing can be locked
            closing(sqlite3.connect(self._path, timeout=20, isolation_level=None)) as connection,
        ):
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(rng.uniform(1.0, 8.0))
            connection.execute("ROLLBACK")

    def close(self) -> None:
        pass
