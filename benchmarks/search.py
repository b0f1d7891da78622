"""Exact search, method against method and against FAISS, in one interleaved run.

Methods take turns in blocks of queries, in an order that changes from block to block: all meet the
same moods of the machine, and each finds the caches as a service that runs only this method would.
With `--block 1` they take turns after every query, and each finds what the others left behind. Times
are those of whole calls from Python on one thread, sub-item scores included.

    python -m benchmarks.search                              # random codes, one million items
    python -m benchmarks.search --items 10000000 --queries 50
    python -m benchmarks.search --workload FOLDER            # codes.npy, sub_item_embeddings.npy,
                                                             # sequence_embeddings.npy
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import machine
from recprune import Index, InputError
from recprune.console import output, print_table
from recprune.types import CodeArray, Float32Array

Search = Callable[[Float32Array, int], Any]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", type=Path, help="a folder with a trained model's arrays")
    parser.add_argument("--items", type=int, default=1_000_000, help="of random codes")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--methods", default="auto,cells,scan,pqtopk,recjpqprune,faiss")
    parser.add_argument("--layout", default="auto", choices=("auto", "full", "compact"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--block", type=int, default=100, help="queries of one method in a row")
    parser.add_argument("--out", type=Path, default=Path("out/bench-search.json"))
    parsed = parser.parse_args()
    codes, embeddings, queries = _workload(parsed)
    queries = queries[: parsed.queries]

    before = _peak_gigabytes()
    begun = time.perf_counter()
    index = Index.build(codes, embeddings, layout=parsed.layout, threads=2)
    built = time.perf_counter() - begun
    peak = _peak_gigabytes()
    searches = _searches(index, codes, embeddings, parsed.methods.split(","))
    seconds: dict[str, list[float]] = {name: [] for name in searches}
    stats: dict[str, list[Any]] = {name: [] for name in searches}
    rng = np.random.default_rng(0)
    names = list(searches)
    for name in names:
        searches[name](queries[:1], parsed.k)  # what is built on first use
    for start in range(0, len(queries), parsed.block):
        expected: list[Any] = []
        for name in rng.permutation(names).tolist():
            found = []
            for query in queries[start : start + parsed.block]:
                begun = time.perf_counter()
                top = searches[name](query[None], parsed.k)
                seconds[name].append(time.perf_counter() - begun)
                found.append(top)
            if name == "faiss":
                continue
            stats[name] += [top.stats.records[0] for top in found]
            ids = [top.ids for top in found]
            if expected and not np.array_equal(expected, ids):
                raise SystemExit(f"{name} disagrees: this is a bug")
            expected = ids
    rows, figures = [], {}
    fastest = np.median(seconds[names[0]])
    for name in names:
        times = np.array(seconds[name]) * 1e6
        p50, p95, p99 = (float(np.percentile(times, at)) for at in (50, 95, 99))
        record = np.array(stats[name]) if stats[name] else None
        scored = f"{np.median(record['items_scored']):,.0f}" if record is not None else ""
        touched = read = ""
        if record is not None:
            touched = f"{np.median(record['items_touched']) / len(codes):.1%}"
            read = f"{np.median(record['bytes_touched']) / 1e6:,.2f}"
        ratio = float(np.median(seconds[name]) / fastest)
        figure = f"{ratio:.1f}×"
        rows.append(
            (name, f"{p50:,.0f}", f"{p95:,.0f}", f"{p99:,.0f}", figure, scored, touched, read)
        )
        figures[name] = {"p50_us": p50, "p95_us": p95, "p99_us": p99, "ratio": ratio}
    described = index.describe()
    print_table(
        f"{len(codes):,} items, K = {parsed.k}, {len(queries)} queries, {described['instruction_set']}",
        ("method", "p50 µs", "p95", "p99", f"÷ {names[0]}", "scored", "touched", "MB read"),
        rows,
    )
    output.print(
        f"{described['bytes_per_item']} bytes an item, built in {built:.1f} s on 2 threads at a peak "
        f"of {peak:.2f} GB ({before:.2f} GB of it for the codes and before); {machine()['cpu']}"
    )
    if parsed.threads > 1:
        _measure_threads(index, queries, parsed.k, parsed.threads)
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine(),
        "index": described,
        "build_seconds": built,
        "build_peak_gigabytes": peak,
        "k": parsed.k,
        "methods": figures,
    }
    parsed.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _workload(parsed: argparse.Namespace) -> tuple[CodeArray, Float32Array, Float32Array]:
    if parsed.workload:
        names = ("codes", "sub_item_embeddings", "sequence_embeddings")
        codes, embeddings, queries = (np.load(parsed.workload / f"{name}.npy") for name in names)
        return codes, embeddings, queries
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (parsed.items, 8), np.uint8)
    # Trained sub-item vectors make scores with a few sharp peaks; squaring normals does too.
    embeddings = rng.standard_normal((8, 256, 64)).astype(np.float32)
    queries = rng.standard_normal((parsed.queries, 512)).astype(np.float32)
    return codes, embeddings, queries * np.abs(queries)


def _searches(
    index: Index, codes: CodeArray, embeddings: Float32Array, names: list[str]
) -> dict[str, Search]:
    searches: dict[str, Search] = {}
    for name in names:
        if name == "faiss":
            peer = _faiss(codes, embeddings)
            if peer is not None:
                searches[name] = peer
            continue
        try:
            index.search(np.zeros(index.width, np.float32), 1, method=name)
        except InputError as error:
            output.print(f"{name}: left out: {error}")
            continue
        searches[name] = lambda query, k, name=name: index.search(query, k, method=name)  # type: ignore[misc]
    return searches


def _faiss(codes: CodeArray, embeddings: Float32Array) -> Search | None:
    """FAISS IndexPQ over the same codes and vectors: exhaustive and exact up to rounding."""
    try:
        import faiss
    except ImportError:
        output.print("faiss: not installed, left out: pip install 'recprune[bench]'")
        return None
    faiss.omp_set_num_threads(1)
    peer = Index.build(codes, embeddings).to_faiss()
    return lambda query, k: peer.search(query, k)


def _measure_threads(index: Index, queries: Float32Array, k: int, threads: int) -> None:
    def queries_per_second(count: int) -> float:
        begun = time.perf_counter()
        index.search(queries, k, threads=count)
        return len(queries) / (time.perf_counter() - begun)

    one = max(queries_per_second(1) for _ in range(3))
    many = max(queries_per_second(threads) for _ in range(3))
    output.print(
        f"batches: {one:,.0f} queries/s on 1 thread, {many:,.0f} on {threads}: {many / one:.2f}×"
    )


if __name__ == "__main__":
    main()
