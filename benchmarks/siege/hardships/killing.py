"""Workers are killed with -9, at moments that they cannot choose."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

from benchmarks.siege.diary import Diary
from benchmarks.siege.places import Service


class Killing:
    """A random worker every few seconds.

    One of them is spared for most of the time: what a worker's memory does over hundreds of
    reloads could not be seen if none became older than seconds.
    """

    name = "killing"

    def __init__(self, service: Service, diary: Diary, spared_until: float) -> None:
        self._service = service
        self._diary = diary
        self._spared_until = spared_until
        self.spared = service.workers[0]

    def pause(self, rng: random.Random) -> float:
        return rng.uniform(2.0, 6.0)

    def strike(self, rng: random.Random) -> None:
        workers = self._service.workers
        if time.monotonic() < self._spared_until:
            workers = [pid for pid in workers if pid != self.spared]
        if workers:
            with self._diary.noting(self.name, "kill -9"), suppress(ProcessLookupError):
                os.kill(rng.choice(workers), signal.SIGKILL)

    def close(self) -> None:
        pass
