"""The folder is exchanged for another one, and the service told to load it."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from benchmarks.siege.client import Client
from benchmarks.siege.diary import Diary
from benchmarks.siege.places import Service
from recprune.system import exchange


class Swapping:
    """A hundred times in all, by turns with POST /admin/reload and with SIGHUP."""

    name = "swapping"

    def __init__(
        self, service: Service, spare: Path, diary: Diary, swaps: int, until: float
    ) -> None:
        """Spread so many swaps over the time until then."""
        self._service = service
        self._spare = spare
        self._diary = diary
        self._most = swaps
        self._until = until
        self._client = Client(service.port)
        self.swaps = 0

    def pause(self, rng: random.Random) -> float:
        left = max(0.0, self._until - time.monotonic() - 1.0)
        if self.swaps >= self._most:
            return left + 1.0
        return left / (self._most - self.swaps) * rng.uniform(0.5, 1.0)

    def strike(self, rng: random.Random) -> None:
        del rng
        if self.swaps >= self._most:
            return
        exchange(self._service.folder, self._spare)
        self.swaps += 1
        if self.swaps % 2:
            with self._diary.noting(self.name, "POST /admin/reload") as entry:
                # Its worker may be killed, or another reload be under way: what counts is that the
                # service goes on answering, and knows which folder it answers with.
                entry.figures["status"] = self._client.ask("POST", "/admin/reload").status
        else:
            with self._diary.noting(self.name, "SIGHUP"):
                self._service.signal(signal.SIGHUP)

    def close(self) -> None:
        self._client.close()
