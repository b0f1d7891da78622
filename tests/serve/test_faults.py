"""What may go wrong in production, done to a running service: it goes on, and loses nothing."""

from __future__ import annotations

import json
import os
import resource
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.histories_places import RedisServer
from tests.support.serving import (
    HISTORY,
    PATIENCE_S,
    WIDTH,
    Load,
    Service,
    damaged,
    error_of,
    events_of,
    expected,
    items_of,
    received,
    replace,
    save_index,
    save_two_recommenders,
    serving,
    sockets,
    wait_until,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_two_recommenders(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: list[Path], tmp_path: Path) -> Path:
    """The first of them, at a place where it may be replaced."""
    return shutil.copytree(saved[0], tmp_path / "served")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index whose batches take a while."""
    folder = tmp_path_factory.mktemp("large") / "index"
    save_index(folder, 300_000)
    return folder


# Processes ---------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced(folder: Path) -> None:
    with serving(folder, "--workers", "2", "--max-waiting", "50") as service:
        workers = service.workers
        assert len(workers) == 2
        with Load(service, keep_alive=False).running() as load:
            os.kill(workers[0], signal.SIGKILL)
            load.more()
            wait_until(
                lambda: len(service.workers) == 2 and workers[0] not in service.workers,
                "another worker",
            )
            load.more(40)
        # What it had begun is lost, and what no other worker had taken is not.
        assert len(load.failures) <= 4
        assert len({tuple(items) for _, _, items in load.answers}) == 1
        wait_until(lambda: events_of(service).count("worker started") == 3, "its start")
        assert "worker ended" in events_of(service)


def test_who_lost_its_worker_is_not_dealt_to_it_again(folder: Path) -> None:
    """A client whose connection was cut asks again at once, while the rest of it is being closed."""
    with serving(folder, "--workers", "2", "--no-access-log") as service:
        asked = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        cut_again = 0
        for turn in range(3):
            started = 2 + turn
            wait_until(
                lambda: events_of(service).count("worker started") == started,  # noqa: B023
                "two workers",
            )
            time.sleep(0.2)  # until the supervisor has heard of it
            with ExitStack() as opened, selectors.DefaultSelector() as waiting:
                for _ in range(200):
                    held = socket.create_connection(("127.0.0.1", service.port))
                    waiting.register(opened.enter_context(held), selectors.EVENT_READ)
                wait_until(lambda: sockets(service.workers[0]) > 90, "their dealing")
                os.kill(service.workers[0], signal.SIGKILL)
                deadline = time.monotonic() + 1.0
                answers: list[socket.socket] = []
                while time.monotonic() < deadline and len(answers) < 100:
                    for key, _ in waiting.select(0.1):
                        waiting.unregister(key.fileobj)
                        again = socket.create_connection(("127.0.0.1", service.port))
                        answers.append(opened.enter_context(again))
                        with suppress(OSError):
                            again.sendall(asked)
                assert len(answers) > 50
                cut_again += sum(received(again) == b"" for again in answers)
        assert cut_again == 0


def test_workers_are_dealt_connections_in_turn(folder: Path) -> None:
    with serving(folder, "--workers", "2") as service:
        asked = 0

        def answered(times: int) -> list[int]:
            """Ask over connections of their own; return who has answered, all times before too."""
            nonlocal asked
            for _ in range(times):
                service.client.get("/healthz", headers={"connection": "close"})
            asked += times
            wait_until(lambda: events_of(service).count("request") == asked, "the log")
            return [entry["process"] for entry in service.logged() if entry["event"] == "request"]

        wait_until(lambda: set(answered(1)) == set(service.workers), "both at work")
        dealt = answered(8)[-8:]
        assert [dealt.count(worker) for worker in service.workers] == [4, 4]


def test_a_worker_that_cannot_start_again_does_not_end_the_service(
    folder: Path, saved: list[Path], tmp_path: Path
) -> None:
    with serving(folder, "--workers", "2") as service:
        replace(folder, damaged(saved[1], tmp_path, "truncated"))
        os.kill(service.workers[0], signal.SIGKILL)
        wait_until(lambda: "worker cannot start" in events_of(service), "an attempt")
        assert items_of(service.recommend(history=HISTORY, k=5)) == expected(saved[0])
        replace(folder, saved[1])
        # The next attempt succeeds, and the other worker follows.
        wait_until(lambda: "reloaded" in events_of(service), "both")
        assert items_of(service.recommend(history=HISTORY, k=5)) == expected(saved[1])


def test_workers_end_with_a_supervisor_that_left_messages_unread(folder: Path) -> None:
    service = Service(folder)
    workers = service.workers
    assert service.client.get("/healthz").status_code == 200  # its connection is kept
    os.kill(service.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as other, suppress(httpx.HTTPError):
        asked = other.submit(service.client.post, "/admin/reload", json={}, timeout=20)
        time.sleep(0.5)  # the worker has passed it on
        service.process.kill()
        asked.result()
    service.stop()
    wait_until(
        lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in workers), "the workers' end"
    )


def test_workers_end_with_their_supervisor(folder: Path) -> None:
    service = Service(folder, "--workers", "2")
    workers = service.workers
    service.process.kill()
    service.stop()
    wait_until(
        lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in workers), "the workers' end"
    )


def test_what_has_begun_is_finished_before_the_end(large: Path) -> None:
    options = ("--max-running", "1", "--max-batch-items", "64000")
    with serving(large, *options) as service, ThreadPoolExecutor(6) as pool:
        question = {"batch": np.ones((64, WIDTH)).tolist(), "method": "pqtopk", "k": 1000}
        service.post("/search", question)
        asked = [pool.submit(service.post, "/search", question) for _ in range(6)]
        depth = 'recprune_queue_depth{state="running",work="search"}'
        wait_until(lambda: service.metric(depth) == 1, "a search at work")
        begun = time.monotonic()
        service.process.terminate()
        assert service.process.wait(PATIENCE_S) == 0
        assert time.monotonic() - begun < 10
        assert {answer.result().status_code for answer in asked} == {200}


def test_acknowledged_events_survive_a_power_cut(folder: Path) -> None:
    service = Service(folder, "--workers", "2")
    for at in range(20):
        event = {"user": "ann", "item": f"tea é{10 + at}", "timestamp": at, "key": str(at)}
        assert service.post("/events", {"events": [event]}).status_code == 200
    service.kill_all()
    service.stop()
    with serving(folder) as again:
        found = again.recommend(user="ann", k=5)
        history = [f"tea é{10 + at}" for at in range(20)]
        assert found["items"] == again.recommend(history=history, k=5)["items"]
        repeated = {"user": "ann", "item": "b", "key": "19"}
        assert again.post("/events", {"events": [repeated]}).json()["new"] == 0


# Histories ---------------------------------------------------------------------------------------


def test_redis_may_go_and_come_back(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    redis = RedisServer(tmp_path / "redis")
    try:
        with serving(folder, "--history", redis.url) as service:
            event = {"user": "ann", "item": "tea é20", "key": "1"}
            assert service.post("/events", {"events": [event]}).json()["new"] == 1
            redis.kill()
            gone = service.post("/events", {"events": [event]})
            assert error_of(gone)[:2] == (503, "histories_unavailable")
            assert gone.headers["retry-after"] == "1"
            assert str(redis.port) not in gone.text
            assert service.post("/recommend", {"user": "ann"}).status_code == 503
            assert error_of(service.client.get("/readyz"))[0] == 503
            assert service.client.get("/healthz").status_code == 200
            assert service.recommend(history=HISTORY)["exact"], "who needs no Redis is answered"
            redis.start()
            wait_until(lambda: service.client.get("/readyz").status_code == 200, "recovery")
            assert service.post("/events", {"events": [event]}).json()["new"] == 0
            found = service.recommend(user="ann", k=5)
            assert found["items"] == service.recommend(history=["tea é20"], k=5)["items"]
    finally:
        redis.kill()


def test_histories_that_hang_hold_up_nobody_else(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    redis = RedisServer(tmp_path / "redis")
    options = ("--history", redis.url, "--max-waiting", "40")
    try:
        with serving(folder, *options) as service, ThreadPoolExecutor(32) as pool:
            assert service.client.get("/readyz").status_code == 200
            redis.process.send_signal(signal.SIGSTOP)
            begun = time.monotonic()
            question = {"user": "ann", "timeout_ms": 100}
            hurried = service.post("/recommend", question)
            assert time.monotonic() - begun < 3, "the store itself would be waited for longer"
            assert error_of(hurried)[:2] == (503, "histories_unavailable")
            assert service.metric("recprune_turned_away_total") == 0
            event = {"events": [{"user": "ann", "item": "a"}]}
            waiting = [pool.submit(service.post, "/events", event) for _ in range(30)]
            depth = 'recprune_queue_depth{state="waiting",work="histories"}'
            wait_until(lambda: service.metric(depth) == 16, "a crowd of events")
            assert service.client.get("/items/a").status_code == 200
            assert service.client.get("/items", params={"query": "a"}).status_code == 200
            assert service.recommend(history=HISTORY)["exact"]
            redis.process.send_signal(signal.SIGCONT)
            statuses = [answer.result().status_code for answer in waiting]
            turned_away = service.metric("recprune_turned_away_total")
            assert statuses.count(503) == turned_away
            assert statuses.count(200) == 30 - turned_away >= 19
            wait_until(lambda: service.client.get("/readyz").status_code == 200, "readiness")
    finally:
        redis.kill()


def test_a_full_disk_is_said_and_got_over(folder: Path) -> None:
    with serving(folder, "--no-access-log", "--max-history", "100000") as service:
        (worker,) = service.workers

        def post(number: int) -> httpx.Response:
            events = [
                {"user": f"user {number}", "item": "i" * 400, "timestamp": at} for at in range(200)
            ]
            return service.post("/events", {"events": events})

        assert post(0).status_code == 200
        unlimited = resource.prlimit(worker, resource.RLIMIT_FSIZE)
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (300_000, unlimited[1]))
        kept = 0
        for number in range(1, 40):
            response = post(number)
            if response.status_code != 200:
                break
            kept += 1
        assert error_of(response)[:2] == (503, "histories_unavailable")
        assert kept < 39
        assert service.recommend(history=HISTORY)["exact"]
        resource.prlimit(worker, resource.RLIMIT_FSIZE, unlimited)
        wait_until(lambda: post(99).status_code == 200, "room on the disk")
        for number in range(kept + 1):
            answer = service.recommend(user=f"user {number}")
            assert len(answer["unknown"]) == 200, "what was acknowledged is there"


# Clients -----------------------------------------------------------------------------------------


def test_overload_is_answered_at_once_and_the_admitted_stay_quick(large: Path) -> None:
    options = ("--max-running", "1", "--max-waiting", "1", "--no-access-log")
    with serving(large, *options) as service:
        question = {"batch": np.ones((64, WIDTH)).tolist(), "method": "pqtopk"}
        body = json.dumps(question)
        headers = {"content-type": "application/json"}

        def ask(_: int) -> tuple[int, float, str | None]:
            begun = time.monotonic()
            answer = service.client.post("/search", content=body, headers=headers)
            if answer.status_code == 503:
                assert error_of(answer)[:2] == (503, "overloaded")
            return answer.status_code, time.monotonic() - begun, answer.headers.get("retry-after")

        ask(0)
        alone = sorted(ask(0)[1] for _ in range(3))[1]
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(64)))
            health = service.client.get("/healthz")
        assert health.status_code == 200
        admitted = [seconds for status, seconds, _ in answers if status == 200]
        refused = [retry for status, _, retry in answers if status == 503]
        assert len(admitted) >= 2
        assert len(refused) >= 16
        assert set(refused) == {"1"}
        # At most one before it: with a queue that grows, the last would have waited for 15.
        assert max(admitted) < 8 * alone + 1.0
        assert service.metric("recprune_turned_away_total") == len(refused)
        assert ask(0)[0] == 200, "and all is well again"


HEAD = b"POST /search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def impatient(large: Path) -> Iterator[Service]:
    options = ("--max-client-seconds", "0.5", "--max-connections", "20")
    with serving(large, *options, "--max-batch-items", "64000") as service:
        yield service


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /sea", HEAD, HEAD + b"content-length: 100\r\n\r\n" + b'{"batch"',
     HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n"],
)  # fmt: skip
def test_a_slow_client_has_to_go(impatient: Service, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as slow:
        slow.sendall(sent)
        begun = time.monotonic()
        assert impatient.client.get("/healthz").status_code == 200, "nobody else waits"
        answer = received(slow)
        assert 0.3 < time.monotonic() - begun < 10
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"too_slow"' in answer


def test_a_client_that_drips_has_to_go(impatient: Service) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as slow:
        slow.sendall(HEAD + b"content-length: 100000\r\n\r\n")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            drip(slow)


def drip(connection: socket.socket) -> None:
    """Send a byte now and then."""
    begun = time.monotonic()
    while time.monotonic() - begun < PATIENCE_S:
        connection.sendall(b" ")
        time.sleep(0.05)


def test_a_client_that_does_not_take_its_answer_has_to_go(impatient: Service) -> None:
    question = {"batch": np.ones((64, WIDTH)).tolist(), "k": 1000}
    whole = len(impatient.post("/search", question).content)
    assert whole > 3_000_000
    body = httpx.Request("POST", impatient.url, json=question).content
    (worker,) = impatient.workers
    before = sockets(worker)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", impatient.port))
        slow.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: sockets(worker) > before, "the connection")
        wait_until(lambda: sockets(worker) <= before, "its end")
        assert len(received(slow)) < whole


def test_heads_without_end_are_refused(impatient: Service) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as talker:
        talker.sendall(HEAD + b"x-long: " + b"y" * 100_000)
        answer = received(talker)
    assert answer.startswith(b"HTTP/1.1 431 ") or not answer, "or reset while it still sends"
    assert impatient.client.get("/healthz").status_code == 200


def test_what_is_not_http_is_refused(impatient: Service) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as talker:
        talker.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert received(talker).startswith(b"HTTP/1.1 400 ")


def test_connections_are_bounded(impatient: Service) -> None:
    before = impatient.metric("recprune_turned_away_total")
    held = [socket.create_connection(("127.0.0.1", impatient.port)) for _ in range(40)]
    try:
        answers = [received(connection) for connection in held]
    finally:
        for connection in held:
            connection.close()
    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
    assert len(refused) >= 20
    assert impatient.metric("recprune_turned_away_total") == before + len(refused)
    assert b"retry-after: 1" in refused[0]
    assert impatient.client.get("/healthz").status_code == 200
