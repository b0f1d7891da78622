"""States of users in a Redis server or cluster, beside their histories.

Per user there are a string `state`, which is the head, and a list `state-rows`. Their names have
the user in braces, as those of the histories, so that a cluster keeps them in one slot. A sorted
set `recprune:states` says whose states were written when, by which those of too many users are
dropped; all end by themselves a day after they were written last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from recprune.models.continuation import Continuation, KeptState
from recprune.serve.histories.redis_histories import CLUSTER, ERRORS, place_of, tag_of
from recprune.serve.histories.states import (
    READ_PATIENCE_S,
    WRITE_PATIENCE_S,
    StatesUnavailableError,
    StoredState,
    head_of,
    rows_of,
    rows_to_add,
)
from recprune.types import needs_extra

with needs_extra("serve"):
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

_USERS = "recprune:states"
_LASTS_S = 86_400
_TIDIED_EVERY = 64  # writes, between looks for users that are too many
_DROPPED_AT_ONCE = 256

# KEYS: `state` and `state-rows`. ARGV: the head that is there, or nothing; the new one; how many
# rows to keep, for how long; then the new rows. Where another process was faster, nothing is done.
_WRITE = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
if ARGV[5] == 'all' then redis.call('DEL', KEYS[2]) end
for at = 6, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[at]) end
redis.call('LTRIM', KEYS[2], -tonumber(ARGV[3]), -1)
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
"""
# Both at one moment.
_READ = "return {redis.call('GET', KEYS[1]), redis.call('LRANGE', KEYS[2], 0, -1)}"


class RedisStates:
    """States in the Redis server or cluster at `url`, of about `most` users."""

    def __init__(self, url: str, most: int, password: str | None = None) -> None:
        self._url = url
        self._most = most
        self._place = place_of(url)
        self._options: dict[str, Any] = {
            "password": password,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
        }
        # One each, so that a question never waits for what writes to connect.
        self._locks = {READ_PATIENCE_S: threading.Lock(), WRITE_PATIENCE_S: threading.Lock()}
        self._clients: dict[float, Any] = {}  # by how long they wait
        self._written = 0
        self._closed = False

    def read(self, user: str) -> StoredState | None:
        with self._translated():
            head, rows = self._client(READ_PATIENCE_S).eval(_READ, 2, *_keys_of(user))
        return None if head is None else StoredState(head, rows)

    def write(self, user: str, state: KeptState, continuation: Continuation) -> None:
        keys = _keys_of(user)
        with self._translated():
            client = self._client(WRITE_PATIENCE_S)
            head = client.get(keys[0])
            new = rows_to_add(head, state, continuation)
            count = len(state.rows) if new is None else min(new, len(state.rows))
            rows = rows_of(state, count, continuation)
            how = "all" if new is None else "new"
            made = head_of(state, continuation)
            # A list that keeps none of its rows is none.
            client.eval(
                _WRITE, 2, *keys, head or b"", made, max(1, len(state.rows)), _LASTS_S, how, *rows
            )
            client.zadd(_USERS, {user: time.time()})
            if self._written % _TIDIED_EVERY == 0:
                self._drop(client)
            self._written += 1

    def _drop(self, client: Any) -> None:
        """Drop states of users that are too many, those first that were not written longest."""
        too_many = int(client.zcard(_USERS)) - self._most
        if too_many > 0:
            last = min(too_many, _DROPPED_AT_ONCE) - 1
            for user in client.zrange(_USERS, 0, last):
                client.delete(*_keys_of(user.decode("utf-8")))
                client.zrem(_USERS, user)

    def close(self) -> None:
        self._closed = True
        for patience, lock in self._locks.items():
            with lock, suppress(*ERRORS):
                if (client := self._clients.pop(patience, None)) is not None:
                    client.close()

    def _client(self, patience: float) -> Any:  # much of the library's classes has no types
        with self._locks[patience]:
            if self._closed:
                raise StatesUnavailableError(f"{self._place}: has been closed")
            if patience not in self._clients:
                plain = self._url.replace(CLUSTER, "", 1)
                kind: Any = redis.Redis if plain == self._url else redis.RedisCluster
                times = {"socket_timeout": patience, "socket_connect_timeout": patience}
                self._clients[patience] = kind.from_url(plain, **self._options, **times)
            return self._clients[patience]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except ERRORS as error:
            raise StatesUnavailableError(f"{self._place}: {error}") from error


def _keys_of(user: str) -> tuple[str, str]:
    return f"{tag_of(user)}:state", f"{tag_of(user)}:state-rows"
