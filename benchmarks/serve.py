"""The HTTP service under load from a second process, beside FastAPI's floor and FAISS.

    python -m benchmarks.serve                    # a million random items
    python -m benchmarks.serve --workload FOLDER        # codes, sub-item and sequence embeddings
    python -m benchmarks.serve --recommender out/grocery-model/recommender

Load and service share one machine: figures are for comparing what is in one table, not for planning.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from benchmarks.measure import model_of, write_result
from benchmarks.proc import children, has_proc, memory
from benchmarks.serve_peers import FOLDER, RUNNING, WAITING
from recprune import Index, Recommender
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine
from recprune.system import available_cores
from recprune.types import Float32Array, Json

_CLI = ("-m", "recprune.cli")
_ENOUGH = ("--no-access-log", "--max-waiting", str(WAITING))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", type=Path, help="codes, sub-item and sequence embeddings")
    parser.add_argument("--recommender", type=Path, help="a saved one, for /recommend")
    parser.add_argument("--items", type=int, default=1_000_000, help="where no workload is given")
    parser.add_argument("--connections", default="1,2,4,8,16")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--out", type=Path, default=Path("out/bench-serve.json"))
    parsed = parser.parse_args()
    place = parsed.out.parent / "serve"
    place.mkdir(parents=True, exist_ok=True)
    folder, requests = place / "index", place / "search.jsonl"
    codes, embeddings, queries = model_of(parsed.workload, parsed.items, 500)
    index = Index.build(codes, embeddings, threads=2)
    index.save(folder)
    lines = [json.dumps({"sequence_embedding": row.tolist()}) for row in queries]
    requests.write_text("\n".join(lines))
    ladder = [int(count) for count in parsed.connections.split(",")]
    result: Json = {"items": index.num_items}
    result["search"] = _measure_search(folder, requests, ladder, parsed.seconds, index.num_items)
    result["direct_ms"] = _direct(index, queries)
    result["overhead"] = _show_overhead(result)
    result["overload"] = _measure_overload(folder, requests, parsed.seconds)
    if has_proc():
        result["memory"] = _measure_memory(folder, requests)
        result["growth"] = _measure_growth(folder, requests, index.num_items)
    if parsed.recommender:
        result["recommend"] = _measure_recommend(parsed.recommender, place, ladder, parsed.seconds)
    output.print(f"{machine()['cpu']}, {available_cores()} cores, load included")
    write_result(parsed.out, result)


# Services ----------------------------------------------------------------------------------------


@contextmanager
def _service(folder: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Run `recprune serve`; yield its address and process id."""
    words = ["serve", str(folder), "--port", "0", *options]
    process = subprocess.Popen([sys.executable, *_CLI, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the service does not start; see above")
        yield line.split()[-1].rstrip("/"), process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _peer(name: str, workers: int, folder: Path) -> Iterator[str]:
    """Run one of the peers with uvicorn alone."""
    port = 18_713
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--factory",
        f"benchmarks.serve_peers:{name}",
        "--port",
        str(port),
        "--workers",
        str(workers),
        "--log-level",
        "error",
        "--no-access-log",
    ]
    running = str(max(1, available_cores() // workers))
    environment = os.environ | {FOLDER: str(folder), RUNNING: running}
    process = subprocess.Popen(command, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(transport=httpx.HTTPTransport(retries=12)) as client:  # half a minute
            client.get(f"{url}/")
        yield url
    finally:
        process.terminate()
        process.wait()


def _load(url: str, requests: Path, *options: str) -> Json:
    """Send requests from another process; return what serve_load prints."""
    command = [sys.executable, "-m", "benchmarks.serve_load", url, str(requests), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the load failed: {done.stderr}")
    figures: Json = json.loads(done.stdout)
    return figures


# Measurements ------------------------------------------------------------------------------------


def _measure_search(
    folder: Path, requests: Path, ladder: list[int], seconds: float, num_items: int
) -> list[Json]:
    figures = []
    for workers in (1, 2):
        for name in ("floor", "recprune", "faiss"):
            if name == "recprune":
                with _service(folder, "--workers", str(workers), *_ENOUGH) as (url, _):
                    runs = _climb(f"{url}/search", requests, ladder, seconds)
            else:
                factory = "floor" if name == "floor" else "with_faiss"
                with _peer(factory, workers, folder) as url:
                    runs = _climb(f"{url}/search", requests, ladder, seconds)
            figures += [{"service": name, "workers": workers} | run for run in runs]
    print_table(f"POST /search, {num_items:,} items", _HEADER, [_row(run) for run in figures])
    return figures


_HEADER = ("service", "workers", "connections", "requests/s", "p50 ms", "p95", "p99", "search ms")


def _row(run: Json) -> tuple[str, ...]:
    search = f"{run['search_ms']:.2f}" if run["search_ms"] is not None else ""
    return (
        run["service"],
        str(run["workers"]),
        str(run["connections"]),
        f"{run['per_second']:,.0f}",
        f"{run['p50_ms']:.2f}",
        f"{run['p95_ms']:.2f}",
        f"{run['p99_ms']:.2f}",
        search,
    )


def _climb(url: str, requests: Path, ladder: list[int], seconds: float) -> list[Json]:
    """Measure at rising numbers of connections."""
    _load(url, requests, "--connections", "4", "--seconds", "0.5")  # what the first requests build
    runs = []
    for connections in ladder:
        options = ("--connections", str(connections), "--seconds", str(seconds))
        run = _load(url, requests, *options)
        if set(run["statuses"]) != {"200"}:
            raise SystemExit(f"{url}: answered with {run['statuses']}")
        runs.append({"connections": connections} | run)
    return runs


def _direct(index: Index, queries: Float32Array) -> float:
    """Return the median time of a search without any service, in this process."""
    for query in queries[:100]:
        index.search(query, 10)
    return float(np.median([index.search(q, 10).stats.nanoseconds[0] for q in queries]) / 1e6)


def _show_overhead(result: Json) -> Json:
    """Say how much of a request is not search, at one connection."""
    alone = [run for run in result["search"] if run["connections"] == 1 and run["workers"] == 1]
    shares = {}
    for run in alone:
        if run["search_ms"] is not None:
            shares[run["service"]] = 1.0 - run["search_ms"] / run["p50_ms"]
            output.print(
                f"{run['service']}: {run['search_ms']:.2f} of {run['p50_ms']:.2f} ms is search: "
                f"HTTP is {shares[run['service']]:.0%} of a request"
            )
    output.print(f"the same search in this process: {result['direct_ms']:.2f} ms")
    return shares


def _measure_overload(folder: Path, requests: Path, seconds: float) -> list[Json]:
    """Compare the requests that are admitted at twice the load that fits with those at half of it."""
    figures, rows = [], []
    for workers in (1, 2):
        with _service(folder, "--workers", str(workers), "--no-access-log") as (url, _):
            search = f"{url}/search"
            _load(search, requests, "--connections", "4", "--seconds", "0.5")
            fitting = ("--connections", str(8 * workers), "--seconds", str(seconds))
            capacity = float(_load(search, requests, *fitting)["per_second"])
            runs = {
                share: _load(
                    search, requests, "--rate", str(share * capacity), "--seconds", str(2 * seconds)
                )
                for share in (0.5, 2.0)
            }
        ratio = runs[2.0]["p99_ms"] / runs[0.5]["p99_ms"]
        figures.append({"workers": workers, "capacity": capacity, "ratio": ratio, "runs": runs})
        for share, run in runs.items():
            refused = run["statuses"].get("503", 0) / sum(run["statuses"].values())
            rows.append(
                (
                    f"{share:.1f} × {capacity:,.0f}/s",
                    str(workers),
                    f"{run['per_second']:,.0f}",
                    f"{refused:.0%}",
                    f"{run['p50_ms']:.2f}",
                    f"{run['p99_ms']:.2f}",
                    f"{run['p99_ms'] / runs[0.5]['p99_ms']:.1f}×",
                )
            )
    header = ("offered", "workers", "admitted/s", "503", "p50 ms", "p99", "÷ half load")
    print_table("/search at half and at twice the load that fits, default limits", header, rows)
    return figures


def _measure_memory(folder: Path, requests: Path) -> list[Json]:
    """Measure what each further worker costs: pages shared by n processes count for 1/n each."""
    figures: list[Json] = []
    rows = []
    for workers in (1, 2, 3):
        with _service(folder, "--workers", str(workers), *_ENOUGH) as (url, pid):
            _load(f"{url}/search", requests, "--connections", "12", "--seconds", "1")
            whole = sum(memory(process, "Pss:") for process in (pid, *children(pid)))
        more = whole - figures[-1]["bytes"] if figures else 0
        figures.append({"workers": workers, "bytes": whole})
        rows.append((str(workers), f"{whole / 1e6:,.0f}", f"{more / 1e6:,.0f}" if more else ""))
    print_table("memory, PSS", ("workers", "MB in all", "MB for one more"), rows)
    return figures


def _measure_growth(folder: Path, requests: Path, num_items: int) -> list[Json]:
    """Measure what each of two workers has after requests that need more than a search does."""
    names = folder.with_name("names.csv")
    rows = [
        f"{item},Product number {item:07} of kind {item % 1000:03}" for item in range(num_items)
    ]
    names.write_text("\n".join(["item_id,name", *rows]))
    question = json.loads(requests.read_text().splitlines()[0])
    asked: dict[str, tuple[str, str, Json]] = {
        "a search": ("POST", "/search", {"json": question}),
        "words that are nowhere": ("GET", "/items", {"params": {"query": "no such words"}}),
        "recjpqprune": ("POST", "/search", {"json": question | {"method": "recjpqprune"}}),
        "explain": ("POST", "/search", {"json": question | {"explain": True}}),
    }
    figures: list[Json] = []
    with _service(folder, "--workers", "2", "--names", str(names), *_ENOUGH) as (url, pid):
        workers = children(pid)
        for name, (method, path, more) in asked.items():
            times = []
            for _ in range(8):  # over connections of their own, which workers get in turn
                answer = httpx.request(method, f"{url}{path}", timeout=60, **more)
                answer.raise_for_status()
                times.append(1000.0 * answer.elapsed.total_seconds())
            private = [memory(worker, "Private_") for worker in workers]
            shared = [memory(worker, "Pss:") for worker in workers]
            figures.append({"after": name, "private": private, "pss": shared, "ms": times})
    table = [
        (
            run["after"],
            " ".join(f"{bytes_ / 1e6:,.0f}" for bytes_ in run["private"]),
            " ".join(f"{bytes_ / 1e6:,.0f}" for bytes_ in run["pss"]),
            f"{run['ms'][0]:.0f}",
            f"{run['ms'][-1]:.0f}",
        )
        for run in figures
    ]
    header = ("after", "MB private", "PSS", "first ms", "last ms")
    print_table(f"memory of two workers, {num_items:,} items with names", header, table)
    return figures


def _measure_recommend(folder: Path, place: Path, ladder: list[int], seconds: float) -> list[Json]:
    recommender = Recommender.load(folder)
    rng = np.random.default_rng(0)
    length = min(20, len(recommender.item_ids))
    histories = [
        recommender.item_ids.take(rng.choice(len(recommender.item_ids), length).tolist())
        for _ in range(200)
    ]
    requests = place / "recommend.jsonl"
    requests.write_text("\n".join(json.dumps({"history": history}) for history in histories))
    figures = []
    for workers in (1, 2):
        with _service(folder, "--workers", str(workers), *_ENOUGH) as (url, _):
            runs = _climb(f"{url}/recommend", requests, ladder, seconds)
        figures += [{"service": "recprune", "workers": workers} | run for run in runs]
    title = f"POST /recommend, {length} items of history, {len(recommender.item_ids):,} items"
    print_table(title, _HEADER, [_row(run) for run in figures])
    return figures


if __name__ == "__main__":
    main()
