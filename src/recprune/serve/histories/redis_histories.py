"""Histories in a Redis server, shared by any number of machines.

How durable an acknowledged event is, the server decides: it survives `kill -9` of the server and a
power cut with `appendonly yes` and `appendfsync always`. With Redis' own `everysec` the last second
or two may be lost, without `appendonly` all since the last snapshot. `maxmemory-policy` must be
`noeviction`, or Redis forgets histories to make room.

The server is a single one (with replicas, if you like) and not a cluster: a batch of several users
is one script, and a cluster keeps their keys apart. Per user there are two sorted sets: `events`
with score timestamp and member arrival number and item, so that equal timestamps fall back on the
order of arrival; and `keys` with score arrival number and member idempotency key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from recprune.serve.histories.histories import (
    PATIENCE_S,
    Event,
    HistoriesUnavailableError,
    check_text,
    keys_kept,
)
from recprune.types import InputError, needs_extra

with needs_extra("serve"):
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

_ARRIVALS = "recprune:arrivals"
_OPTIONS = ("socket_timeout", "socket_connect_timeout", "ssl_")
_NO_ENTRY = "wrong user or password, or none given"
_DIGITS = 16  # of an arrival number: as many as Lua's numbers count exactly

# Redis runs a script as one step that nothing else comes between, and logs it as one transaction.
# KEYS: the arrival counter, then `events` and `keys` of each user.
# ARGV: how many events and how many keys to keep; then for each event: which user (0, 1, …), item,
# timestamp, and "=" with the key after it, or nothing.
_APPEND = f"""
local new = 0
for at = 3, #ARGV, 4 do
  local user = 2 * tonumber(ARGV[at])
  local arrival = redis.call('INCR', KEYS[1])
  local key = ARGV[at + 3]
  local name = string.sub(key, 2)
  if key == '' or not redis.call('ZSCORE', KEYS[user + 3], name) then
    local member = string.format('%0{_DIGITS}d', arrival) .. ARGV[at + 1]
    redis.call('ZADD', KEYS[user + 2], ARGV[at + 2], member)
    if key ~= '' then redis.call('ZADD', KEYS[user + 3], arrival, name) end
    new = new + 1
  end
end
for at = 2, #KEYS, 2 do
  redis.call('ZREMRANGEBYRANK', KEYS[at], 0, -1 - tonumber(ARGV[1]))
  redis.call('ZREMRANGEBYRANK', KEYS[at + 1], 0, -1 - tonumber(ARGV[2]))
end
return new
"""


class RedisHistories:
    """Histories in the Redis server at `url`, which is first spoken to by the first call."""

    def __init__(self, url: str, most: int, password: str | None = None) -> None:
        self._most = most
        self._closed = False
        self._place = _place(url)
        try:
            self._redis = redis.Redis.from_url(
                url,
                password=password,
                # A repeated append without keys would count twice: whether to repeat is for the
                # client to say. A connection that died while idle is replaced in any case.
                retry=Retry(NoBackoff(), 0),
                protocol=2,  # every server and proxy speaks it, and no more is needed
                socket_timeout=PATIENCE_S,
                socket_connect_timeout=PATIENCE_S,
            )
            pool = self._redis.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # not connected: are the options known?
        except (TypeError, ValueError, redis.RedisError) as error:
            raise InputError(f"{self._place}: the url's options after '?': {error}") from None
        self._append: Callable[..., Any] = self._redis.register_script(_APPEND)

    def append(self, events: Sequence[Event]) -> int:
        """Keep the events in one script; return how many were new."""
        if not events:
            return 0
        users = {user: at for at, user in enumerate(dict.fromkeys(event.user for event in events))}
        keys = [_ARRIVALS]
        for user in users:
            keys += [_events_of(user), f"recprune:keys:{user}"]
        arguments: list[str | int] = [self._most, keys_kept(self._most)]
        for event in events:
            key = "" if event.key is None else f"={event.key}"
            arguments += [users[event.user], event.item, repr(float(event.timestamp)), key]
        with self._translated():
            return int(self._append(keys=keys, args=arguments))

    def history(self, user: str) -> list[str]:
        return [item for item, _ in self.dated_history(user)]

    def dated_history(self, user: str) -> list[tuple[str, float]]:
        check_text("user", user)
        with self._translated():
            members: Any = self._redis.zrange(_events_of(user), -self._most, -1, withscores=True)
            return [(member[_DIGITS:].decode("utf-8"), score) for member, score in members]

    def ready(self) -> None:
        """Raise HistoriesUnavailableError unless the server takes writes now."""
        with self._translated():
            self._redis.incr(_ARRIVALS)

    def close(self) -> None:
        self._closed = True
        self._redis.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        if self._closed:  # redis-py would connect again
            raise HistoriesUnavailableError(f"{self._place}: has been closed")
        try:
            yield
        except (redis.RedisError, OSError, ValueError) as error:  # ValueError: not Redis' protocol
            raise HistoriesUnavailableError(f"{self._place}: {_reason(error)}") from error


def _events_of(user: str) -> str:
    return f"recprune:events:{user}"


def _place(url: str) -> str:
    """Return the url without its secrets, or say what is wrong with it."""
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        options = parse_qs(parts.query, strict_parsing=bool(parts.query))
        if not parts.hostname or not re.fullmatch(r"(/[0-9]*)?", parts.path) or parts.fragment:
            raise ValueError
    except ValueError:
        raise InputError(
            "the url of the histories is not one of Redis,"
            " expected redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]"
        ) from None
    for option in options:
        if not option.startswith(_OPTIONS):
            raise InputError(
                f"the url of the histories has an option {option!r:.40} after '?',"
                " expected socket_timeout, socket_connect_timeout or ssl_… (as in redis-py)"
            )
    return f"Redis at {parts.hostname}:{port}"


def _reason(error: Exception) -> str:
    """Say in words what may be known of it; Redis' own words are in the cause."""
    match error:
        case redis.AuthenticationError():
            return _NO_ENTRY
        case redis.ResponseError() if "unauthenticated" in str(error):  # a long command, unread
            return _NO_ENTRY
        case redis.BusyLoadingError():
            return "is still loading its data"
        case redis.OutOfMemoryError():
            return "has no memory left"
        case redis.ReadOnlyError():
            return "is a replica that takes no writes"
        case redis.TimeoutError():
            return "does not answer in time"
        case redis.InvalidResponse() | ValueError():
            return "does not answer as Redis does"
        case redis.ConnectionError() | OSError():
            return f"cannot be reached: {error}"
        case _:
            return f"refused: {error}"
