"""Histories in a real Redis: gone and back, locked, full, and not Redis at all."""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import redis

from recprune.serve.histories.histories import (
    Event,
    Histories,
    HistoriesUnavailableError,
    keys_kept,
    open_histories,
)
from tests.support.histories_places import (
    MOST,
    RedisCluster,
    RedisServer,
    bought,
    free_port,
    opened,
)

PASSWORD = "pass:word/with@signs"


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that a test may hurt."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def test_a_redis_that_is_not_up_yet_is_waited_for(tmp_path: Path) -> None:
    with RedisLater(tmp_path) as later, opened(later.url) as histories:
        for call in (histories.ready, lambda: histories.history("ann")):
            with pytest.raises(HistoriesUnavailableError, match=f"{later.port}: cannot be reached"):
                call()
        later.start()
        histories.ready()
        assert histories.history("ann") == []


class RedisLater(RedisServer):
    """A server whose place is known before it runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kill()

    def __enter__(self) -> RedisLater:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def test_redis_killed_and_back_has_what_was_acknowledged(own_server: RedisServer) -> None:
    with (
        opened(own_server.url, most=10_000) as histories,
        ThreadPoolExecutor(4) as threads,
    ):
        acknowledged: list[str] = []
        unsure: list[str] = []

        def write(thread: int) -> None:
            for at in range(10_000):
                item = f"{thread}.{at}"
                try:
                    histories.append([Event("ann", item, 1.0, key=item)])
                except HistoriesUnavailableError:
                    unsure.append(item)
                    return
                acknowledged.append(item)

        writing = [threads.submit(write, thread) for thread in range(4)]
        deadline = time.monotonic() + 20
        while len(acknowledged) < 200:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        own_server.kill()
        for one in writing:
            one.result(timeout=20)
        with pytest.raises(HistoriesUnavailableError, match="cannot be reached"):
            histories.history("ann")
        with pytest.raises(HistoriesUnavailableError, match="cannot be reached"):
            histories.ready()
        own_server.start()
        wait_until_ready(histories)
        # Every connection of the pool had died; none of these calls may notice.
        assert all(threads.map(lambda _: set(acknowledged) <= set(histories.history("ann")), "123"))
        assert len(unsure) == 4, "one of each thread"
        again = [Event("ann", item, 1.0, key=item) for item in acknowledged + unsure]
        assert 0 <= histories.append(again) <= 4
        assert sorted(histories.history("ann")) == sorted(acknowledged + unsure), "each once"


def wait_until_ready(histories: Histories) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            return histories.ready()
        except HistoriesUnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_redis_with_a_password(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--requirepass", PASSWORD)
    try:
        quoted = "pass%3Aword%2Fwith%40signs"
        with opened(server.url.replace("redis://", f"redis://:{quoted}@")) as histories:
            histories.append(bought("ann", "a"))
            assert histories.history("ann") == ["a"]
        for user in ("", "ann:wrong@", ":wrong@"):
            with (
                opened(server.url.replace("redis://", f"redis://{user}")) as histories,
                pytest.raises(HistoriesUnavailableError, match="wrong user or password") as refusal,
            ):
                histories.append(bought("ann", "b"))
            assert "wrong@" not in str(refusal.value)
    finally:
        server.kill()


def test_a_redis_that_takes_no_writes_is_not_ready(own_server: RedisServer) -> None:
    with opened(own_server.url) as histories, redis.Redis(port=own_server.port) as admin:
        histories.append(bought("ann", "a"))
        admin.config_set("maxmemory", "1")
        for call in (histories.ready, lambda: histories.append(bought("ann", "b"))):
            with pytest.raises(HistoriesUnavailableError, match="no memory left"):
                call()
        admin.config_set("maxmemory", "0")
        admin.replicaof("127.0.0.1", str(free_port()))
        for call in (histories.ready, lambda: histories.append(bought("ann", "b"))):
            with pytest.raises(HistoriesUnavailableError, match="replica that takes no writes"):
                call()
        assert histories.history("ann") == ["a"], "reading goes on"
        admin.replicaof("NO", "ONE")
        admin.script_flush()
        histories.ready()
        assert histories.append([Event("ann", "b", 1.0)]) == 1
        assert histories.history("ann") == ["a", "b"]


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that gives each connection to `answer`, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with ExitStack() as connections:
                while True:
                    try:
                        connection, _ = listening.accept()
                    except OSError:
                        return
                    answer(connections.enter_context(connection))

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=10)
        assert not thread.is_alive()


def test_an_answer_that_is_lost_is_no_reason_to_append_twice(own_server: RedisServer) -> None:
    def forward_and_hang_up(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", own_server.port)) as server:
            while command := client.recv(100_000):
                server.sendall(command)
                reply = server.recv(100_000)
                if b"EVALSHA" in command:
                    client.shutdown(socket.SHUT_RDWR)
                else:
                    client.sendall(reply)

    with opened(own_server.url) as direct, serving(forward_and_hang_up) as port:
        direct.append(bought("ann", "a"))  # from here on the server knows the script
        with (
            opened(f"redis://127.0.0.1:{port}") as histories,
            pytest.raises(HistoriesUnavailableError, match="cannot be reached"),
        ):
            histories.append([Event("ann", "b", 1.0)])
        assert direct.history("ann") == ["a", "b"]


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not answer as Redis does"),
        (b"\x00\xff\xfe\r\n", "does not answer as Redis does"),
        (b":not a number\r\n", "does not answer as Redis does"),
        (None, "does not answer in time"),
    ],
)
def test_something_that_is_not_redis(reply: bytes | None, complaint: str) -> None:
    def say(connection: socket.socket) -> None:
        if reply is not None:
            connection.recv(100)
            connection.sendall(reply)

    with (
        serving(say) as port,
        opened(f"redis://127.0.0.1:{port}?socket_timeout=0.3") as histories,
    ):
        for call in (histories.ready, lambda: histories.append(bought("ann", "a"))):
            with pytest.raises(HistoriesUnavailableError, match=complaint):
                call()


@pytest.mark.parametrize("name", ["recprune:{=ann}:events", "recprune:events:ann"])
def test_something_else_under_a_key_of_ours(own_server: RedisServer, name: str) -> None:
    with opened(own_server.url) as histories, redis.Redis(port=own_server.port) as admin:
        admin.set(name, "a letter")
        event = Event("ann", "a", 1.0, key="k")
        for call in (lambda: histories.append([event]), lambda: histories.history("ann")):
            with pytest.raises(HistoriesUnavailableError, match="refused: .*wrong kind of value"):
                call()
        admin.delete(name)
        assert histories.append([event]) == 1, "its key was not taken for known"


def test_redis_databases_are_apart(own_server: RedisServer) -> None:
    with opened(f"{own_server.url}/1") as one, opened(f"{own_server.url}/2") as two:
        one.append(bought("ann", "a"))
        assert one.history("ann") == ["a"]
        assert two.history("ann") == []


def test_redis_holds_no_more_than_the_bounds(own_server: RedisServer) -> None:
    with opened(own_server.url) as histories, redis.Redis(port=own_server.port) as admin:
        for start in range(0, 3000, 600):
            histories.append(
                [Event("ann", str(at), at, key=str(at)) for at in range(start, start + 600)]
            )
        ours = b"recprune:{=ann}:"
        sizes = {name: admin.zcard(name) for name in (ours + b"events", ours + b"keys")}
        assert set(admin.keys()) == {*sizes, ours + b"arrivals"}
        assert list(sizes.values()) == [MOST, keys_kept(MOST)]


# What 0.1.0 has stored ---------------------------------------------------------------------------


def store_as_0_1_0(server: RedisServer, user: str, events: list[tuple[str, float, str]]) -> None:
    """Store items, timestamps and keys as that version did, with one counter for all users."""
    with redis.Redis(port=server.port) as client:
        for item, timestamp, key in events:
            arrival = int(client.incr("recprune:arrivals"))
            client.zadd(f"recprune:events:{user}", {f"{arrival:016d}{item}": timestamp})
            client.zadd(f"recprune:keys:{user}", {key: arrival})


@pytest.mark.parametrize("user", ["ann", "", "}", "{=ann}"])
def test_histories_of_0_1_0_go_on(own_server: RedisServer, user: str) -> None:
    later = math.nextafter(1.7e9, math.inf)
    old = [("b", later, "k1"), ("z", 7.0, "k2"), ("a", 7.0, "k3"), ("c", 1.7e9, "k4")]
    store_as_0_1_0(own_server, "bob", [("x", 1.0, "k1")])
    store_as_0_1_0(own_server, user, old)
    dated = [("z", 7.0), ("a", 7.0), ("c", 1.7e9), ("b", later)]
    with opened(own_server.url) as histories, redis.Redis(port=own_server.port) as admin:
        assert histories.dated_history(user) == dated, "before anything is written"
        known = [Event(user, "again", 9.0, key=f"k{number}") for number in (1, 2, 3, 4)]
        assert histories.append(known) == 0
        assert histories.dated_history(user) == dated
        assert histories.append([Event(user, "d", 7.0, key="k5")]) == 1
        assert histories.history(user) == ["z", "a", "d", "c", "b"]
        assert not admin.exists(f"recprune:events:{user}", f"recprune:keys:{user}")
        assert histories.history("bob") == ["x"], "is left where it is until there is an event"
        store_as_0_1_0(own_server, user, [("e", 2e9, "k6")])  # by one that still runs
        assert histories.history(user) == ["a", "d", "c", "b", "e"]
        assert histories.append([Event(user, "f", 3e9)]) == 1
        assert histories.history(user) == ["d", "c", "b", "e", "f"]


# A cluster ---------------------------------------------------------------------------------------

USERS = [f"user {number}" for number in range(30)]  # some on each of three servers


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    """A cluster that a test may hurt."""
    cluster = RedisCluster(tmp_path)
    yield cluster
    cluster.kill()


def test_users_are_spread_over_a_cluster(own_cluster: RedisCluster) -> None:
    with opened(own_cluster.url) as histories:
        histories.append([Event(user, "a", 1.0, key="k") for user in USERS])
        histories.ready()
    for server in own_cluster.servers:
        with redis.Redis(port=server.port) as client:
            names = [name.decode() for name in client.scan_iter()]
        assert sum(name.endswith(":events") for name in names) > 0
        assert sum(name.startswith("recprune:ready") for name in names) == 1


def test_a_cluster_that_is_down_is_waited_for(own_cluster: RedisCluster) -> None:
    events = [Event(user, "a", 1.0, key="k") for user in USERS]
    own_cluster.kill()
    with opened(own_cluster.url) as histories, opened(own_cluster.url) as others:
        for call in (histories.ready, lambda: histories.append(events)):
            with pytest.raises(
                HistoriesUnavailableError, match="Redis Cluster .*cannot be reached"
            ):
                call()
        own_cluster.start()
        wait_until_ready(histories)
        assert histories.append(events) == len(USERS)
        wait_until_ready(others)
        own_cluster.servers[1].kill()
        for each in (histories, others):
            with pytest.raises(HistoriesUnavailableError):
                each.ready()
            with pytest.raises(HistoriesUnavailableError):
                each.append(events)
        own_cluster.servers[1].start()
        own_cluster.wait()
        for each in (histories, others):
            wait_until_ready(each)
            assert each.append(events) == 0
            assert all(each.history(user) == ["a"] for user in USERS)


def test_slots_may_move_between_two_batches(own_cluster: RedisCluster) -> None:
    with opened(own_cluster.url) as histories:
        assert histories.append([Event(user, "a", 1.0) for user in USERS]) == len(USERS)
        own_cluster.move_slots(3000)
        assert histories.append([Event(user, "b", 2.0) for user in USERS]) == len(USERS)
        assert all(histories.history(user) == ["a", "b"] for user in USERS)


def test_a_cluster_with_a_password(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path, password=PASSWORD)
    try:
        with closing(open_histories(cluster.url, MOST, PASSWORD)) as histories:
            assert histories.append(bought("ann", "a") + bought("bob", "b")) == 2
            assert histories.history("ann") == ["a"]
        with (
            closing(open_histories(cluster.url, MOST, "wrong")) as histories,
            pytest.raises(HistoriesUnavailableError, match="wrong user or password"),
        ):
            histories.ready()
    finally:
        cluster.kill()


@pytest.mark.parametrize("users", [1, 2])
def test_a_cluster_that_gives_no_answer_is_not_asked_again(
    own_cluster: RedisCluster, users: int
) -> None:
    """Servers that go on too late have run a script once, though a second try would succeed."""
    events = [Event(user, "a", 1.0) for user in USERS[:users]]

    def tell(number: signal.Signals) -> None:
        for server in own_cluster.servers:
            server.process.send_signal(number)

    with opened(f"{own_cluster.url}?socket_timeout=0.4") as histories:
        histories.ready()
        tell(signal.SIGSTOP)
        going_on = threading.Timer(0.6, tell, [signal.SIGCONT])
        going_on.start()
        try:
            with pytest.raises(HistoriesUnavailableError, match="does not answer in time"):
                histories.append(events)
        finally:
            going_on.join()
        wait_until_ready(histories)
        assert histories.history(USERS[0]) == ["a"], "it was sent before"
        assert all(len(histories.history(user)) <= 1 for user in USERS[:users])
