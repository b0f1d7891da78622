"""Batches against the same queries one by one, in interleaved runs on one thread.

The same queries are searched by one call each, then by calls with so many of them, in an order that
changes from round to round: what slows the machine down slows both. Times are those of whole calls
from Python, sub-item scores included, divided by the queries; the ratio is the median of the
rounds' own. Ids and score bits of every answer are compared.

    python -m benchmarks.search_batch                        # random codes, one million items
    python -m benchmarks.search_batch --items 100000000 --queries 2048 --layout slim
    python -m benchmarks.search_batch --workload FOLDER      # codes.npy, sub_item_embeddings.npy,
                                                             # sequence_embeddings.npy
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.measure import model_of, write_result
from recprune import Index
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine
from recprune.search.top_k import TopK
from recprune.types import Float32Array, Json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", type=Path, help="a folder with a trained model's arrays")
    parser.add_argument("--items", type=int, default=1_000_000, help="of random codes")
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--batches", default="16,64,256,1024", help="queries of a call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--layout", default="auto", choices=("auto", "full", "slim", "compact"))
    parser.add_argument("--out", type=Path, default=Path("out/bench-search-batch.json"))
    parsed = parser.parse_args()
    codes, embeddings, queries = model_of(parsed.workload, parsed.items, parsed.queries)
    index = Index.build(codes, embeddings, layout=parsed.layout, threads=2)
    del codes

    def search(rows: Float32Array) -> TopK:
        return index.search(rows, parsed.k, method=parsed.method)

    sizes = [int(size) for size in parsed.batches.split(",")]
    seconds: dict[int, list[float]] = {size: [] for size in [1, *sizes]}
    together: dict[int, float] = {}
    rng = np.random.default_rng(0)
    for _ in range(parsed.rounds):
        answers = {}
        for size in rng.permutation(list(seconds)).tolist():
            taken, answers[size] = _timed(search, queries, size)
            seconds[size].append(taken)
            together[size] = float(
                np.concatenate([top.stats.together for top in answers[size]]).mean()
            )
        for size in sizes:
            _refuse_other_answers(answers[1], answers[size], size)
    alone = np.array(seconds[1])
    figures: Json = {
        str(size): {
            "us": 1e6 * float(np.median(taken)) / len(queries),
            "ratio": float(np.median(alone / np.array(taken))),
            "together": together[size],
        }
        for size, taken in seconds.items()
    }
    print_table(
        f"{index.num_items:,} items, K = {parsed.k}, {index.layout} layout, {len(queries)} queries × "
        f"{parsed.rounds}, {parsed.method}, {index.describe()['instruction_set']}",
        ("queries a call", "µs a query", "one by one ÷ this", "together"),
        [
            (size, f"{at['us']:,.1f}", f"{at['ratio']:.2f}", f"{at['together']:,.0f}")
            for size, at in figures.items()
        ],
    )
    output.print(machine()["cpu"])
    settings = {"k": parsed.k, "method": parsed.method, "rounds": parsed.rounds}
    write_result(parsed.out, {**settings, "index": index.describe(), "batches": figures})


def _timed(
    search: Callable[[Float32Array], TopK], queries: Float32Array, size: int
) -> tuple[float, list[TopK]]:
    """Search all queries, so many at a time."""
    pieces = [queries[first : first + size] for first in range(0, len(queries), size)]
    begun = time.perf_counter()
    answers = [search(piece) for piece in pieces]
    return time.perf_counter() - begun, answers


def _refuse_other_answers(alone: list[TopK], batched: list[TopK], size: int) -> None:
    for field in ("ids", "scores"):
        expected, found = (
            np.concatenate([getattr(top, field) for top in answers]) for answers in (alone, batched)
        )
        if expected.tobytes() != found.tobytes():
            raise SystemExit(f"{field} differ in batches of {size}: this is a bug")


if __name__ == "__main__":
    main()
