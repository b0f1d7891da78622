"""Admission: so many requests in flight, and further ones are refused at once.

A queue that may grow makes every request slow; one that may not keeps those that are admitted
quick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from recprune.types import RecpruneError

T = TypeVar("T")


class OverloadedError(RecpruneError):
    """There is no room for this request just now."""


class Admission:
    """Counts what is in flight, of at most so many. Belongs to one event loop."""

    def __init__(
        self,
        most: int,
        *,
        on_refused: Callable[[], None],
        on_change: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_refused` is called for every refusal, `on_change` with every new count."""
        self.in_flight = 0
        self._most = most
        self._on_refused = on_refused
        self._on_change = on_change

    def refuse_if_full(self) -> None:
        """Refuse where the next one would find no room."""
        if self.in_flight >= self._most:
            self._on_refused()
            raise OverloadedError("the service is busy: try again in a moment")

    def enter(self) -> None:
        """Count one in, or refuse it."""
        self.refuse_if_full()
        self._count(1)

    def leave(self) -> None:
        """Count one out that was counted in."""
        self._count(-1)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count one in for the length of a `with` block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def _count(self, by: int) -> None:
        self.in_flight += by
        self._on_change(self.in_flight)


class WorkPool:
    """Threads for one kind of work, away from the event loop that it belongs to."""

    def __init__(self, name: str, *, threads: int, admission: Admission) -> None:
        self._admission = admission
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """Do the work in a thread, or refuse it at once; TimeoutError where it takes longer.

        What takes longer goes on, and stays in flight, as nothing can stop a thread.
        """
        self._admission.enter()
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(self._finished)
        done, _ = await asyncio.wait({future}, timeout=seconds)
        if not done:
            raise TimeoutError
        return future.result()

    def _finished(self, future: asyncio.Future[T]) -> None:
        self._admission.leave()
        if not future.cancelled():
            future.exception()  # retrieved, even if the caller no longer waits for it

    def close(self) -> None:
        """Let the threads finish."""
        self._threads.shutdown(wait=True)
