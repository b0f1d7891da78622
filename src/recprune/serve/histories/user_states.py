"""The states of users that a worker has in memory, in front of those that all workers share."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from recprune.models.continuation import Continuation, KeptState
from recprune.serve.histories.histories import SQLITE
from recprune.serve.histories.states import States, state_of
from recprune.serve.logs import log_problem
from recprune.types import Float32Array, Int32Array, RecpruneError, Timeline

Encoded: TypeAlias = Literal["continued", "unchanged", "anew"]

_RESTS_S = 10.0  # for which a place that failed is not asked
# States that wait to be written, at most; then the oldest are not.
_WAITING = 1024
_WAITING_BYTES = 16 << 20


def open_states(url: str, most: int, password: str | None = None) -> States | None:
    """Open the states beside the histories at `url`, of at most so many users."""
    if not most:
        return None
    if url.startswith(SQLITE):
        from recprune.serve.histories.sqlite_states import SqliteStates

        return SqliteStates(f"{url.removeprefix(SQLITE)}-states", most)
    from recprune.serve.histories.redis_states import RedisStates

    return RedisStates(url, most, password)


class UserStates:
    """Continues the states of users. Safe to share between threads.

    What is kept is only ever taken for the items that it stands for: see `Continuation`. So two
    workers that have different states of a user give the same answers.
    """

    def __init__(
        self, shared: States | None, most_bytes: int, count: Callable[[Encoded], None]
    ) -> None:
        """Keep so many bytes in memory; `count` is told of every history that is encoded."""
        self._shared = shared
        self._most_bytes = most_bytes
        self._count = count
        self._lock = threading.Lock()  # guards the next four
        self._states: OrderedDict[str, tuple[bytes, KeptState]] = OrderedDict()
        self._bytes = 0
        self._waiting: OrderedDict[str, tuple[KeptState, Continuation]] = OrderedDict()
        self._waiting_bytes = 0
        self._rests_until = 0.0
        self._awake = threading.Condition(self._lock)
        self._closing = False
        self._writer: threading.Thread | None = None

    def encoder(self, continuation: Continuation, user: str) -> UserEncoder:
        """Return what encodes histories of a user."""
        return UserEncoder(self, continuation, user, continuation.length, continuation.width)

    def encode(self, continuation: Continuation, user: str, history: Int32Array) -> Float32Array:
        """Return φ of a user's history, [d]."""
        for known in (self._known, self._stored):
            before = known(continuation, user)
            state = None if before is None else continuation.continued(before, history)
            if state is not None:
                self._count("unchanged" if state is before else "continued")
                self._keep(continuation, user, state, write=state is not before)
                return state.embedding
        state = continuation.anew(history)
        self._count("anew")
        self._keep(continuation, user, state, write=True)
        return state.embedding

    def clear(self) -> None:
        """Forget what is in memory: another model is served."""
        with self._lock:
            self._states.clear()
            self._bytes = 0

    def close(self) -> None:
        """Write what waits, and let go of everything."""
        with self._awake:
            self._closing = True
            self._awake.notify()
        if self._writer is not None:
            self._writer.join()
        if self._shared is not None:
            self._shared.close()

    def _known(self, continuation: Continuation, user: str) -> KeptState | None:
        with self._lock:
            found = self._states.get(user)
            if found is None or found[0] != continuation.fingerprint:
                return None
            self._states.move_to_end(user)
            return found[1]

    def _stored(self, continuation: Continuation, user: str) -> KeptState | None:
        if self._shared is None or time.monotonic() < self._rests_until:
            return None
        try:
            stored = self._shared.read(user)
        except RecpruneError as error:
            self._rest(error)
            return None
        return None if stored is None else state_of(stored, continuation)

    def _keep(
        self, continuation: Continuation, user: str, state: KeptState, *, write: bool
    ) -> None:
        with self._awake:
            old = self._states.pop(user, None)
            if old is not None:
                self._bytes -= _size(old[1])
            self._states[user] = (continuation.fingerprint, state)
            self._bytes += _size(state)
            while self._bytes > self._most_bytes:
                self._bytes -= _size(self._states.popitem(last=False)[1][1])
            if not write or self._shared is None or self._closing:
                return
            earlier = self._waiting.pop(user, None)
            if earlier is not None:
                self._waiting_bytes -= _size(earlier[0])
            self._waiting[user] = (state, continuation)
            self._waiting_bytes += _size(state)
            while len(self._waiting) > _WAITING or self._waiting_bytes > _WAITING_BYTES:
                self._next_waiting()
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="states", daemon=True)
                self._writer.start()
            self._awake.notify()

    def _write(self) -> None:
        assert self._shared is not None  # noqa: S101 # else there is no such thread
        while True:
            with self._awake:
                while not self._waiting and not self._closing:
                    self._awake.wait()
                if not self._waiting:
                    return
                user, state, continuation = self._next_waiting()
            if time.monotonic() < self._rests_until:
                continue
            try:
                self._shared.write(user, state, continuation)
            except RecpruneError as error:
                self._rest(error)
            except Exception as error:  # nobody else would write what comes then
                self._rest(error, unforeseen=error)

    def _next_waiting(self) -> tuple[str, KeptState, Continuation]:
        """Take what has waited longest. Pre: something waits, and the lock is held."""
        user, (state, continuation) = self._waiting.popitem(last=False)
        self._waiting_bytes -= _size(state)
        return user, state, continuation

    def _rest(self, error: Exception, unforeseen: Exception | None = None) -> None:
        self._rests_until = time.monotonic() + _RESTS_S
        log_problem("states of users are not kept", {"reason": str(error)}, unforeseen)


@dataclass
class UserEncoder:
    """Encodes the histories of one user, as an `Encoder` does."""

    states: UserStates
    continuation: Continuation
    user: str
    length: int
    width: int

    def encode(
        self,
        histories: Sequence[Int32Array],
        timelines: Sequence[Timeline | None] | None = None,  # noqa: ARG002 # it reads no times
    ) -> Float32Array:
        (history,) = histories
        return self.states.encode(self.continuation, self.user, history)[None]


def _size(state: KeptState) -> int:
    return state.rows.nbytes + state.items.nbytes + state.embedding.nbytes
