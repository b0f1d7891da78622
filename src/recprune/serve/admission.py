"""Bounded concurrency: so many at work, so few waiting, and everybody else is told to come back.

A queue that may grow makes everybody slow; one that may not keeps those who are let in quick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from recprune.types import RecpruneError

T = TypeVar("T")


class OverloadedError(RecpruneError):
    """There is no room for this request just now."""


class Gate:
    """Threads for one kind of work, away from the event loop. Belongs to one loop."""

    def __init__(
        self, name: str, *, running: int, waiting: int, changed: Callable[[str, Gate], None]
    ) -> None:
        """`changed` is told whenever somebody came or went."""
        self._name = name
        self._changed = changed
        self._running = running
        self._most = running + waiting
        self._inside = 0
        self._pool = ThreadPoolExecutor(running, thread_name_prefix=name)

    @property
    def is_full(self) -> bool:
        """Whether the next one would be turned away."""
        return self._inside >= self._most

    @property
    def running(self) -> int:
        """How many are at work."""
        return min(self._inside, self._running)

    @property
    def waiting(self) -> int:
        """How many wait for a thread."""
        return self._inside - self.running

    async def run(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """Do the work in a thread, or refuse it at once; TimeoutError where it takes longer.

        What takes longer goes on, and keeps its place, as nothing can stop a thread.
        """
        if self.is_full:
            raise OverloadedError("the service is busy: try again in a moment")
        self._step(1)
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._finished)
        done, _ = await asyncio.wait({future}, timeout=seconds)
        if not done:
            raise TimeoutError
        return future.result()

    def _finished(self, future: asyncio.Future[T]) -> None:
        self._step(-1)
        if not future.cancelled():
            future.exception()  # seen, even if nobody waits for it any more

    def _step(self, by: int) -> None:
        self._inside += by
        self._changed(self._name, self)

    def close(self) -> None:
        """Let the threads finish."""
        self._pool.shutdown(wait=True)
