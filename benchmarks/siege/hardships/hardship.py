"""What hardships have in common: each strikes again and again, in a thread of its own."""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class Hardship(Protocol):
    """Something that goes wrong."""

    name: str

    def pause(self, rng: random.Random) -> float:
        """Return how many seconds to wait until the next strike."""

    def strike(self, rng: random.Random) -> None:
        """Do it, and undo what does not pass by itself."""

    def close(self) -> None:
        """Let go of everything."""


@contextmanager
def befallen(hardships: Sequence[Hardship], seed: int) -> Iterator[list[str]]:
    """Let them all strike while the `with` block lasts; yields what went wrong with themselves."""
    end = threading.Event()
    faults: list[str] = []

    def go_on(hardship: Hardship, rng: random.Random) -> None:
        try:
            while not end.wait(hardship.pause(rng)):
                hardship.strike(rng)
        except Exception:  # a siege without one of its hardships is none
            faults.append(f"{hardship.name}: {traceback.format_exc()}")
        finally:
            hardship.close()

    threads = [
        threading.Thread(target=go_on, args=(hardship, random.Random(f"{seed} {hardship.name}")))
        for hardship in hardships
    ]
    for thread in threads:
        thread.start()
    try:
        yield faults
    finally:
        end.set()
        for thread in threads:
            thread.join()
