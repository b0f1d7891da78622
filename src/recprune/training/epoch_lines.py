"""How a training goes, for people: a line for every epoch, and how long it may still take."""

from __future__ import annotations

import math
import sys
import time

from recprune.models.settings import Settings
from recprune.training.loop import EpochReport

_STAGES = {"full": "full vectors", "learning": "codes change", "last": "codes stay"}


class EpochLines:
    """One line that is written over while steps pass, and one that stays for every epoch.

    On standard error. `max_seconds` are those that the training has from now on.
    """

    def __init__(
        self, settings: Settings, *, validated: bool, max_seconds: float = math.inf
    ) -> None:
        self._settings = settings
        self._validated = validated
        self._max_seconds = max_seconds
        self._begun = time.monotonic()
        self._epochs = 0

    def steps(self, done: int, of: int, loss: float) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r  step {done}/{of}  loss {loss:.4f}\033[K")
            sys.stderr.flush()

    def epoch(self, report: EpochReport) -> None:
        self._epochs += 1
        left = seconds_left(
            time.monotonic() - self._begun,
            self._epochs,
            self._settings.training.max_epochs - report.epoch,
            self._max_seconds,
        )
        start = "\r" if sys.stderr.isatty() else ""
        judged = f"NDCG@10 {report.ndcg:.4f}{' *' if report.best else '  '}  "
        stage = f"{_STAGES[report.stage]:12}  " if self._settings.model.learns_codes else ""
        line = (
            f"{start}epoch {report.epoch:3}  {stage}loss {report.loss:.5f}  "
            f"{judged if self._validated else ''}"
            f"{report.steps_per_second:6.1f} steps/s  at most {_short(left)} to go"
        )
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def seconds_left(passed: float, epochs: int, epochs_left: int, max_seconds: float) -> float:
    """Return how long further epochs take at most, of which so many were run in that time.

    Never more than is left of `max_seconds`.
    """
    return max(0.0, min(passed / epochs * epochs_left, max_seconds - passed))


def _short(seconds: float) -> str:
    """Return a time in whole seconds or minutes, not rounded up."""
    return f"{int(seconds)} s" if seconds < 120 else f"{int(seconds / 60)} min"
