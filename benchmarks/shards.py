"""The sharded index against the single one, on a simulated cluster: several nodes in this machine.

All nodes share the cores of this machine, so that shards wait for each other where real ones would
not: latencies are upper limits, while items scored and bytes sent are what any cluster would see.
Ways of asking take turns, in blocks of queries. Both indexes are memory-mapped files.

    python -m benchmarks.shards --items 2000000 --shards 4 --nodes 4
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.measure import write_result
from benchmarks.proc import has_proc, loopback_bytes
from recprune import Index, ShardedIndex, write_shards
from recprune.commands.console import output, print_table, say
from recprune.experiments.framework.machine import machine
from recprune.experiments.ours.scaling import random_model
from recprune.search.top_k import TopK
from recprune.shards.folder import shard_folder
from recprune.types import Float32Array, Json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--items", type=int, default=2_000_000, help="of random codes")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--queries", type=int, default=600)
    parser.add_argument("--batches", default="64,256,1024,4096", help="sizes to compare rounds by")
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--layout", default="auto", choices=("auto", "full", "slim", "compact"))
    parser.add_argument("--folder", type=Path, help="where indexes are kept; else they are removed")
    parser.add_argument("--out", type=Path, default=Path("out/bench-shards.json"))
    parsed = parser.parse_args()
    # A cluster of our own, closed to other processes. Ray reads these when it is imported.
    if not has_proc():
        raise SystemExit("what goes over the wire is counted by Linux alone: no /proc here")
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    folder = parsed.folder or Path(tempfile.mkdtemp(prefix="bench-shards"))
    try:
        result = _measure(parsed, folder)
    finally:
        if parsed.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    write_result(parsed.out, result)


def _measure(parsed: argparse.Namespace, folder: Path) -> Json:
    from ray.cluster_utils import Cluster

    load = os.getloadavg()
    sizes = [int(size) for size in parsed.batches.split(",")]
    codes, embeddings, many = random_model(parsed.items, 8, max(parsed.queries, *sizes), seed=0)
    queries = many[: parsed.queries]
    say("building")
    Index.build(codes, embeddings, layout=parsed.layout, threads=2).save(folder / "single")
    sharded_folder = folder / "sharded"
    write_shards(codes, embeddings, sharded_folder, parsed.shards, layout=parsed.layout, threads=2)
    del codes
    single = Index.load(folder / "single")
    node = {
        "num_cpus": -(-parsed.shards // parsed.nodes),
        "object_store_memory": 100 << 20,
    }
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(parsed.nodes - 1):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        with ShardedIndex.open(sharded_folder, address=cluster.address) as sharded:
            described = sharded.describe()
            say("single queries")
            alone = _measure_alone(single, sharded, queries, parsed.k)
            say("batches")
            batches = _measure_batches(single, sharded, queries, parsed.k, parsed.shards)
            say("rounds")
            rounds = _measure_rounds(sharded, many, parsed.k, parsed.shards, sizes)
            overhead = _call_overhead(sharded, queries)
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
    shard = Index.load(shard_folder(sharded_folder, 0))
    shard_us = _percentiles(_times(lambda query: shard.search(query, parsed.k), queries))
    constants = {
        "bytes_per_item": shard.describe()["bytes_per_item"],
        "items_per_shard": shard.num_items,
        "shard_alone_us": shard_us,
        "call_to_one_shard_us": overhead,
        "bytes_to_and_from_a_shard": alone["sharded, 1 round"]["network_bytes"] / parsed.shards,
    }
    _print(parsed, alone, batches, rounds, constants)
    return {
        "load_before": load,
        "load_after": os.getloadavg(),
        "items": parsed.items,
        "shards": parsed.shards,
        "nodes": len(described["nodes"]),
        "layout": parsed.layout,
        "k": parsed.k,
        "queries": len(queries),
        "single_queries": alone,
        "batches": batches,
        "us_per_query_by_batch_and_rounds": rounds,
        "constants": constants,
    }


@dataclass
class _Seen:
    """What one way of asking cost."""

    seconds: list[float] = field(default_factory=list)
    scored: int = 0
    touched: int = 0
    sent: int = 0  # bytes of messages
    on_the_wire: float = (
        0.0  # bytes through the loopback device, without what an idle cluster sends
    )
    queries: int = 0

    def add(self, found: TopK, seconds: float) -> None:
        self.seconds.append(seconds)
        self.queries += len(np.atleast_2d(found.ids))
        self.scored += int(found.stats.items_scored.sum())
        self.touched += int(found.stats.items_touched.sum())
        self.sent += getattr(found, "network_bytes", 0)

    def figures(self, num_items: int) -> Json:
        return {
            "scored_share": self.scored / self.queries / num_items,
            "touched_share": self.touched / self.queries / num_items,
            "items_scored": self.scored / self.queries,
            "network_bytes": self.sent / self.queries,
            "loopback_bytes": self.on_the_wire / self.queries,
        }


def _measure_alone(single: Index, sharded: ShardedIndex, queries: Float32Array, k: int) -> Json:
    """Ask one query at a time."""
    ways: dict[str, Callable[[Float32Array], TopK]] = {
        "single": lambda query: single.search(query, k),
        "sharded, 1 round": lambda query: sharded.search(query, k, rounds=1),
        "sharded, 2 rounds": lambda query: sharded.search(query, k, rounds=2),
    }
    expected = single.search(queries, k).ids
    seen = {name: _Seen() for name in ways}
    idle = _idle_bytes_per_second()
    for ask in ways.values():
        ask(queries[0])
    for block, first in enumerate(range(0, len(queries), 50)):
        names = list(ways)[block % len(ways) :] + list(ways)[: block % len(ways)]
        for name in names:
            begun_block, before = time.perf_counter(), loopback_bytes()
            for number in range(first, min(first + 50, len(queries))):
                begun = time.perf_counter()
                found = ways[name](queries[number])
                seen[name].add(found, time.perf_counter() - begun)
                if not np.array_equal(found.ids, expected[number]):
                    raise SystemExit(f"{name} disagrees with the single index: this is a bug")
            passed = time.perf_counter() - begun_block
            seen[name].on_the_wire += max(0.0, loopback_bytes() - before - idle * passed)
    return {
        name: {**_percentiles(entry.seconds), **entry.figures(single.num_items)}
        for name, entry in seen.items()
    }


def _measure_batches(
    single: Index, sharded: ShardedIndex, queries: Float32Array, k: int, num_shards: int
) -> Json:
    """Ask all queries at once."""
    cores = os.cpu_count() or 1
    ways: dict[str, Callable[[], TopK]] = {
        "single, 1 thread": lambda: single.search(queries, k),
        f"single, {cores} threads": lambda: single.search(queries, k, threads=cores),
        "sharded, 1 round": lambda: sharded.search(queries, k, rounds=1),
        "sharded, 2 rounds": lambda: sharded.search(queries, k, rounds=2),
        f"sharded, rotation in {num_shards} rounds": lambda: sharded.search(
            queries, k, rounds=num_shards
        ),
    }
    expected = single.search(queries, k).ids
    seen = {name: _Seen() for name in ways}
    idle = _idle_bytes_per_second()
    for turn in range(7):
        for name in list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]:
            begun, before = time.perf_counter(), loopback_bytes()
            found = ways[name]()
            passed = time.perf_counter() - begun
            seen[name].add(found, passed)
            seen[name].on_the_wire += max(0.0, loopback_bytes() - before - idle * passed)
            if not np.array_equal(found.ids, expected):
                raise SystemExit(f"{name} disagrees with the single index: this is a bug")
    return {
        name: {
            "queries_per_second": len(queries) / float(np.median(entry.seconds)),
            **entry.figures(single.num_items),
        }
        for name, entry in seen.items()
    }


def _measure_rounds(
    sharded: ShardedIndex, many: Float32Array, k: int, num_shards: int, sizes: list[int]
) -> Json:
    """Measure from which batch on more than one round pays: every time, not only a median."""
    found: Json = {}
    for size in sizes:
        times: dict[int, list[float]] = {rounds: [] for rounds in sorted({1, 2, num_shards})}
        for turn in range(6):
            for rounds in sorted(times, reverse=turn % 2 == 1):
                begun = time.perf_counter()
                sharded.search(many[:size], k, rounds=rounds)
                if turn:  # the first one warms up
                    times[rounds].append((time.perf_counter() - begun) * 1e6 / size)
        found[str(size)] = {str(rounds): sorted(entry) for rounds, entry in times.items()}
    return found


def _call_overhead(sharded: ShardedIndex, queries: Float32Array) -> Json:
    """Measure a call to one shard that has next to nothing to do."""
    return _percentiles(_times(lambda query: sharded.score(query, [0]), queries))


def _times(ask: Callable[[Float32Array], object], queries: Float32Array) -> list[float]:
    seconds = []
    for query in queries:
        begun = time.perf_counter()
        ask(query)
        seconds.append(time.perf_counter() - begun)
    return seconds


def _percentiles(seconds: list[float]) -> Json:
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]) * 1e6
    return {"p50_us": p50, "p95_us": p95, "p99_us": p99}


def _idle_bytes_per_second() -> float:
    before, begun = loopback_bytes(), time.perf_counter()
    time.sleep(2)
    return (loopback_bytes() - before) / (time.perf_counter() - begun)


def _print(
    parsed: argparse.Namespace, alone: Json, batches: Json, rounds: Json, constants: Json
) -> None:
    title = f"{parsed.items:,} items, {parsed.shards} shards, {parsed.nodes} nodes, K = {parsed.k}"
    rows = [
        (
            name,
            *(f"{entry[at]:,.0f}" for at in ("p50_us", "p95_us", "p99_us")),
            f"{entry['items_scored']:,.0f}",
            f"{entry['scored_share']:.4%}",
            f"{entry['network_bytes']:,.0f}",
            f"{entry['loopback_bytes']:,.0f}",
        )
        for name, entry in alone.items()
    ]
    header = (
        "one query",
        "p50 µs",
        "p95",
        "p99",
        "scored",
        "share",
        "message bytes",
        "on the wire",
    )
    print_table(title, header, rows)
    batch_rows = [
        (
            name,
            f"{entry['queries_per_second']:,.0f}",
            f"{entry['items_scored']:,.0f}",
            f"{entry['scored_share']:.4%}",
            f"{entry['network_bytes']:,.0f}",
            f"{entry['loopback_bytes']:,.0f}",
        )
        for name, entry in batches.items()
    ]
    batch_header = ("batch", "queries/s", "scored", "share", "message bytes", "on the wire")
    print_table(f"all {parsed.queries} queries at once", batch_header, batch_rows)
    print_table(
        "µs a query, median (lowest to highest of five), by rounds",
        ("queries", *next(iter(rounds.values()))),
        [
            (
                size,
                *(f"{times[2]:,.0f} ({times[0]:,.0f}-{times[-1]:,.0f})" for times in by.values()),
            )
            for size, by in rounds.items()
        ],
    )
    output.print(
        f"{constants['bytes_per_item']} bytes an item; a shard of {constants['items_per_shard']:,} "
        f"items alone takes {constants['shard_alone_us']['p50_us']:,.0f} µs; a call to one shard "
        f"with nothing to do {constants['call_to_one_shard_us']['p50_us']:,.0f} µs; "
        f"{machine()['cpu']}, {os.cpu_count()} cores for all nodes, load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
