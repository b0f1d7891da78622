"""What a body may cost, of memory and of the time of others, before it is known to be of use."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from recprune.serve.keys import add_key
from tests.support.serving import Service, error_of, save_recommender, serving, wait_until

BODY_BYTES = 1 << 20  # by default
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bodies") / "recommender"
    save_recommender(folder)
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with serving(folder) as running:
        yield running


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def unfinished(service: Service, opened: ExitStack, head: bytes) -> socket.socket:
    """Send a request but for the last byte of a body that is as large as it may be."""
    connection = opened.enter_context(socket.create_connection(("127.0.0.1", service.port)))
    connection.sendall(head + b"content-length: %d\r\n\r\n" % BODY_BYTES)
    connection.sendall(b" " * (BODY_BYTES - 1))
    return connection


@pytest.mark.parametrize("line", [b"GET /healthz", b"GET /", b"POST /admin/reload", b"PUT /no"])
def test_no_body_is_kept_where_none_is_needed(service: Service, line: bytes) -> None:
    (worker,) = service.workers
    before = resident_bytes(worker)
    with ExitStack() as opened:
        head = line + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        sent = [unfinished(service, opened, head) for _ in range(20)]
        for connection in sent:
            connection.settimeout(10)
            status = connection.recv(100).split()[1]
            assert status != b"408", "answered without it"
        assert resident_bytes(worker) - before < 8_000_000


def test_a_body_without_a_key_is_not_read(folder: Path, tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "shop", "ask")
    with serving(folder, "--keys", tmp_path / "keys.json") as service, ExitStack() as opened:
        (worker,) = service.workers
        before = resident_bytes(worker)
        head = b"POST /recommend HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        sent = [unfinished(service, opened, head) for _ in range(20)]
        for connection in sent:
            connection.settimeout(10)
            assert connection.recv(100).startswith(b"HTTP/1.1 401 ")
        assert resident_bytes(worker) - before < 8_000_000


def test_bodies_that_arrive_are_bounded_together(folder: Path) -> None:
    with serving(folder, "--max-client-seconds", "20") as service, ExitStack() as opened:
        (worker,) = service.workers
        before = resident_bytes(worker)
        head = b"POST /recommend HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        sent = [unfinished(service, opened, head) for _ in range(80)]
        assert service.client.get("/healthz").status_code == 200
        wait_until(lambda: len(select.select(sent, [], [], 0)[0]) >= 80 - 64, "refusals")
        answers = [connection.recv(1000) for connection in select.select(sent, [], [], 0)[0]]
        assert all(answer.startswith(b"HTTP/1.1 503 ") for answer in answers)
        assert len(answers) <= 30
        assert resident_bytes(worker) - before < 90_000_000
        for connection in sent:
            connection.close()
        assert service.recommend(history=["a"])["exact"], "there is room again"


def longest_wait(service: Service, path: str, body: str) -> tuple[httpx.Response, float]:
    """Post a body, and return how long a health check had to wait meanwhile, at most."""
    done = threading.Event()
    waits: list[float] = []

    def check() -> None:
        with httpx.Client(base_url=service.url, timeout=30) as client:
            while not done.is_set():
                begun = time.monotonic()
                assert client.get("/healthz").status_code == 200
                waits.append(time.monotonic() - begun)

    with ThreadPoolExecutor(1) as other:
        checks = other.submit(check)
        while not waits:
            time.sleep(0.01)
        answer = service.client.post(path, content=body, headers=JSON)
        done.set()
        checks.result()
    return answer, max(waits)


def listed(name: str, entry: object) -> str:
    """Return a body with a list that is as long as a body may be."""
    text = json.dumps(entry, separators=(",", ":"))
    count = (BODY_BYTES - 100) // (len(text) + 1)
    return f'{{"{name}":[{",".join([text] * count)}]}}'


EXPENSIVE = {
    "empty questions": ("/recommend", listed("batch", {}), "batch.0"),
    "questions": ("/recommend", listed("batch", {"user": 1}), "batch: List should have at most"),
    "wrong items": ("/recommend", listed("history", {}), "history.0"),
    "items": ("/recommend", listed("exclude", 1), "exclude: List should have at most"),
    "allowed": ("/recommend", listed("allow", {}), "allow.0"),
    "boosts": ("/recommend", listed("boosts", {}), "boosts.0.item"),
    "times": ("/recommend", listed("times", -1), "times.0"),
    "embeddings": ("/search", listed("batch", [""]), "batch.0.0"),
    "embedding": ("/search", listed("sequence_embedding", {}), "sequence_embedding.0"),
    "events": ("/events", listed("events", {}), "events.0.user"),
    "fields": (
        "/recommend",
        "{" + ",".join(f'"{number}":0' for number in range(100_000)) + "}",
        "the request: 100000 fields, expected 32 at most",
    ),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_no_body_holds_up_others(service: Service, name: str) -> None:
    path, body, message = EXPENSIVE[name]
    assert 700_000 < len(body) <= BODY_BYTES
    answer, waited = longest_wait(service, path, body)
    status, code, said = error_of(answer)
    assert (status, code) == (422, "invalid")
    assert said.startswith(message), said
    assert len(said) < 500
    assert waited < 0.5
