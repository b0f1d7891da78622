"""Every state of a connection has a clock, and everything that it keeps has a limit."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from recprune.serve.configuration import Limits
from recprune.serve.http.protocol import protocol_for
from tests.support.serving import (
    WIDTH,
    Service,
    received,
    save_index,
    serving,
    sockets,
    wait_until,
)

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n"
CLIENT_S = 0.5
KEEP_ALIVE_S = 5.0  # uvicorn's own
HEAD_BYTES = 64 << 10


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("protocol") / "index"
    save_index(folder, 2000)
    options = ("--max-client-seconds", CLIENT_S, "--max-batch-items", "64000", "--no-access-log")
    with serving(folder, *map(str, options)) as running:
        yield running


def connected(service: Service, opened: ExitStack, buffer: int | None = None) -> socket.socket:
    connection = opened.enter_context(socket.socket())
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(10.0)
    connection.connect(("127.0.0.1", service.port))
    return connection


def answer_of(connection: socket.socket) -> bytes:
    """Read one answer with a length, and no more."""
    text = b""
    while b"\r\n\r\n" not in text:
        text += connection.recv(1)
    length = int(text.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while length:
        part = connection.recv(length)
        assert part, "cut short"
        text, length = text + part, length - len(part)
    return text


JSON = {"content-type": "application/json"}
SEARCH = b"POST /search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


def question(k: int) -> bytes:
    return json.dumps({"batch": np.ones((64, WIDTH)).tolist(), "k": k}).encode()


def ask_slowly(service: Service, opened: ExitStack, k: int, more: bytes = b"") -> socket.socket:
    """Ask over a connection that takes next to nothing of the answer."""
    slow = connected(service, opened, buffer=4096)
    body = question(k)
    slow.sendall(SEARCH + more + b"content-length: %d\r\n\r\n" % len(body) + body)
    return slow


def held_by_the_system(connection: socket.socket) -> int:
    """Return how much of an answer is in the system's buffers, at both ends of a connection."""
    port = f":{connection.getsockname()[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    queues = [row[4].split(":") for row in rows if row[1].endswith(port) or row[2].endswith(port)]
    return sum(int(sent, 16) + int(taken, 16) for sent, taken in queues)


# Clocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"\r\n", b"\r\n\r\n", b"\n"])
def test_an_empty_line_after_an_answer_keeps_no_connection(service: Service, sent: bytes) -> None:
    with ExitStack() as opened:
        idle = [connected(service, opened) for _ in range(20)]
        for connection in idle:
            connection.sendall(HEALTH + b"\r\n")
            assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
            connection.sendall(sent)
        begun = time.monotonic()
        assert [received(connection) for connection in idle] == [b""] * 20
        assert 1.0 < time.monotonic() - begun < KEEP_ALIVE_S + 5


def test_empty_lines_now_and_then_keep_no_connection(service: Service) -> None:
    with ExitStack() as opened:
        connection = connected(service, opened)
        connection.sendall(HEALTH + b"\r\n")
        answer_of(connection)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_empty_lines(connection, KEEP_ALIVE_S + 5)


def send_empty_lines(connection: socket.socket, seconds: float) -> None:
    begun = time.monotonic()
    while time.monotonic() < begun + seconds:
        connection.sendall(b"\r\n")
        time.sleep(0.1)


def test_a_connection_may_be_idle_and_is_then_used_again(service: Service) -> None:
    with ExitStack() as opened:
        connection = connected(service, opened)
        for _ in range(3):
            connection.sendall(HEALTH + b"\r\n")
            assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
            time.sleep(2 * CLIENT_S)  # longer than a request may take to arrive
            connection.sendall(b"\r\n")  # before a request, as old clients do


@pytest.mark.parametrize("more", [b"", b"connection: close\r\n"], ids=["kept", "to be closed"])
def test_the_last_bytes_of_an_answer_have_to_be_taken_too(service: Service, more: bytes) -> None:
    """What is left may be less than what makes a transport ask for a pause."""
    whole = len(httpx.post(f"{service.url}/search", content=question(1000), headers=JSON).content)
    (worker,) = service.workers
    before = sockets(worker)
    with ExitStack() as opened:
        slow = ask_slowly(service, opened, 1000)
        wait_until(lambda: held_by_the_system(slow) > 100_000, "an answer")
        room = held_by_the_system(slow)
        assert room < whole, "else nothing is left for the service to hold"
        # Fewer, where connections of an earlier test were still being closed.
        wait_until(lambda: sockets(worker) <= before, "the end of the first")
        for left in range(5_000, 60_000, 5_000):
            ask_slowly(service, opened, (room + left) * 1000 // whole, more)
        wait_until(lambda: sockets(worker) > before, "connections")
        begun = time.monotonic()
        wait_until(lambda: sockets(worker) <= before, "their end")
        assert time.monotonic() - begun < KEEP_ALIVE_S + 5


async def raises() -> None:
    raise RuntimeError


async def returns() -> None:
    pass


@pytest.mark.parametrize("fails", [raises, returns])
def test_an_answer_that_is_not_finished_has_to_be_taken_too(
    fails: Callable[[], Awaitable[None]],
) -> None:
    """Less is left than makes a transport ask for a pause, and no end of the answer is noted."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 50_000, "more_body": True})
        await fails()

    protocol = protocol_for(Limits(client_seconds=CLIENT_S), lambda: None)
    config = uvicorn.Config(app, http=protocol, log_config=None)
    state = uvicorn.server.ServerState()

    async def until(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(CLIENT_S + 5):
            while not is_so():
                await asyncio.sleep(0.01)

    async def answer() -> None:
        server = await asyncio.get_running_loop().create_server(
            lambda: protocol(config, state, {}), "127.0.0.1", 0
        )
        (listening,) = server.sockets
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(listening.getsockname())
            slow.sendall(HEALTH + b"\r\n")
            await until(lambda: bool(state.connections))
            (held,) = state.connections
            await until(held.transport.is_closing)
            assert 0 < held.transport.get_write_buffer_size() < 64 << 10
            try:
                await until(lambda: not state.connections)
            finally:
                held.transport.abort()
                server.close()

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(answer())


def test_of_requests_sent_at_once_the_later_ones_have_time(service: Service) -> None:
    """The clock of a request runs while it may be read, and that of an earlier one is another."""
    body = question(10)
    whole = SEARCH + b"content-length: %d\r\n\r\n" % len(body)
    with ExitStack() as opened:
        connection = connected(service, opened)
        connection.sendall((whole + body) * 3 + whole)
        for _ in range(3):
            assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
        late = received(connection)
        assert late.startswith(b"HTTP/1.1 408 ")


# Limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [HEAD_BYTES - 200, HEAD_BYTES + 1, 70_000, 200_000])
@pytest.mark.parametrize("place", ["header", "headers", "path"])
def test_a_head_has_a_limit_however_it_arrives(service: Service, size: int, place: str) -> None:
    path, headers = b"/healthz", b""
    if place == "path":
        path += b"?" + b"y" * size
    elif place == "header":
        headers = b"x: " + b"y" * size + b"\r\n"
    else:
        headers = b"x: yyyy\r\n" * (size // 9)
    head = b"GET " + path + b" HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n" + headers
    with ExitStack() as opened:
        connection = connected(service, opened)
        connection.sendall(head + b"\r\n")
        answer = received(connection)
    if size < HEAD_BYTES:
        assert answer.startswith(b"HTTP/1.1 200 ")
    else:
        assert answer.startswith(b"HTTP/1.1 431 ") or not answer, "or reset while it is sent"
        assert not answer or b'"code":"too_large"' in answer


CHUNKED = SEARCH + b"transfer-encoding: chunked\r\n\r\n"


def test_what_follows_a_chunked_body_is_limited_like_a_head(service: Service) -> None:
    body = question(1)
    chunks = b"%x\r\n" % len(body) + body + b"\r\n0\r\n"
    for trailers in (
        b"x: " + b"y" * 70_000 + b"\r\n",
        b"x: yyyy\r\n" * 8000,
        b"x: " + b"y" * 500_000,
    ):
        with ExitStack() as opened:
            connection = connected(service, opened)
            connection.sendall(CHUNKED + chunks + trailers + b"\r\n")
            answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 431 ") or not answer
    few = answered_trailers(service, chunks, b"x: y\r\n")
    assert few.startswith(b"HTTP/1.1 200 ")


def answered_trailers(service: Service, chunks: bytes, trailers: bytes) -> bytes:
    with ExitStack() as opened:
        connection = connected(service, opened)
        connection.sendall(CHUNKED + chunks + trailers + b"\r\n")
        return answer_of(connection)


def test_a_body_in_many_small_chunks_is_read(service: Service) -> None:
    body = question(1) + b" " * 5000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n"
    assert len(chunks) > HEAD_BYTES
    assert answered_trailers(service, chunks, b"").startswith(b"HTTP/1.1 200 ")


def test_requests_that_wait_for_earlier_answers_are_bounded(service: Service) -> None:
    with ExitStack() as opened:
        connection = connected(service, opened)
        connection.sendall((HEALTH + b"\r\n") * 50)
        for _ in range(50):
            assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
        with suppress(ConnectionError):
            connection.sendall((HEALTH + b"\r\n") * 20_000)
        assert received(connection).count(b"HTTP/1.1 200 ") < 10_000
    assert service.client.get("/healthz").status_code == 200


def test_a_client_that_asks_before_it_sends_a_body_can_go_on_after_a_refusal(
    service: Service,
) -> None:
    """It will not send the body, and what it sends next is no body: the connection has to end."""
    with ExitStack() as opened:
        connection = connected(service, opened)
        connection.sendall(SEARCH + b"expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n")
        begun = time.monotonic()
        answer = received(connection)
        assert time.monotonic() - begun < CLIENT_S / 2
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer
        again = connected(service, opened)
        body = question(1)
        again.sendall(SEARCH + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert again.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        again.sendall(body)
        assert answer_of(again).startswith(b"HTTP/1.1 200 ")


def test_what_is_not_http_is_refused_in_the_one_form(service: Service) -> None:
    with ExitStack() as opened:
        connection = connected(service, opened)
        connection.sendall(b"GET / HTTP/1.1\r\nhost 127.0.0.1\r\n\r\n")
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_request"


def test_an_answer_is_written_at_once(service: Service, tmp_path: Path) -> None:
    """Who is killed between two writes would leave half an answer behind."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace (Debian: apt install strace)")
    calls, said = tmp_path / "calls.txt", tmp_path / "said.txt"
    (worker,) = service.workers
    command = [strace, "-f", "-p", str(worker), "-e", "trace=write,writev,sendto,sendmsg"]
    with said.open("w") as file:
        watching = subprocess.Popen([*command, "-o", str(calls)], stderr=file)
    try:
        wait_until(lambda: "attach" in said.read_text(), "strace")
        if "attached" not in said.read_text():
            pytest.skip("needs to be allowed to watch another process")
        question = {"sequence_embedding": np.ones(WIDTH).tolist(), "k": 10}
        answer = service.post("/search", question)
        head = service.client.head("/")
        with ExitStack() as opened:
            connection = connected(service, opened)
            connection.sendall(HEALTH + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
            assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
            posting = connected(service, opened)
            posting.sendall(
                b"POST /search HTTP/1.1\r\nhost: 127.0.0.1\r\nexpect: 100-continue\r\n"
                b"content-length: 2\r\n\r\n"
            )
            assert posting.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n", "not held back"
    finally:
        watching.terminate()
        watching.wait()
    assert (answer.status_code, head.status_code, head.content) == (200, 200, b"")
    lines = calls.read_text().splitlines()
    (search, page, _) = [line for line in lines if '"HTTP/1.1 200 ' in line]
    assert int(search.rpartition("= ")[2]) > len(answer.content) + 200, "with its head"
    assert int(page.rpartition("= ")[2]) > 200
    assert not [line for line in lines if '"{\\"answers' in line], "and nothing after it"
