"""More at once than there is room for: of connections, of descriptors, of patience."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.serving import (
    CLI,
    PATIENCE_S,
    Service,
    events_of,
    received,
    save_index,
    serving,
    wait_for_workers,
    wait_until,
)

ASKED = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "index"
    save_index(folder, 1000)
    return folder


@contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """Let a process open nothing."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def asking(service: Service, count: int, opened: ExitStack) -> list[socket.socket]:
    """Ask over so many connections, and wait for nothing."""
    connections = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", service.port), PATIENCE_S)
        connections.append(opened.enter_context(connection))
        connection.sendall(ASKED)
    return connections


def seconds_at_work(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_worker_that_was_out_of_descriptors_takes_connections_again(small: Path) -> None:
    with serving(small) as service:
        (worker,) = service.workers
        with without_descriptors(worker), pytest.raises(httpx.TransportError):
            service.client.get("/healthz")
        # The client may learn of it first: the system closes what it could not hand over.
        wait_until(lambda: "connection lost" in events_of(service), "a word of it")
        assert service.client.get("/healthz").status_code == 200
        assert service.workers == [worker]


def test_a_supervisor_out_of_descriptors_waits_without_spinning(small: Path) -> None:
    with serving(small) as service, ExitStack() as opened:
        supervisor = service.process.pid
        with without_descriptors(supervisor):
            (connection,) = asking(service, 1, opened)
            wait_until(lambda: "cannot accept" in events_of(service), "an attempt")
            before, begun = seconds_at_work(supervisor), time.monotonic()
            wait_until(lambda: events_of(service).count("cannot accept") == 3, "another attempt")
            assert time.monotonic() - begun > 0.5, "and not at once"
            assert seconds_at_work(supervisor) - before < 0.3
        assert received(connection).startswith(b"HTTP/1.1 200 "), "it waited in the backlog"


def test_descriptors_bound_the_connections(small: Path) -> None:
    few = ["prlimit", "--nofile=100:220", *CLI, "serve"]
    with serving(small, "--max-connections", "1000", command=few) as service:
        (said,) = [one for one in service.logged() if one["event"] == "fewer connections"]
        assert (said["asked"], said["allowed"], said["files"]) == (1000, 92, 220)
        turned_away = "recprune_turned_away_total"
        assert service.metric(turned_away) == 0  # over a connection that stays open
        with ExitStack() as opened:
            held = [
                opened.enter_context(socket.create_connection(("127.0.0.1", service.port)))
                for _ in range(300)
            ]
            wait_until(lambda: service.metric(turned_away) == 209, "refusals")
            refused = 0
            for connection in held:
                connection.settimeout(0.01)
                try:
                    answer = connection.recv(1000)
                except TimeoutError:
                    continue
                assert answer.startswith(b"HTTP/1.1 503 ")
                refused += 1
            assert refused == 209
        wait_until(lambda: is_answered(service), "room again")
        assert "connection lost" not in events_of(service)
    fewest = ["prlimit", "--nofile=100:100", *CLI, "serve", str(small), "--port", "0"]
    done = subprocess.run(fewest, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "may open 100 files here" in done.stderr


def is_answered(service: Service) -> bool:
    return httpx.get(f"{service.url}/healthz").status_code == 200


def test_a_burst_waits_until_it_can_be_taken(small: Path) -> None:
    with serving(small) as service, ExitStack() as opened:
        (worker,) = service.workers
        with stopped(worker):  # far more than fit into what lies between it and the supervisor
            connections = asking(service, 700, opened)
            before = seconds_at_work(service.process.pid)
            time.sleep(0.3)
            assert seconds_at_work(service.process.pid) - before < 0.2
        answers = {received(connection)[:13] for connection in connections}
        assert answers == {b"HTTP/1.1 200 "}
        assert service.workers == [worker]


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root's powers")
def test_too_many_on_their_way_do_not_end_the_service(small: Path) -> None:
    # Of root with all its powers, Linux lets any number of descriptors be on their way.
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    few = [*powerless, "prlimit", "--nofile=200:200", *CLI, "serve"]
    with serving(small, command=few) as service, ExitStack() as opened:
        (worker,) = service.workers
        with stopped(worker):
            connections = asking(service, 240, opened)
            time.sleep(0.2)
        answers = [received(connection)[:13] for connection in connections]
        assert set(answers) <= {b"HTTP/1.1 200 ", b"HTTP/1.1 503 "}
        assert answers.count(b"HTTP/1.1 200 ") >= 72
        assert service.workers == [worker]


@pytest.mark.parametrize("how", ["hangs", "is killed", "hangs alone and is killed"])
def test_what_a_worker_has_not_taken_is_answered_by_another(small: Path, how: str) -> None:
    # Where it is the test that kills, a worker that is only slow on a busy machine must not be.
    silent = "10" if how == "hangs" else "60"
    options = ("--workers", "1" if "alone" in how else "2", "--max-silent-seconds", silent)
    with serving(small, *options) as service, ExitStack() as opened:
        wait_for_workers(service, int(options[1]))
        hung = service.workers[0]
        os.kill(hung, signal.SIGSTOP)
        connections = asking(service, 20, opened)  # half of them on their way to it, or all
        if how == "hangs":
            answers = {received(connection)[:13] for connection in connections}
            assert hung in service.workers, "its end was not waited for"
        else:
            time.sleep(0.2)
            os.kill(hung, signal.SIGKILL)
            answers = {received(connection)[:13] for connection in connections}
        assert answers == {b"HTTP/1.1 200 "}
        assert "connection lost" not in events_of(service)


def test_a_worker_that_hangs_is_replaced_and_holds_up_no_reload(small: Path) -> None:
    options = ("--workers", "2", "--max-silent-seconds", "1")
    with serving(small, *options) as service:
        wait_for_workers(service, 2)
        hung, other = service.workers
        os.kill(hung, signal.SIGSTOP)
        # Asked of the other one: who hangs gets no further connections after a moment.
        wait_until(lambda: quickly_answered(service), "an answer")
        reloaded = httpx.post(f"{service.url}/admin/reload", timeout=PATIENCE_S)
        assert reloaded.status_code == 200, reloaded.text
        wait_until(
            lambda: len(service.workers) == 2 and hung not in service.workers, "another worker"
        )
        assert other in service.workers
        (said,) = [one for one in service.logged() if one["event"] == "worker hangs"]
        assert said["worker"] == hung


def quickly_answered(service: Service) -> bool:
    try:
        return all(
            httpx.get(f"{service.url}/healthz", timeout=0.2).status_code == 200 for _ in range(2)
        )
    except httpx.TransportError:
        return False
