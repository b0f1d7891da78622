"""Exact search, method against method and against FAISS, in one interleaved run.

Methods take turns in blocks of queries, in an order that changes from block to block: what slows the
machine down slows all, and each finds the caches as a service that runs only this method would.
With `--block 1` they take turns after every query, and each finds what the others left behind. Times
are those of whole calls from Python on one thread, sub-item scores included.

    python -m benchmarks.search                              # random codes, one million items
    python -m benchmarks.search --items 10000000 --queries 50
    python -m benchmarks.search --workload FOLDER            # codes.npy, sub_item_embeddings.npy,
                                                             # sequence_embeddings.npy
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import model_of, write_result
from recprune import Index
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine
from recprune.experiments.framework.timing import (
    Search,
    index_search,
    interleaved,
    peer_search,
    unsuited,
)
from recprune.experiments.peers import families
from recprune.experiments.peers.peer import CodesAndVectors
from recprune.system import memory_bytes, peak_bytes
from recprune.types import Float32Array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", type=Path, help="a folder with a trained model's arrays")
    parser.add_argument("--items", type=int, default=1_000_000, help="of random codes")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--methods", default="auto,cells,scan,pqtopk,recjpqprune,faiss_pq")
    parser.add_argument("--layout", default="auto", choices=("auto", "full", "slim", "compact"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--block", type=int, default=100, help="queries of one method in a row")
    parser.add_argument("--out", type=Path, default=Path("out/bench-search.json"))
    parsed = parser.parse_args()
    codes, embeddings, queries = model_of(parsed.workload, parsed.items, parsed.queries)

    before = _peak_gigabytes()
    begun = time.perf_counter()
    index = Index.build(codes, embeddings, layout=parsed.layout, threads=2)
    built = time.perf_counter() - begun
    peak = _peak_gigabytes()
    searches = _searches(index, CodesAndVectors(codes, embeddings), parsed.methods.split(","))
    with families.one_thread():
        timed = interleaved(searches, queries, parsed.k, seed=0, block=parsed.block)
    ours = {name: found.ids for name, found in timed.items() if found.records is not None}
    first = next(iter(ours))
    for name, ids in ours.items():
        if not np.array_equal(ids, ours[first]):
            raise SystemExit(f"{name} disagrees with {first}: this is a bug")
    rows, figures = [], {name: found.summary() for name, found in timed.items()}
    names = list(searches)
    for name, entry in figures.items():
        entry["ratio"] = entry["p50_us"] / figures[names[0]]["p50_us"]
        counted = "items_scored" in entry
        rows.append(
            (
                name,
                *(f"{entry[at]:,.0f}" for at in ("p50_us", "p95_us", "p99_us")),
                f"{entry['ratio']:.1f}×",
                f"{entry['items_scored']:,.0f}" if counted else "",
                f"{entry['items_touched'] / len(codes):.1%}" if counted else "",
                f"{entry['bytes_touched'] / 1e6:,.2f}" if counted else "",
            )
        )
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
    result = {
        "index": described,
        "build_seconds": built,
        "build_peak_gigabytes": peak,
        "k": parsed.k,
        "methods": figures,
    }
    write_result(parsed.out, result)


def _peak_gigabytes() -> float:
    return peak_bytes() / 1e9


def _searches(index: Index, model: CodesAndVectors, names: list[str]) -> dict[str, Search]:
    searches: dict[str, Search] = {}
    for name in names:
        if name in families.FAMILIES:
            reason = families.why_not(name, model.shape, memory_bytes() // 2)
            if reason is None:
                peers = families.build(name, model, memory_bytes() // 2)
                searches |= {peer.name: peer_search(peer) for peer in peers}
            else:
                output.print(f"{name}: left out: {reason}")
            continue
        if (reason := unsuited(index, name)) is not None:
            output.print(f"{name}: left out: {reason}")
            continue
        searches[name] = index_search(index, name)
    return searches


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
