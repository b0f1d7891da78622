"""Histories in a Redis server, shared by any number of machines.

How durable an acknowledged event is, the server decides: it survives `kill -9` of the server and a
power cut with `appendonly yes` and `appendfsync always`. With Redis' own `everysec` the last second
or two may be lost, without `appendonly` all since the last snapshot. `maxmemory-policy` must be
`noeviction`, or Redis forgets histories to make room.

Per user there are two sorted sets: `events` with score timestamp and member arrival number and
item, so that equal timestamps fall back on the order of arrival; and `keys` with score arrival
number and member idempotency key; beside them `arrivals`, the last number given out. Their names
have the user in braces, which makes a cluster keep them in one slot.

A single server (with replicas, if you like) runs one script for a batch, which is kept whole or not
at all. A cluster keeps users apart: there a script is of one user, and so is what is kept whole.

Version 0.1.0 had names without braces, on single servers only. What it has stored is read as part
of a history, and becomes part of it with the user's next event.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

from recprune.serve.histories.histories import (
    EXPECTED,
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

_READY = "recprune:ready"
_OPTIONS = ("socket_timeout", "socket_connect_timeout", "ssl_")
_NO_ENTRY = "wrong user or password, or none given"
_DIGITS = 16  # of an arrival number: as many as Lua's numbers count exactly
_TRIED_TAGS = 1000  # enough to have one in a slot of every master that has a fair share of them
CLUSTER = "+cluster"  # after the scheme of a url
# What the library raises; ValueError where the answer is not in Redis' protocol.
ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException, OSError, ValueError)
_Call: TypeAlias = tuple[Any, ...]  # of EVAL: the script, how many keys, keys, arguments
# Answers of a cluster's server that has not run a command, as the slot is elsewhere or on its way.
_NOT_RUN = (redis.exceptions.MovedError, redis.exceptions.AskError, redis.exceptions.TryAgainError)

# Redis runs a script as one step that nothing else comes between, and logs it as one transaction.
# KEYS: for each user `events`, `keys` and `arrivals`, and on a single server those of 0.1.0, which
# get new numbers, as other users had the same counter.
# ARGV: how many events and how many keys to keep, how many KEYS a user has; then for each event:
# which user (0, 1, …), item, timestamp (after a ">": at least that of the newest), and "=" with the
# key after it, or nothing.
_APPEND = f"""
local width = tonumber(ARGV[3])
local function number(user)
  return redis.call('INCR', KEYS[user + 3])
end
local function add(user, timestamp, arrival, item)
  redis.call('ZADD', KEYS[user + 1], timestamp, string.format('%0{_DIGITS}d', arrival) .. item)
end
if width > 3 then
  for user = 0, #KEYS - 1, width do
    local found = redis.call('ZRANGE', KEYS[user + 4], 0, -1, 'WITHSCORES')
    local order = {{}}
    for at = 1, #found, 2 do order[#order + 1] = {{found[at], found[at + 1]}} end
    table.sort(order, function(one, other)
      return string.sub(one[1], 1, {_DIGITS}) < string.sub(other[1], 1, {_DIGITS})
    end)
    for _, event in ipairs(order) do
      add(user, event[2], number(user), string.sub(event[1], {_DIGITS} + 1))
    end
    local names = redis.call('ZRANGE', KEYS[user + 5], 0, -1)
    for _, name in ipairs(names) do
      redis.call('ZADD', KEYS[user + 2], 'NX', number(user), name)
    end
    -- Not where there is nothing: after a DEL, Redis lets a script write though memory is full.
    if #order + #names > 0 then redis.call('DEL', KEYS[user + 4], KEYS[user + 5]) end
  end
end
local new = 0
for at = 4, #ARGV, 4 do
  local user = width * tonumber(ARGV[at])
  local key = ARGV[at + 3]
  local name = string.sub(key, 2)
  if key == '' or not redis.call('ZSCORE', KEYS[user + 2], name) then
    local arrival = number(user)
    local timestamp = ARGV[at + 2]
    if string.sub(timestamp, 1, 1) == '>' then
      timestamp = string.sub(timestamp, 2)
      local newest = redis.call('ZRANGE', KEYS[user + 1], -1, -1, 'WITHSCORES')[2]
      if newest and tonumber(newest) > tonumber(timestamp) then timestamp = newest end
    end
    add(user, timestamp, arrival, ARGV[at + 1])
    if key ~= '' then redis.call('ZADD', KEYS[user + 2], arrival, name) end
    new = new + 1
  end
end
for user = 0, #KEYS - 1, width do
  redis.call('ZREMRANGEBYRANK', KEYS[user + 1], 0, -1 - tonumber(ARGV[1]))
  redis.call('ZREMRANGEBYRANK', KEYS[user + 2], 0, -1 - tonumber(ARGV[2]))
end
return new
"""


class RedisHistories:
    """Histories in the Redis server or cluster at `url`, first spoken to by the first call."""

    def __init__(self, url: str, most: int, password: str | None = None) -> None:
        self._most = most
        self._closed = False
        self._place = place_of(url)
        options = {
            "password": password,
            "protocol": 2,  # every server and proxy speaks it, and no more is needed
            "socket_timeout": PATIENCE_S,
            "socket_connect_timeout": PATIENCE_S,
        }
        plain = url.replace(CLUSTER, "", 1)
        try:
            # A repeated append without keys would count twice: whether to repeat is for the
            # client to say. A connection that died while idle is replaced in any case.
            server = redis.Redis.from_url(plain, retry=Retry(NoBackoff(), 0), **options)
            pool = server.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # not connected: are the options known?
        except (TypeError, ValueError, redis.RedisError) as error:
            raise InputError(f"{self._place}: the url's options after '?': {error}") from None
        self._servers = _Cluster(plain, options) if plain != url else _SingleServer(server)

    def append(self, events: Sequence[Event]) -> int:
        """Keep the events; return how many were new."""
        if not events:
            return 0
        bounds = [self._most, keys_kept(self._most)]
        with self._translated():
            return self._servers.append(bounds, events)

    def history(self, user: str) -> list[str]:
        return [item for item, _ in self.dated_history(user)]

    def dated_history(self, user: str) -> list[tuple[str, float]]:
        check_text("user", user)
        with self._translated():
            members = self._servers.newest(user, self._most)
            return [(member[_DIGITS:].decode("utf-8"), score) for member, score in members]

    def ready(self) -> None:
        """Raise HistoriesUnavailableError unless all servers take writes now."""
        with self._translated():
            self._servers.write()

    def close(self) -> None:
        self._closed = True
        self._servers.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        if self._closed:  # redis-py would connect again
            raise HistoriesUnavailableError(f"{self._place}: has been closed")
        try:
            yield
        except ERRORS as error:
            raise HistoriesUnavailableError(f"{self._place}: {_reason(error)}") from error


class _SingleServer:
    """A single server, on which one script may touch all users."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._script: Callable[..., Any] = client.register_script(_APPEND)

    def append(self, bounds: list[int], events: Sequence[Event]) -> int:
        users = list(dict.fromkeys(event.user for event in events))
        keys = [key for user in users for key in (*_keys_of(user), *_old_keys_of(user))]
        return int(self._script(keys=keys, args=_arguments(bounds, 5, users, events)))

    def newest(self, user: str, most: int) -> list[tuple[bytes, float]]:
        both = self._client.pipeline(transaction=True)  # else an event could move between the two
        for key in (_old_keys_of(user)[0], _keys_of(user)[0]):
            both.zrange(key, -most, -1, withscores=True)
        old, new = _without_errors(both.execute(raise_on_error=False))
        return sorted(old + new, key=lambda event: event[1])[-most:] if old else new

    def write(self) -> None:
        self._client.incr(_READY)

    def close(self) -> None:
        self._client.close()


class _Cluster:
    """Several servers, on which a script can touch one user only."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._url = url
        self._options = options
        self._lock = threading.Lock()
        self._client: redis.RedisCluster | None = None

    def append(self, bounds: list[int], events: Sequence[Event]) -> int:
        cluster = self._connected()
        by_user: dict[str, list[Event]] = {}
        for event in events:
            by_user.setdefault(event.user, []).append(event)
        by_server: dict[str, list[_Call]] = {}
        for user, theirs in by_user.items():
            keys = _keys_of(user)
            call = (_APPEND, 3, *keys, *_arguments(bounds, 3, [user], theirs))
            by_server.setdefault(cluster.get_node_from_key(keys[0]).name, []).append(call)
        return sum(self._run(cluster, server, calls) for server, calls in by_server.items())

    def _run(self, cluster: Any, server: str, calls: list[_Call]) -> int:
        """Run scripts of users that one server has; return the sum of what they return.

        The library's pipeline over servers would send again what it has no answer to, and count
        it twice. Here only what was certainly not run is sent again, to where it belongs.
        """
        pipeline = cluster.get_redis_connection(cluster.get_node(node_name=server)).pipeline(False)
        for call in calls:
            pipeline.eval(*call)
        try:
            answers = pipeline.execute(raise_on_error=False)
        except (redis.ConnectionError, redis.TimeoutError):
            with suppress(*ERRORS):
                cluster.nodes_manager.initialize()  # another server may have the slots by now
            raise
        for at, answer in enumerate(answers):
            if isinstance(answer, _NOT_RUN):
                answers[at] = cluster.eval(*calls[at])
        return sum(map(int, _without_errors(answers)))

    def newest(self, user: str, most: int) -> list[tuple[bytes, float]]:
        found: Any = self._connected().zrange(_keys_of(user)[0], -most, -1, withscores=True)
        return list(found)

    def write(self) -> None:
        """Write one number on every master."""
        cluster = self._connected()
        tagged = (f"{_READY}:{{{number}}}" for number in range(_TRIED_TAGS))
        for key in {cluster.get_node_from_key(key).name: key for key in tagged}.values():
            cluster.incr(key)

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()

    def _connected(self) -> Any:  # much of the library's class has no types
        """Return the client, which asks a server for the others when it is made."""
        with self._lock:
            if self._client is None:
                self._client = redis.RedisCluster.from_url(
                    self._url, retry=Retry(NoBackoff(), 0), **self._options
                )
            return self._client


def _arguments(
    bounds: list[int], width: int, users: list[str], events: Sequence[Event]
) -> list[str | int]:
    numbers = {user: number for number, user in enumerate(users)}
    arguments: list[str | int] = [*bounds, width]
    for event in events:
        key = "" if event.key is None else f"={event.key}"
        timestamp = f"{'>' if event.comes_last else ''}{float(event.timestamp)!r}"
        arguments += [numbers[event.user], event.item, timestamp, key]
    return arguments


def _keys_of(user: str) -> tuple[str, str, str]:
    """Return the names of the events, keys and arrivals."""
    tag = tag_of(user)
    return f"{tag}:events", f"{tag}:keys", f"{tag}:arrivals"


def tag_of(user: str) -> str:
    """Return what the names of all that is a user's begin with.

    Braces that have nothing between them would be none to Redis, hence the "=".
    """
    return f"recprune:{{={user}}}"


def _old_keys_of(user: str) -> tuple[str, str]:
    return f"recprune:events:{user}", f"recprune:keys:{user}"


def _without_errors(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def place_of(url: str) -> str:
    """Return the url without its secrets, or say what is wrong with it."""
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        options = parse_qs(parts.query, strict_parsing=bool(parts.query))
        in_cluster = parts.scheme.endswith(CLUSTER)
        database = r"/?" if in_cluster else r"(/[0-9]*)?"  # a cluster has none but the first
        if not parts.hostname or not re.fullmatch(database, parts.path) or parts.fragment:
            raise ValueError
    except ValueError:
        raise InputError(
            f"the url of the histories is not one of Redis, expected {EXPECTED}"
        ) from None
    for option in options:
        if not option.startswith(_OPTIONS):
            raise InputError(
                f"the url of the histories has an option {option!r:.40} after '?',"
                " expected socket_timeout, socket_connect_timeout or ssl_… (as in redis-py)"
            )
    what = "Redis Cluster" if in_cluster else "Redis"
    return f"{what} at {parts.hostname}:{port}"


def _reason(error: Exception) -> str:
    """Say in words what may be known of it; Redis' own words are in the cause."""
    match error:
        case redis.exceptions.RedisClusterException(__cause__=redis.RedisError() as cause):
            return _reason(cause)  # that of the last server that was asked for the others
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
        case redis.ConnectionError() | OSError() | redis.exceptions.RedisClusterException():
            return f"cannot be reached: {error}"
        case _:
            return f"refused: {error}"
