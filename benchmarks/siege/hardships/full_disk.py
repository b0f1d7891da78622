"""The disk fills up: the one that has the histories, the temporary files and the log."""

from __future__ import annotations

import random
import time

from benchmarks.siege.diary import Diary
from benchmarks.siege.places import Redis, SmallDisk


class FullDisk:
    """To the last byte, for some seconds.

    A Redis that must not lose anything ends itself when it cannot write; it is started again once
    there is room, as a service manager would.
    """

    name = "full disk"

    def __init__(self, disk: SmallDisk, redis: Redis | None, diary: Diary, every: float) -> None:
        self._disk = disk
        self._redis = redis
        self._diary = diary
        self._every = every

    def pause(self, rng: random.Random) -> float:
        return self._every * rng.uniform(0.8, 1.2)

    def strike(self, rng: random.Random) -> None:
        with self._diary.noting(self.name, "no room", store_is_away=True):
            end = time.monotonic() + rng.uniform(4.0, 7.0)
            try:
                while time.monotonic() < end:
                    self._disk.fill()  # again and again: what others let go of is taken too
                    time.sleep(0.1)
            finally:
                self._disk.free()
            if self._redis is not None:
                self._redis.start_if_gone()

    def close(self) -> None:
        self._disk.free()
