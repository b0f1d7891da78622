"""What filters cost: making their bits, and searching with them, in one interleaved run.

Conditions differ in their constants, so that none is found among those that are kept whole. Their
times are those of `Attributes.where` from text to bits, on one thread; how many a second that makes
is by the thread's own time, which others on the machine have no part in. Changes are those of a few
items, and of conditions that were kept before.

Searches have an allow mask with a share of the items: at random, neighbours by their id, or by
their codes, as items of one kind are. `auto` is compared with the better of searching and filtering
(`cells`, `scan`) and of scoring what is allowed (`pqtopk`): ratios are those of medians, of methods
that took turns query by query. Limits have at most so many of one of a thousand brands in the top.

    python -m benchmarks.filters                              # random codes, one million items
    python -m benchmarks.filters --workload FOLDER            # codes.npy, sub_item_embeddings.npy,
                                                              # sequence_embeddings.npy
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import model_of, write_result
from recprune import METHODS, Attributes, Index, InputError
from recprune.attributes.diversity import Limit, search_at_most
from recprune.commands.console import output, print_table
from recprune.data.identifiers import RowNumbers
from recprune.experiments.framework.machine import machine
from recprune.types import CodeArray, Float32Array, Json

_CATEGORIES = 200
_BRANDS = 1000
_TAGS = 2000
_COMPARED = ("auto", "cells", "scan", "pqtopk")
_HOPELESS = 20  # times as long as `auto`: a method that takes so long is not measured closely


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", type=Path, help="a folder with a trained model's arrays")
    parser.add_argument("--items", type=int, default=1_000_000, help="of random codes")
    parser.add_argument("--conditions", type=int, default=1000, help="of each kind")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-k", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--out", type=Path, default=Path("out/bench-filters.json"))
    parsed = parser.parse_args()
    codes, embeddings, queries = model_of(parsed.workload, parsed.items, parsed.queries)
    attributes = _attributes(len(codes))
    conditions = _conditions(attributes, parsed.conditions)
    changes = _changes(attributes)
    index = Index.build(codes, embeddings, threads=2)
    masks = _masks(codes)
    searches = [
        _searches(index, queries, k, name, share, mask, parsed.rounds)
        for k in parsed.k
        for (name, share), mask in masks.items()
    ]
    limits = [
        _limits(index, queries, k, attributes, count, parsed.rounds)
        for k in parsed.k
        for count in (1, 3)
    ]
    output.print(f"{machine()['cpu']}, {index.describe()['instruction_set']}")
    write_result(
        parsed.out,
        {
            "index": index.describe(),
            "conditions": conditions,
            "changes": changes,
            "searches": searches,
            "limits": limits,
        },
    )


# Conditions --------------------------------------------------------------------------------------


def _attributes(num_items: int) -> Attributes:
    import pyarrow as pa

    rng = np.random.default_rng(1)

    def words(name: str, count: int, size: int) -> Any:
        values = pa.array([f"{name} {number}" for number in range(count)])
        places = pa.array(np.minimum(rng.geometric(4 / count, size) - 1, count - 1), pa.int32())
        return pa.DictionaryArray.from_arrays(places, values)

    tags = words("tag", _TAGS, 3 * num_items)
    return Attributes.from_table(
        {
            "item_id": np.arange(num_items),
            "category": words("category", _CATEGORIES, num_items),
            "brand": words("brand", _BRANDS, num_items),
            "price": np.round(rng.lognormal(3.5, 1.0, num_items), 2),
            "weight": rng.random(num_items),
            "in_stock": rng.random(num_items) < 0.8,
            "added": pa.array(rng.integers(1_500_000_000, 1_700_000_000, num_items), pa.timestamp("s")),
            "tags": pa.ListArray.from_arrays(pa.array(np.arange(0, 3 * num_items + 1, 3), pa.int32()), tags),
        },
        RowNumbers(num_items),
    )  # fmt: skip


def _kinds(rng: np.random.Generator) -> dict[str, Callable[[], str]]:
    def price() -> str:
        return f"{rng.lognormal(3.5, 1.0):.4f}"

    def category() -> str:
        return f"'category {rng.integers(_CATEGORIES)}'"

    return {
        "category in (…, …) and price < … and in_stock": lambda: (
            f"category in ({category()}, {category()}) and price < {price()} and in_stock"
        ),
        "weight < …": lambda: f"weight < {rng.random()}",
        "brand = … and price >= …": lambda: (
            f"brand = 'brand {rng.integers(_BRANDS)}' and price >= {price()}"
        ),
        "… in tags and added > …": lambda: (
            f"'tag {rng.integers(_TAGS)}' in tags and added > '20{rng.integers(18, 24)}-"
            f"{rng.integers(1, 13):02}-{rng.integers(1, 29):02}'"
        ),
        "brand in (50 of them)": lambda: (
            "brand in ("
            + ", ".join(f"'brand {one}'" for one in rng.integers(_BRANDS, size=50))
            + ")"
        ),
        "not (price < … or weight > …) or in_stock and added <= …": lambda: (
            f"not (price < {price()} or weight > {rng.random()}) or in_stock and "
            f"added <= '2021-{rng.integers(1, 13):02}-{rng.integers(1, 29):02}'"
        ),
    }


def _conditions(attributes: Attributes, count: int) -> Json:
    figures: Json = {}
    for name, draw in _kinds(np.random.default_rng(2)).items():
        attributes.where(draw())  # the items of every tag are listed when first asked for
        texts = [draw() for _ in range(count)]
        seconds = []
        worked = time.thread_time()
        for text in texts:
            begun = time.perf_counter()
            attributes.where(text)
            seconds.append(time.perf_counter() - begun)
        worked = time.thread_time() - worked
        begun = time.perf_counter()
        for _ in range(count):
            attributes.where(texts[-1])
        figures[name] = {
            "a_second": count / worked,
            "p50_us": 1e6 * float(np.median(seconds)),
            "p99_us": 1e6 * float(np.quantile(seconds, 0.99)),
            "kept_us": 1e6 * (time.perf_counter() - begun) / count,
        }
    print_table(
        f"{attributes.num_items:,} items, {count} different conditions of each kind",
        ("condition", "a second of a core", "p50 µs", "p99 µs", "asked again µs"),
        [
            (name, f"{at['a_second']:,.0f}", f"{at['p50_us']:,.0f}", f"{at['p99_us']:,.0f}", f"{at['kept_us']:,.0f}")
            for name, at in figures.items()
        ],
    )  # fmt: skip
    return figures


def _changes(attributes: Attributes) -> Json:
    """Measure what it takes to change some items, and to ask a condition that was kept again."""
    rng = np.random.default_rng(3)
    where = "category in ('category 1', 'category 2') and price < 50 and in_stock"
    ids = RowNumbers(attributes.num_items)
    figures: Json = {}
    for count in (1, 100, 10_000):
        changing, asking = [], []
        now = attributes
        for _ in range(10):
            now.where(where)
            items = rng.permutation(attributes.num_items)[:count]
            table = {
                "item_id": items,
                "in_stock": rng.random(count) < 0.5,
                "price": rng.random(count),
            }
            begun = time.perf_counter()
            now = now.updated(table, ids)
            changing.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            now.where(where)
            asking.append(time.perf_counter() - begun)
        figures[str(count)] = {
            "change_ms": 1e3 * float(np.median(changing)),
            "ask_us": 1e6 * float(np.median(asking)),
        }  # fmt: skip
    print_table(
        "Two columns of some items change",
        ("items", "change ms", "a kept condition, asked again µs"),
        [(count, f"{at['change_ms']:.1f}", f"{at['ask_us']:.0f}") for count, at in figures.items()],
    )
    return figures


# Searches ----------------------------------------------------------------------------------------


def _masks(codes: CodeArray) -> dict[tuple[str, float], NDArray[np.uint64]]:
    """Return masks as bits, by how their items are chosen and which share of all they are."""
    rng = np.random.default_rng(4)
    count = len(codes)
    orders = {
        "random": rng.permutation(count),
        "neighbours by id": (np.arange(count) + rng.integers(count)) % count,
        "neighbours by code": np.lexsort(np.asarray(codes).T[::-1]),
    }
    shares = [10.0**power for power in range(-6, 0)] + [0.03, 0.3, 0.6, 1.0]
    masks = {}
    for name, order in orders.items():
        first = int(rng.integers(count)) if name == "neighbours by code" else 0
        for share in sorted(shares):
            mask = np.zeros(-(-count // 64) * 64, np.bool_)
            mask[np.roll(order, -first)[: max(1, round(share * count))]] = True
            masks[name, share] = np.packbits(mask, bitorder="little").view(np.uint64)
    return masks


def _searches(
    index: Index,
    queries: Float32Array,
    k: int,
    name: str,
    share: float,
    mask: NDArray[np.uint64],
    rounds: int,
) -> Json:
    asks: dict[str, Callable[[Float32Array], None]] = {}
    soon = 0.0
    for method in _COMPARED:

        def ask(query: Float32Array, method: str = method) -> None:
            index.search(query, k, method=method, allow=mask)

        try:
            ask(queries[0])
        except InputError:  # the index has no such method
            continue
        begun = time.perf_counter()
        ask(queries[0])
        seconds = time.perf_counter() - begun
        soon = soon or seconds
        if seconds < _HOPELESS * soon:
            asks[method] = ask
    ran = index.search(queries, k, allow=mask).stats.method
    times = _medians(asks, queries, rounds)
    best = min((method for method in times if method != "auto"), key=times.__getitem__)
    figures: Json = {
        "k": k,
        "mask": name,
        "share": share,
        "p50_us": times,
        "best": best,
        "ran": max({*ran}, key=ran.count),
        "ratio": times["auto"] / times[best],
    }
    shown = ", ".join(f"{method} {time:,.0f}" for method, time in times.items())
    far = "  <- beyond 1.3" if figures["ratio"] > 1.3 else ""
    output.print(
        f"K = {k}, {name}, {share:g}: {shown} µs; auto ran {figures['ran']}, best {best}, ratio "
        f"{figures['ratio']:.2f}{far}",
        highlight=False,
    )
    return figures


def _limits(
    index: Index, queries: Float32Array, k: int, attributes: Attributes, count: int, rounds: int
) -> Json:
    limit = Limit(attributes.limited("brand", count), count)
    method = METHODS["auto"]

    def limited(query: Float32Array) -> None:
        search_at_most(index, query[None], k, limit, method=lambda: method)

    asks: dict[str, Callable[[Float32Array], None]] = {
        "plain": lambda query: _nothing(index.search(query[None], k)),
        "limited": limited,
    }
    times = _medians(asks, queries, rounds)
    output.print(
        f"K = {k}, at most {count} of a brand: {times['limited']:,.0f} µs, without a limit "
        f"{times['plain']:,.0f}",
        highlight=False,
    )
    return {"k": k, "count": count, "p50_us": times}


def _nothing(_: object) -> None:
    pass


def _medians(
    asks: dict[str, Callable[[Float32Array], None]], queries: Float32Array, rounds: int
) -> dict[str, float]:
    """Return the median microseconds of every way to ask, which take turns query by query."""
    seconds: dict[str, list[float]] = {name: [] for name in asks}
    names, rng = list(asks), np.random.default_rng(0)
    for query in queries[:3]:
        for ask in asks.values():
            ask(query)
    for _ in range(rounds):
        for query in queries:
            for name in rng.permutation(names):
                begun = time.perf_counter()
                asks[name](query)
                seconds[name].append(time.perf_counter() - begun)
    return {name: 1e6 * float(np.median(times)) for name, times in seconds.items()}


if __name__ == "__main__":
    main()
