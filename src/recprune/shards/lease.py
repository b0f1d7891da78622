"""Actors that several processes share: they live for as long as anybody wants them.

Nobody counts who uses them, as whoever does may be killed. Every user gives a sign of life now and
then, and an actor that has heard none for as long as its lease says ends itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic, sleep
from types import TracebackType
from typing import Protocol

_LOOKS = 8  # in the time of a lease, whether anybody has asked
_BEATS = 4  # in the time of a lease, that a user gives
_MEND_SECONDS = 1.0  # between looks at what is lost
_END_SECONDS = 1.0  # for the thread to finish what it does


class Lease:
    """The actor's side: entered for every question, and the end of the actor if none comes."""

    def __init__(self, seconds: float) -> None:
        self._under_way = 0
        self._was_asked = True
        threading.Thread(target=self._watch, args=(seconds,), daemon=True).start()

    def __enter__(self) -> None:
        self._under_way += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._was_asked = True
        self._under_way -= 1

    def _watch(self, seconds: float) -> None:
        import ray

        myself = ray.get_runtime_context().current_actor
        # Looks are counted, not seconds: if all of us were stopped for a while, nobody left.
        in_vain = 0
        while True:
            sleep(seconds / _LOOKS)
            in_vain = 0 if self._was_asked or self._under_way else in_vain + 1
            self._was_asked = False
            if in_vain >= _LOOKS:
                ray.kill(myself)  # an end that Ray does not take for a failure


class Kept(Protocol):
    """The actors of one shard, as far as they are kept alive."""

    alarm: threading.Event

    def beat(self) -> None:
        """Ask all of them for a sign of life."""

    def mend(self) -> bool:
        """Replace those that are gone; say whether any is still not well."""


class SignOfLife:
    """The user's side: a thread that keeps actors alive, and replaces those that are gone.

    It knows the actors only, not the index that asks them: that one can be let go of.
    """

    def __init__(self, kept: Sequence[Kept], lease: float) -> None:
        self._kept = kept
        self._beat_seconds = lease / _BEATS
        self._alarm = threading.Event()
        self._has_ended = False
        for replicas in kept:
            replicas.alarm = self._alarm
        self._thread = threading.Thread(target=self._run, name="sign of life", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the actors go."""
        self._has_ended = True
        self._alarm.set()
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
                unwell = [replicas.mend() for replicas in self._kept]
            except Exception:
                # The cluster cannot be reached, or not any more: those who search say so.
                sleep(_MEND_SECONDS)
                continue
            pause = beat_at - monotonic()
            self._alarm.wait(max(0.0, min(pause, _MEND_SECONDS) if any(unwell) else pause))
            self._alarm.clear()
