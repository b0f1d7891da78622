"""What a user had so far: one small interface over the places where it can be kept.

What holds for every place:

- An event that `append` has returned for is durable (Redis: see `redis_histories`). A batch is
  kept whole or not at all (in a Redis Cluster: what it has of each user). If `append` raises, the
  events may or may not have been kept (an answer can be lost on its way), so a client that cannot
  bear a repetition gives each event a key.
- A history is in order of timestamp, then of arrival, and holds the newest `most` items. An event
  that `comes_last` has at least the timestamp of the user's newest one: clocks may be set back.
- A key names an event of a user: a second event of that user with the same key is ignored, even
  from another process at the same moment. A key outlives its event in the history; each user's
  latest `keys_kept(most)` keys, by arrival, are remembered.
- The number of users is not bounded.

The objects may be used by many threads. Processes share the place, not the object: each opens its
own, after a fork.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from recprune.types import InputError, RecpruneError

PATIENCE_S = 5.0  # how long a call waits for a lock or an answer before it gives up

SQLITE = "sqlite:///"
_REDIS = ("redis://", "rediss://", "redis+cluster://", "rediss+cluster://")
EXPECTED = (  # of a url of Redis
    "redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE] or redis+cluster://[USER:PASSWORD@]HOST[:PORT]"
)


class HistoriesUnavailableError(RecpruneError):
    """Histories cannot be read or written just now; a later call may succeed by itself."""


@dataclass(frozen=True)
class Event:
    """A user had an item at a time, in seconds since 1970."""

    user: str
    item: str
    timestamp: float
    key: str | None = None  # the same key again is the same event again
    comes_last: bool = False  # not before anything that the user had: its time is that of a clock

    def __post_init__(self) -> None:
        check_text("user", self.user)
        check_text("item", self.item)
        if self.key is not None:
            check_text("key", self.key)
        if not _is_finite_number(self.timestamp):
            raise InputError(f"timestamp is {self.timestamp!r:.40}, expected a finite number")


class Histories(Protocol):
    """The items that users had, in order of time."""

    def append(self, events: Sequence[Event]) -> int:
        """Keep the events and return how many were new, which is all but those with a known key.

        An event older than a full history counts as new although nothing of it is to be seen.
        """

    def history(self, user: str) -> list[str]:
        """Return the user's newest items, oldest of them first; nothing for an unknown user."""

    def dated_history(self, user: str) -> list[tuple[str, float]]:
        """Return the same with the timestamp of each."""

    def ready(self) -> None:
        """Raise HistoriesUnavailableError unless an event could be kept now.

        It writes a number to find out, so it costs about as much as an event.
        """

    def close(self) -> None:
        """Let go of files and connections."""


def open_histories(url: str, most: int, password: str | None = None) -> Histories:
    """Open the histories at `url`, which keep the newest `most` items of each user.

    The `password` is that of Redis, where the url has none.

    `sqlite:///FILE` is a path as it stands, so `sqlite:////var/lib/h.db` is absolute and
    `sqlite:///h.db` is in the working folder; the file is made if there is none. What can never
    work is an error now. What may come back, such as a Redis that is not up yet or a full disk, is
    an error of the calls that need it.
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise InputError(f"most is {most!r}, expected a positive number of items per user")
    if isinstance(url, str) and url.startswith(SQLITE) and len(url) > len(SQLITE):
        from recprune.serve.histories.sqlite_histories import SqliteHistories

        return SqliteHistories(url.removeprefix(SQLITE), most)
    if isinstance(url, str) and url.startswith(_REDIS):
        from recprune.serve.histories.redis_histories import RedisHistories

        return RedisHistories(url, most, password)
    # Whatever it is, it may hold a password: only the scheme is repeated.
    scheme = url.partition(":")[0] if isinstance(url, str) and ":" in url else "no scheme"
    raise InputError(
        f"the url of the histories begins with {scheme!r:.20}, expected sqlite:///FILE, {EXPECTED}"
    )


def keys_kept(most: int) -> int:
    """Return how many idempotency keys of a user are remembered.

    More than there are items, since a client may repeat a request after others have filled the
    history; the least is for services with short histories.
    """
    return max(4 * most, 1000)


def check_text(name: str, value: str) -> None:
    """Refuse what no place can keep: JSON can carry half a character, UTF-8 cannot."""
    if not isinstance(value, str):
        raise InputError(f"{name} is {value!r:.40}, expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{name} {value!r:.40} is not valid Unicode text") from None


def _is_finite_number(value: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
