"""Histories in a real Redis: gone and back, locked, full, and not Redis at all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from recprune.serve.histories.histories import (
    Event,
    Histories,
    HistoriesUnavailableError,
    keys_kept,
)
from tests.support.histories_places import MOST, RedisServer, bought, free_port, opened

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


def test_something_else_under_a_key_of_ours(own_server: RedisServer) -> None:
    with opened(own_server.url) as histories, redis.Redis(port=own_server.port) as admin:
        admin.set("recprune:events:ann", "a letter")
        event = Event("ann", "a", 1.0, key="k")
        for call in (lambda: histories.append([event]), lambda: histories.history("ann")):
            with pytest.raises(HistoriesUnavailableError, match="refused: .*wrong kind of value"):
                call()
        admin.delete("recprune:events:ann")
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
        sizes = {name: admin.zcard(name) for name in (b"recprune:events:ann", b"recprune:keys:ann")}
        assert set(admin.keys()) == {*sizes, b"recprune:arrivals"}
        assert list(sizes.values()) == [MOST, keys_kept(MOST)]
