"""Histories keep what they acknowledged: one contract, a real SQLite file, a real Redis, a real cluster."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from recprune.serve.histories.histories import (
    Event,
    Histories,
    HistoriesUnavailableError,
    keys_kept,
    open_histories,
)
from recprune.types import InputError
from tests.support.histories_places import MOST, RedisCluster, RedisServer, bought, opened


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.kill()


@pytest.fixture(params=["sqlite", "redis", "cluster"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/histories.db"
    if request.param == "cluster":
        cluster: RedisCluster = request.getfixturevalue("shared_cluster")
        for one in cluster.servers:
            with redis.Redis(port=one.port) as client:
                client.flushall()
        return cluster.url
    server: RedisServer = request.getfixturevalue("shared_server")
    with redis.Redis(port=server.port) as client:
        client.flushall()
    return server.url


@pytest.fixture
def histories(url: str) -> Iterator[Histories]:
    with opened(url) as histories:
        yield histories


def test_a_history_is_in_order_of_time_and_not_of_arrival(histories: Histories) -> None:
    histories.ready()
    assert histories.history("ann") == []
    assert histories.append([Event("ann", "b", 2.0), Event("bob", "x", 9.0)]) == 2
    assert histories.append([Event("ann", "c", 2.5), Event("ann", "a", -1.5)]) == 2
    assert histories.history("ann") == ["a", "b", "c"]
    assert histories.dated_history("ann") == [("a", -1.5), ("b", 2.0), ("c", 2.5)]
    assert histories.history("bob") == ["x"]
    assert histories.history("an") == []


def test_equal_timestamps_are_in_order_of_arrival(histories: Histories) -> None:
    histories.append([Event("ann", item, 7.0) for item in "zay"])
    histories.append([Event("ann", "b", 7.0)])
    histories.append([Event("ann", "z", 7.0)])
    assert histories.history("ann") == ["z", "a", "y", "b", "z"], "an item may occur again"


@pytest.mark.parametrize("start", [1_700_000_000.0, 0.1, -1e9, 1e300])
def test_the_smallest_difference_of_time_counts(url: str, start: float) -> None:
    later = math.nextafter(start, math.inf)
    with opened(url) as histories:
        histories.append([Event("ann", "late", later), Event("ann", "early", start)])
        assert histories.history("ann") == ["early", "late"]


def test_the_same_key_is_the_same_event(histories: Histories) -> None:
    first = Event("ann", "a", 1.0, key="k")
    assert histories.append([first, first, Event("ann", "b", 2.0, key="l")]) == 2
    assert histories.append([Event("ann", "other", 3.0, key="k")]) == 0, "the first one stays"
    assert histories.append([Event("bob", "a", 1.0, key="k")]) == 1, "keys are a user's own"
    assert histories.append([Event("ann", "c", 3.0), Event("ann", "c", 3.0)]) == 2, "no key"
    assert histories.append([Event("ann", "d", 4.0, key="")]) == 1, "an empty key is a key"
    assert histories.append([Event("ann", "d", 4.0, key="")]) == 0
    assert histories.history("ann") == ["a", "b", "c", "c", "d"]
    assert histories.history("bob") == ["a"]


def test_the_oldest_items_are_dropped(url: str) -> None:
    with opened(url) as histories:
        assert histories.append(bought("ann", "abcdefg")) == 7
        assert histories.append(bought("bob", "xyz")) == 3
        assert histories.history("ann") == list("cdefg")
        assert histories.append([Event("ann", "old", -1.0)]) == 1
        assert histories.history("ann") == list("cdefg"), "too old for a full history"
        histories.append([Event("ann", "h", 3.5)])
        assert histories.history("ann") == list("dhefg")
    with opened(url, most=2) as fewer:
        assert fewer.history("ann") == ["f", "g"]
        fewer.append([Event("bob", "w", 9.0)])
    with opened(url) as histories:
        assert histories.history("bob") == ["z", "w"], "what is over the bound is gone, not hidden"


def test_a_key_outlives_its_event_but_not_for_ever(histories: Histories) -> None:
    kept = keys_kept(MOST)
    histories.append([Event("ann", str(at), at, key=str(at)) for at in range(kept + 1)])
    assert histories.history("ann") == [str(at) for at in range(kept - 4, kept + 1)]
    # Key 1 is the oldest one that is remembered, though its event is long gone.
    assert histories.append([Event("ann", "again", 1e6, key="1")]) == 0
    assert histories.append([Event("ann", "again", 1e6, key="0")]) == 1
    assert histories.append([Event("ann", "again", 1e6, key="1")]) == 1, "0 has pushed it out"


ODD = ["", " ", "a b\n\t", "é", "e\u0301", "日本", "🍵\u200d", "a\x00b", "a\x00c", "'; DROP TABLE events--",
       "{x}:*", "%s", "=", "00", "0", "-1", "\x7f\uffff", "x" * 5000, "}", "}{", "{", "{}", "{=0}"]  # fmt: skip


def test_odd_names_are_kept_apart_and_come_back_as_they_were(histories: Histories) -> None:
    for at, name in enumerate(ODD):
        assert histories.append([Event(name, ODD[at - 1], 1.0, key=name)]) == 1
        assert histories.append([Event(name, name, 2.0, key=name + "+")]) == 1
        assert histories.append([Event(name, name, 2.0, key=name)]) == 0
    for at, name in enumerate(ODD):
        assert histories.history(name) == [ODD[at - 1], name]
    keys = [Event("keys", name, 3.0, key=name) for name in ODD]
    assert histories.append(keys) == len(ODD)


def test_nothing_to_append_is_fine(histories: Histories) -> None:
    assert histories.append([]) == 0
    assert histories.append(()) == 0


def test_a_huge_batch_is_one_step(histories: Histories) -> None:
    users, each = 500, 40
    events = [
        Event(f"user {user}", f"item {at}", float(at), key=str(at))
        for at in range(each)
        for user in range(users)
    ]
    assert histories.append(events) == users * each
    assert histories.append(events[: users * 3]) == 0
    last = [f"item {at}" for at in range(each - MOST, each)]
    assert all(histories.history(f"user {user}") == last for user in range(users))


class SlowTwin:
    """The specification, in lists."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.events: dict[str, list[tuple[float, int, str]]] = {}
        self.keys: dict[str, list[str]] = {}
        self.arrivals = itertools.count()

    def append(self, events: Sequence[Event]) -> int:
        new = 0
        for event in events:
            keys = self.keys.setdefault(event.user, [])
            if event.key is not None and event.key in keys:
                continue
            if event.key is not None:
                keys.append(event.key)
            self.events.setdefault(event.user, []).append(
                (event.timestamp, next(self.arrivals), event.item)
            )
            new += 1
        for user in {event.user for event in events}:
            self.events[user] = sorted(self.events[user])[-self.most :]
            self.keys[user] = self.keys[user][-keys_kept(self.most) :]
        return new

    def history(self, user: str) -> list[str]:
        return [item for _, _, item in self.events.get(user, [])]


def test_any_sequence_of_batches_ends_as_in_the_slow_twin(histories: Histories) -> None:
    rng = random.Random(5)
    twin = SlowTwin(MOST)
    for _ in range(60):
        batch = [
            Event(
                rng.choice("abc"),
                str(rng.randrange(30)),
                float(rng.randrange(12)),
                key=rng.choice([None, str(rng.randrange(100))]),
            )
            for _ in range(rng.randrange(9))
        ]
        assert histories.append(batch) == twin.append(batch)
        assert [histories.history(user) for user in "abc"] == [twin.history(u) for u in "abc"]


def test_what_was_appended_is_seen_by_others_and_after_reopening(url: str) -> None:
    with opened(url) as one, opened(url) as other:
        for at, item in enumerate("abc"):
            (one, other)[at % 2].append([Event("ann", item, 1.0, key=item)])
            assert one.history("ann") == other.history("ann") == list("abc"[: at + 1])
    with opened(url) as again:
        assert again.append([Event("ann", "a", 2.0, key="a")]) == 0
        again.append([Event("ann", "d", 1.0)])
        assert again.history("ann") == list("abcd"), "arrivals are counted on"


def test_threads_agree_on_who_was_first(url: str) -> None:
    with opened(url, most=400) as histories, ThreadPoolExecutor(8) as threads:
        together = threading.Barrier(8)

        def write(thread: int) -> int:
            together.wait()
            new = 0
            for at in range(20):
                new += histories.append([Event("ann", f"{at}", float(at), key=f"{at}")])
                new += histories.append([Event("ann", f"{thread}.{at}", 100.0)])
                assert f"{thread}.{at}" in histories.history("ann")
            return new

        assert sum(threads.map(write, range(8))) == 20 + 8 * 20
        history = histories.history("ann")
    assert history[:20] == [str(at) for at in range(20)]
    for thread in range(8):
        mine = [item for item in history[20:] if item.startswith(f"{thread}.")]
        assert mine == [f"{thread}.{at}" for at in range(20)], "each in its own order"


WRITER = """
import sys
from recprune.serve.histories.histories import Event, open_histories
url, me, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("here", flush=True)
sys.stdin.readline()
histories = open_histories(url, 100000)
new = 0
for at in range(count):
    new += histories.append([Event("ann", f"both {at}", 1.0 * at, key=f"{at}"),
                             Event("ann", f"{me} {at}", 1.0 * at)])
    print(at, flush=True)
print("new", new, flush=True)
"""


def start_writer(url: str, me: str, count: int) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, url, me, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "here\n"
    return writer


def test_processes_agree_on_who_was_first(url: str) -> None:
    """They also make the SQLite file at the same moment."""
    writers = [start_writer(url, me, 40) for me in ("x", "y", "z")]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    said = [writer.communicate(timeout=60)[0].split()[-1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert sum(map(int, said)) == 40 + 3 * 40
    with opened(url, most=1000) as histories:
        history = histories.history("ann")
    assert sorted(history) == sorted(
        f"{who} {at}" for who in ("both", "x", "y", "z") for at in range(40)
    )
    assert [int(item.split()[1]) for item in history] == [at for at in range(40) for _ in range(4)]


def test_what_a_killed_writer_acknowledged_is_there(url: str) -> None:
    writer = start_writer(url, "x", 10**6)
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write("go\n")
    writer.stdin.flush()
    acknowledged = [int(writer.stdout.readline()) for _ in range(100)]
    writer.kill()
    acknowledged += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
    writer.wait()
    writer.stdin.close()
    writer.stdout.close()
    with opened(url, most=10**6) as histories:
        history = histories.history("ann")
        kept = len(history) // 2
        # One more may have been written than was told; a batch is whole or absent.
        assert kept in (len(acknowledged), len(acknowledged) + 1)
        assert history == [f"{who} {at}" for at in range(kept) for who in ("both", "x")]
        assert histories.append([Event("ann", "next", 1e9)]) == 1


def test_closed_is_closed(url: str) -> None:
    histories = open_histories(url, MOST)
    histories.append(bought("ann", "a"))
    histories.close()
    histories.close()
    with pytest.raises(HistoriesUnavailableError, match="closed"):
        histories.append(bought("ann", "b"))
    with pytest.raises(HistoriesUnavailableError, match="closed"):
        histories.history("ann")


@pytest.mark.parametrize(
    "url",
    ["", "histories.db", "sqlite://histories.db", "sqlite:///", "mysql://ann:secret@host/db",
     "redis:", "redis://", "redis:///0", "redis://ann:secret@host:port", "redis://ann:secret@host/db",
     "redis://ann:secret@host:99999", "redis://ann:secret@[host", "redis://host/0#secret",
     "redis+cluster://ann:secret@host/1", "redis+cluster://", "redis+clusters://host", "secret"],
)  # fmt: skip
def test_a_bad_url_is_told_what_was_expected(url: str) -> None:
    with pytest.raises(InputError, match="expected .*redis://") as refusal:
        open_histories(url, MOST)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("sockettimeout=1", "'sockettimeout'.* expected socket_timeout"),
        ("retry=5", "'retry'.* expected socket_timeout"),
        ("socket_timeout=soon", "socket_timeout"),
        ("socket_timeouts=1", "socket_timeouts"),
        ("ssl_colour=red", "ssl_colour"),
        ("socket_timeout", "expected redis://"),
    ],
)
def test_an_unknown_option_in_the_url_is_named(options: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as refusal:
        open_histories(f"rediss://ann:secret@host/0?{options}", MOST)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("most", [0, -1, True, 2.5, "5"])
def test_the_bound_must_be_positive(most: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="most is .* expected a positive number"):
        open_histories(f"sqlite:///{tmp_path}/histories.db", most)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        (("ann", "a", float("nan"), None), "timestamp is nan, expected a finite number"),
        (("ann", "a", float("-inf"), None), "timestamp is -inf"),
        (("ann", "a", 10**400, None), "timestamp is 1000"),
        (("ann", "a", "1", None), "timestamp is '1'"),
        (("ann", "a", True, None), "timestamp is True"),
        ((7, "a", 1.0, None), "user is 7, expected a string"),
        (("ann", 7, 1.0, None), "item is 7, expected a string"),
        (("ann", "a", 1.0, 7), "key is 7, expected a string"),
        (("a\ud800", "a", 1.0, None), "user .* is not valid Unicode"),
        (("ann", "a\udfff", 1.0, None), "item .* is not valid Unicode"),
        (("ann", "a", 1.0, "\ud83c"), "key .* is not valid Unicode"),
    ],
)
def test_an_event_that_cannot_be_kept_is_refused(event: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Event(*event)


def test_a_user_that_cannot_exist_is_refused(histories: Histories) -> None:
    with pytest.raises(InputError, match="user .* is not valid Unicode"):
        histories.history("\ud800")


def test_what_comes_last_comes_last_whatever_the_clock_says(url: str) -> None:
    with opened(url) as histories:
        # A clock that is an hour ahead, then right, then a day behind.
        for number, clock in enumerate((103_600.0, 100_000.0, 13_600.0)):
            assert histories.append([Event("ann", str(number), clock, comes_last=True)]) == 1
        assert histories.history("ann") == ["0", "1", "2"]
        histories.append([Event("ann", "a", 99_000.0)])
        histories.append(
            [Event("ann", letter, at, comes_last=True) for at, letter in enumerate("xy")]
        )
        # Full by now: one that the clock puts at the beginning would be gone at once.
        assert histories.dated_history("ann") == [
            (item, 103_600.0) for item in ("0", "1", "2", "x", "y")
        ]
        histories.append([Event("bob", "b", 5.0, comes_last=True)])
        histories.append([Event("bob", "c", 6.5, comes_last=True)])
        assert histories.dated_history("bob") == [("b", 5.0), ("c", 6.5)]
