"""What boosts cost: searches with and without them, in one interleaved run.

Each query is searched plain, with as many boosts of random items, and with the same items excluded,
in an order that changes from query to query: what slows the machine down slows all. Weak boosts are
a hundredth of what lies between the best scores and the usual ones; strong ones are all of it, and
put boosted items on top. Times are those of whole calls from Python on one thread. The cost is the
median of the differences to the plain search of the same query and round, the ratio that of their
quotients. With `--batch`, a call has so many queries, and times are those of one of them.

    python -m benchmarks.boosts                              # random codes, one million items
    python -m benchmarks.boosts --workload FOLDER            # codes.npy, sub_item_embeddings.npy,
                                                             # sequence_embeddings.npy
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.measure import model_of, write_result
from recprune import Index
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine
from recprune.search import reference
from recprune.search.top_k import TopK
from recprune.types import Boosts, Float32Array, Json

Ask: TypeAlias = Callable[[Float32Array], TopK]
_CHECKED = 5  # queries whose answers are compared with exhaustive scoring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", type=Path, help="a folder with a trained model's arrays")
    parser.add_argument("--items", type=int, default=1_000_000, help="of random codes")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--boosts", type=int, default=200, help="of each search")
    parser.add_argument("--batch", type=int, help="queries of a call; one, without a batch")
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--layout", default="auto", choices=("auto", "full", "slim", "compact"))
    parser.add_argument("--out", type=Path, default=Path("out/bench-boosts.json"))
    parsed = parser.parse_args()
    codes, embeddings, queries = model_of(parsed.workload, parsed.items, parsed.queries)
    index = Index.build(codes, embeddings, layout=parsed.layout, threads=2)
    asks = _asks(index, queries, parsed.boosts, parsed.k, parsed.method)
    _check(index, asks["weak boosts"][1], queries, parsed.k, parsed.method)
    calls = queries
    if parsed.batch:
        calls = queries[: len(queries) // parsed.batch * parsed.batch]
        calls = calls.reshape(-1, parsed.batch, index.width)
    seconds = _interleaved({name: ask for name, (ask, _) in asks.items()}, calls, parsed.rounds)
    figures: Json = {}
    for name, mine in seconds.items():
        plain, microseconds = seconds["plain"], 1e6 / (parsed.batch or 1)
        figures[name] = {
            "p50_us": microseconds * float(np.median(mine)),
            "cost_us": microseconds * float(np.median(mine - plain)),
            "ratio": float(np.median(mine / plain)),
        }
    print_table(
        f"{len(codes):,} items, K = {parsed.k}, {parsed.boosts} boosts, {index.layout} layout, "
        f"{len(queries)} queries × {parsed.rounds}, {parsed.batch or 1} a call, "
        f"{index.describe()['instruction_set']}",
        ("search", "p50 µs", "cost µs", "ratio"),
        [
            (name, f"{at['p50_us']:,.1f}", f"{at['cost_us']:+,.1f}", f"{at['ratio']:.3f}")
            for name, at in figures.items()
        ],
    )
    output.print(machine()["cpu"])
    settings = {name: vars(parsed)[name] for name in ("k", "boosts", "batch", "method")}
    write_result(parsed.out, {**settings, "index": index.describe(), "searches": figures})


def _asks(
    index: Index, queries: Float32Array, count: int, k: int, method: str
) -> dict[str, tuple[Ask, Boosts | None]]:
    """Return the searches to compare, and the boosts of each."""
    rng = np.random.default_rng(0)
    items = rng.permutation(index.num_items)[:count]
    found = index.search(queries[:100], 10)
    reach = float(found.scores.mean() - index.score(queries[:100], items).mean())
    signs = rng.choice([-1.0, 1.0], count)

    def each(given: Any, query: Float32Array) -> Any:
        return given if query.ndim == 1 else [given] * len(query)

    def excluded(query: Float32Array) -> TopK:
        return index.search(query, k, method=method, exclude=each(items, query))

    def boosted(boosts: Boosts) -> tuple[Ask, Boosts]:
        def ask(query: Float32Array) -> TopK:
            return index.search(query, k, method=method, boosts=each(boosts, query))

        return ask, boosts

    return {
        "plain": (lambda query: index.search(query, k, method=method), None),
        "excluded": (excluded, None),
        "weak boosts": boosted((items, (0.01 * reach * signs).astype(np.float32))),
        "strong boosts": boosted((items, (reach * np.abs(signs)).astype(np.float32))),
    }


def _check(index: Index, boosts: Boosts | None, queries: Float32Array, k: int, method: str) -> None:
    codes, bias = index.item_codes(), index.item_bias
    for query in queries[:_CHECKED]:
        top = index.search(query, k, method=method, boosts=boosts)
        table = index.sub_item_scores(query)
        ids, scores = reference.exhaustive(table, codes, k, bias=bias, boosts=boosts)
        if not (np.array_equal(top.ids, ids) and np.array_equal(top.scores, scores)):
            raise SystemExit("boosts disagree with exhaustive scoring: this is a bug")


def _interleaved(
    asks: dict[str, Ask], queries: Float32Array, rounds: int
) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Return the seconds of every search, [rounds, queries]."""
    seconds = {name: np.empty((rounds, len(queries))) for name in asks}
    names, rng = list(asks), np.random.default_rng(0)
    for turn in range(rounds):
        for place, query in enumerate(queries):
            for name in rng.permutation(names):
                begun = time.perf_counter()
                asks[name](query)
                seconds[name][turn, place] = time.perf_counter() - begun
    return seconds


if __name__ == "__main__":
    main()
