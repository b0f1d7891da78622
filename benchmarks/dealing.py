"""How worker processes get their connections: passed on, by the kernel, or by other servers.

    python -m benchmarks.dealing                  # a million random items, ten minutes

Needs wrk, which makes the load, and Linux; granian takes part if it is installed. All services run at
the same time and are loaded in turn, so that figures of one table can be compared. `serve` is
`recprune serve` as it is, the other ways are in dealing_ways.py; all have the same app and index.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.dealing_ways import WAYS
from benchmarks.measure import model_of, write_result
from benchmarks.proc import children, connections
from benchmarks.serve_peers import FOLDER, RUNNING, WAITING
from recprune import Index
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine
from recprune.system import available_cores
from recprune.types import Json

_HEALTH = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n"
_SCRIPT = """
local bodies = {}
for line in io.lines(%s) do bodies[#bodies + 1] = line end
local at = 0
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
wrk.headers["connection"] = "%s"
request = function()
  at = at %% #bodies + 1
  return wrk.format(nil, nil, nil, bodies[at])
end
done = function(summary, latency, requests)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
  io.write(string.format(
    '{"per_second": %%f, "p50_ms": %%f, "p99_ms": %%f, "failed": %%d}\\n',
    summary.requests / summary.duration * 1e6, latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3, failed))
end
"""
_ASKED = 40  # connections that come while a worker hangs
_HUNG_S = 3.0  # for how long it does
_KILLED_S = 3.0  # for how long answers are waited for after that


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--connections", default="1,2,4,8,16,32,64")
    parser.add_argument("--workers", default="2,1", help="how many, one measurement each")
    parser.add_argument("--seconds", type=int, default=1, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of which medians are shown")
    parser.add_argument("--splits", type=int, default=20, help="times to see who gets connections")
    parser.add_argument("--out", type=Path, default=Path("out/bench-dealing.json"))
    parser.add_argument("--ways", default=",".join(("serve", *WAYS, "uvicorn", "granian")))
    parsed = parser.parse_args()
    has_granian = importlib.util.find_spec("granian") is not None
    place = parsed.out.parent.resolve() / "dealing"
    place.mkdir(parents=True, exist_ok=True)
    _prepare(place, parsed.items)
    ladder = [int(count) for count in parsed.connections.split(",")]
    names = [name for name in parsed.ways.split(",") if name != "granian" or has_granian]
    result: Json = {"items": parsed.items, "load": [], "splits": []}
    for workers in map(int, parsed.workers.split(",")):
        with _all_running(names, workers, place) as running:
            if workers > 1:
                result["splits"] += _measure_splits(running, workers, ladder, parsed.splits)
            result["load"] += _measure_load(running, workers, place, ladder, parsed)
    result["losses"] = _measure_losses(names, place)
    output.print(f"{machine()['cpu']}, {available_cores()} cores, load included")
    write_result(parsed.out, result)


def _prepare(place: Path, items: int) -> None:
    """Write the index, the questions and how wrk is to ask them."""
    codes, embeddings, queries = model_of(None, items, 500)
    Index.build(codes, embeddings, threads=2).save(place / "index")
    requests = place / "search.jsonl"
    lines = [json.dumps({"sequence_embedding": row.tolist()}) for row in queries]
    requests.write_text("\n".join(lines))
    for kind in ("keep-alive", "close"):
        (place / f"{kind}.lua").write_text(_SCRIPT % (json.dumps(str(requests)), kind))


# Services ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Service:
    name: str
    pid: int
    port: int

    def held(self) -> dict[int, list[int]]:
        """Return who of its processes has which connections."""
        return connections(children(self.pid), self.port)

    def connect(self, opened: ExitStack, sent: bytes = b"") -> socket.socket:
        connection = opened.enter_context(socket.create_connection(("127.0.0.1", self.port), 10))
        connection.sendall(sent)
        return connection


def _command(name: str, workers: int, port: int, place: Path) -> list[str]:
    python, app = [sys.executable, "-m"], "benchmarks.dealing_ways:app"
    count, at = ["--workers", str(workers)], ["--port", str(port)]
    if name == "serve":
        folder, enough = str(place / "index"), ["--max-waiting", str(WAITING), "--no-access-log"]
        return [*python, "recprune.cli", "serve", folder, *at, *count, *enough]
    if name == "uvicorn":
        quiet = ["--log-level", "critical", "--no-access-log"]
        return [*python, "uvicorn", "--factory", app, *at, *count, *quiet]
    if name == "granian":
        more = ["--interface", "asgi", "--no-ws", "--http", "1", "--no-log"]
        return [*python, "granian", "--factory", app, *at, *count, *more]
    return [*python, "benchmarks.dealing_ways", name, str(workers), str(port)]


@contextmanager
def _running(name: str, workers: int, place: Path) -> Iterator[_Service]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    figures = place / f"metrics-{name}-{port}"
    figures.mkdir()
    environment = os.environ | {
        FOLDER: str(place / "index"),
        RUNNING: str(max(1, available_cores() // workers)),
        "PROMETHEUS_MULTIPROC_DIR": str(figures),
    }
    process = subprocess.Popen(
        _command(name, workers, port, place),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield _Service(name, process.pid, port)
    finally:
        for worker in children(process.pid):
            os.kill(worker, signal.SIGCONT)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:  # for a worker that hangs
            for worker in children(process.pid):
                os.kill(worker, signal.SIGKILL)
            process.kill()
            process.wait()
        for file in figures.iterdir():
            file.unlink()
        figures.rmdir()


@contextmanager
def _all_running(names: list[str], workers: int, place: Path) -> Iterator[list[_Service]]:
    with ExitStack() as stack:
        running = [stack.enter_context(_running(name, workers, place)) for name in names]
        for service in running:
            _wait(service)
        time.sleep(8)  # the first worker has answered, and others may still load
        yield running


def _wait(service: _Service) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError), ExitStack() as opened:
            if service.connect(opened, _HEALTH + b"\r\n").recv(12) == b"HTTP/1.1 200":
                return
        time.sleep(0.2)
    raise SystemExit(f"{service.name}: does not start")


# Load --------------------------------------------------------------------------------------------


def _measure_load(
    running: list[_Service],
    workers: int,
    place: Path,
    ladder: list[int],
    parsed: argparse.Namespace,
) -> list[Json]:
    figures: list[Json] = []
    rungs = ladder if workers > 1 else ladder[::3]  # with one worker there is nothing to divide
    for service in running:
        _load(service, place, "keep-alive", 8, 2)  # what the first requests build
    for kind in ("keep-alive", "close"):
        rows = []
        for count in rungs:
            runs: dict[str, list[Json]] = {service.name: [] for service in running}
            for turn in range(parsed.rounds):
                # Another one is first in every round.
                for service in [*running[turn:], *running[:turn]]:
                    runs[service.name].append(_load(service, place, kind, count, parsed.seconds))
            dealt = [run["per_second"] for run in runs["dealt"]]
            for name, of_name in runs.items():
                at = {"way": name, "workers": workers, "kind": kind, "connections": count}
                run = {key: statistics.median(one[key] for one in of_name) for key in of_name[0]}
                # Rounds are compared one by one: the machine may be busier in another.
                pairs = zip((one["per_second"] for one in of_name), dealt, strict=True)
                run["to_dealt"] = statistics.median(ours / theirs for ours, theirs in pairs)
                run["failed"] = sum(one["failed"] for one in of_name)
                figures.append(at | run | {"rounds": of_name})
                rows.append(_load_row(figures[-1]))
        title = f"{kind}, {workers} workers, medians of {parsed.rounds} rounds"
        header = ("connections", "way", "requests/s", "÷ dealt", "p50 ms", "p99 ms", "failed")
        print_table(title, header, rows)
    return figures


def _load_row(run: Json) -> tuple[str, ...]:
    return (
        str(run["connections"]),
        run["way"],
        f"{run['per_second']:,.0f}",
        f"{run['to_dealt']:.2f}",
        f"{run['p50_ms']:.2f}",
        f"{run['p99_ms']:.2f}",
        str(run["failed"]),
    )


def _load(service: _Service, place: Path, kind: str, count: int, seconds: int) -> Json:
    script = str(place / f"{kind}.lua")
    command = ["wrk", "-t1", f"-c{count}", f"-d{seconds}s", "--timeout", "5s", "-s", script]
    url = f"http://127.0.0.1:{service.port}/search"
    done = subprocess.run([*command, url], capture_output=True, text=True, check=True)
    figures: Json = json.loads(done.stdout.splitlines()[-1])
    return figures


# Who gets the connections ------------------------------------------------------------------------


def _measure_splits(
    running: list[_Service], workers: int, ladder: list[int], times: int
) -> list[Json]:
    """See how many of the connections that stay open the busiest worker has."""
    figures, rows = [], []
    for how in ("at once", "one by one"):
        for service in running:
            busiest = {
                count: [_most_held(service, count, how == "at once") for _ in range(times)]
                for count in ladder
                if count > 1
            }
            figures.append({"way": service.name, "how": how, "busiest": busiest})
            worst = [f"{max(most)} ({statistics.mean(most):.1f})" for most in busiest.values()]
            rows.append((how, service.name, *worst))
    header = ("opened", "way", *(f"of {count}" for count in ladder if count > 1))
    title = f"connections of the busiest of {workers} workers: worst (mean) of {times} times"
    print_table(title, header, rows)
    return figures


def _most_held(service: _Service, count: int, at_once: bool) -> int:
    time.sleep(0.02)  # connections of before are closed
    with ExitStack() as opened:
        clients = []
        for _ in range(count):
            clients.append(service.connect(opened, _HEALTH + b"\r\n"))
            if not at_once:
                clients[-1].recv(1000)
        for client in clients if at_once else []:
            client.recv(1000)
        ports = {client.getsockname()[1] for client in clients}
        return max(len(ports & set(held)) for held in service.held().values())


# What is lost ------------------------------------------------------------------------------------


def _measure_losses(names: list[str], place: Path) -> list[Json]:
    """See what becomes of connections that come while one of two workers hangs, and is killed."""
    figures, rows = [], []
    for how in ("stopped", "blocked"):
        for name in names:
            if name == "serve" and how == "blocked":  # it has no route that hangs
                continue
            with _running(name, 2, place) as service:
                _wait(service)
                time.sleep(5)
                run = {"way": name, "how": how} | _lost(service, how)
            figures.append(run)
            rows.append((how, name, *(str(run[key]) for key in ("meanwhile", "after", "lost"))))
    title = f"of {_ASKED} connections that come while one of 2 workers hangs, which is then killed"
    print_table(title, ("hangs", "way", "answered", "after the kill", "lost"), rows)
    return figures


def _lost(service: _Service, how: str) -> Json:
    with ExitStack() as opened:
        first = service.connect(opened, _HEALTH + b"\r\n")
        first.recv(1000)
        port = first.getsockname()[1]
        (hung,) = [pid for pid, held in service.held().items() if port in held]
        if how == "stopped":
            os.kill(hung, signal.SIGSTOP)
        else:
            first.sendall(b"GET /hang HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        time.sleep(0.3)
        waiting = {
            service.connect(opened, _HEALTH + b"connection: close\r\n\r\n") for _ in range(_ASKED)
        }
        meanwhile, lost = _outcomes(waiting, _HUNG_S)
        os.kill(hung, signal.SIGKILL)
        after, later_lost = _outcomes(waiting, _KILLED_S)
        return {
            "meanwhile": meanwhile,
            "after": after,
            "lost": lost + later_lost + len(waiting),
        }


def _outcomes(waiting: set[socket.socket], seconds: float) -> tuple[int, int]:
    """Count who is answered within a time, and who is turned out; they no longer wait."""
    end = time.monotonic() + seconds
    answered = lost = 0
    while waiting and time.monotonic() < end:
        for connection in list(waiting):
            try:
                connection.setblocking(False)
                is_answered = connection.recv(12) == b"HTTP/1.1 200"
            except BlockingIOError:
                continue
            except ConnectionError:
                is_answered = False
            waiting.discard(connection)
            answered, lost = answered + is_answered, lost + (not is_answered)
        time.sleep(0.01)
    return answered, lost


if __name__ == "__main__":
    main()
