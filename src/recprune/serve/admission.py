"""Admission: so many requests in flight, and further ones are refused at once.

A queue that may grow makes every request slow; one that may not keeps those that are admitted
quick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar, cast

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
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            self._admission.leave()
            if done.cancelled():  # the caller no longer waits for it
                return
            if error is None:
                done.set_result(cast(T, result))
            else:
                done.set_exception(error)

        def do() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:  # for the caller, whatever it is
                error = raised
            loop.call_soon_threadsafe(finish, result, error)

        self._threads.submit(do)
        async with asyncio.timeout(seconds):
            return await done

    def close(self) -> None:
        """Let the threads finish."""
        self._threads.shutdown(wait=True)
