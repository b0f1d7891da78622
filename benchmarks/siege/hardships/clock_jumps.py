"""The wall clock of the service jumps, by seconds and by days, forwards and backwards."""

from __future__ import annotations

import random
import time
from email.utils import parsedate_to_datetime

from benchmarks.siege.client import Client
from benchmarks.siege.diary import Diary
from benchmarks.siege.places import Service

_JUMPS = (-86_400, -3600, -30, 0, 30, 3600, 7 * 86_400)  # seconds away from the right time


class ClockJumps:
    """Every few seconds."""

    name = "clock jumps"

    def __init__(self, service: Service, diary: Diary) -> None:
        self._service = service
        self._diary = diary
        self._client = Client(service.port)

    def pause(self, rng: random.Random) -> float:
        return rng.uniform(2.0, 6.0)

    def strike(self, rng: random.Random) -> None:
        jump = rng.choice(_JUMPS)
        with self._diary.noting(self.name, f"{jump:+} s") as entry:
            self._service.set_clock(jump)
            time.sleep(1.5)  # uvicorn writes a new date once a second
            date = self._client.ask("GET", "/healthz").header("date")
            if date is not None:  # so that it is known to have come through
                seen = parsedate_to_datetime(date).timestamp() - time.time()
                entry.figures["seen"] = round(seen)

    def close(self) -> None:
        self._service.set_clock(0)
        self._client.close()
