"""Actors that several processes share: they live as long as any process uses them.

Users are not counted, as a process that is killed could not count itself out. Instead, every user
sends a heartbeat now and then, and an actor that received none during its lease ends itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic, sleep
from types import TracebackType
from typing import Protocol

_CHECKS = 8  # for calls, during one lease
_BEATS = 4  # that a user sends during one lease: three may be late
_REPLACE_SECONDS = 1.0  # between attempts to replace lost actors
_END_SECONDS = 1.0  # for the thread to finish its round


class Lease:
    """The actor's side: entered for every call; ends the actor when none comes."""

    def __init__(self, seconds: float) -> None:
        self._in_flight = 0
        self._was_called = True
        threading.Thread(target=self._watch, args=(seconds,), daemon=True).start()

    def __enter__(self) -> None:
        self._in_flight += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._was_called = True
        self._in_flight -= 1

    def _watch(self, seconds: float) -> None:
        import ray

        actor = ray.get_runtime_context().current_actor
        # Checks are counted, not seconds: a machine that was suspended has lost no users.
        idle_checks = 0
        while True:
            sleep(seconds / _CHECKS)
            idle_checks = 0 if self._was_called or self._in_flight else idle_checks + 1
            self._was_called = False
            if idle_checks >= _CHECKS:
                ray.kill(actor)  # an end that Ray does not take for a failure


class KeptAlive(Protocol):
    """The actors of one shard, as far as the heartbeat needs them."""

    failure: threading.Event

    def beat(self) -> None:
        """Send a heartbeat to all of them."""

    def replace_lost(self) -> bool:
        """Replace actors that are gone; return whether any does not answer yet."""


class Heartbeat:
    """The user's side: a thread that keeps actors alive, and replaces lost ones.

    It refers to the actors only, not to the index that calls them: that can be collected.
    """

    def __init__(self, kept: Sequence[KeptAlive], lease: float) -> None:
        self._kept = kept
        self._beat_seconds = lease / _BEATS
        self._failure = threading.Event()
        self._has_ended = False
        for replicas in kept:
            replicas.failure = self._failure
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Send no more heartbeats."""
        self._has_ended = True
        self._failure.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        beat_at = monotonic()
        while not self._has_ended:
            try:
                if monotonic() >= beat_at:
                    beat_at = monotonic() + self._beat_seconds
                    for replicas in self._kept:
                        replicas.beat()
                unwell = [replicas.replace_lost() for replicas in self._kept]
            except Exception:
                # The cluster cannot be reached, or not any more: searches raise that.
                sleep(_REPLACE_SECONDS)
                continue
            pause = beat_at - monotonic()
            self._failure.wait(max(0.0, min(pause, _REPLACE_SECONDS) if any(unwell) else pause))
            self._failure.clear()
