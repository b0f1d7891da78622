"""The log that grows in the course of a soak, and the refreshes that learn from it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import polars as pl

_BEGIN_S = 1_500_000_000  # when the model that is served first was trained
_DAY_S = 86_400
_USERS, _EVENTS = 300, 12  # of a day
_WALK = 60  # items that people take one after the other: something to learn
_WORSE = 3  # the exit code of a refresh that leaves the old model in place


class GrowingLog:
    """A folder of Parquet files, a day each; people take neighbouring items."""

    def __init__(self, folder: Path, items: Sequence[str]) -> None:
        self.folder = folder
        folder.mkdir()
        self._items = items[:_WALK]
        self._days = 0
        self._write(random.Random(0), _BEGIN_S - _DAY_S)

    def add_day(self, rng: random.Random) -> None:
        self._days += 1
        self._write(rng, _BEGIN_S + self._days * _DAY_S)

    def _write(self, rng: random.Random, begin_s: int) -> None:
        users, items, times = [], [], []
        for user in range(_USERS):
            place = rng.randrange(_WALK)
            for step in range(_EVENTS):
                users.append(user)
                items.append(self._items[(place + step) % _WALK])
                times.append(begin_s + 60 * step + user % 60)
        columns = {"user_id": users, "item_id": items, "timestamp": times}
        pl.DataFrame(columns).write_parquet(self.folder / f"{begin_s}.parquet")


def run_refresh(
    folder: Path, log: Path, live: Path, kill_after_s: float | None
) -> tuple[int, str, float]:
    """Refresh a recommender and its live index in another process, which may be killed.

    Return its exit code, what it has said, and how many seconds it took.
    """
    begun = time.monotonic()
    command = [sys.executable, "-m", "recprune.cli", "refresh", str(folder), str(log)]
    command += ["--live", str(live), "--epochs", "2", "--margin", "0.9", "--device", "cpu"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        _, said = process.communicate(timeout=kill_after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    return process.returncode, said, time.monotonic() - begun


def is_usual(code: int) -> bool:
    """Whether a refresh ended as it may: in place, not better, or killed by us."""
    return code in (0, _WORSE, -signal.SIGKILL)
