"""How far one machine goes: time against the number of items, and against that of splits.

As in the simulation of PQTopK (Petrov, Macdonald and Tonellotto, RecSys 2024), codes are random:
search then finds no structure that would help it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from recprune.experiments.charts import lines
from recprune.experiments.experiment import Part, Plan
from recprune.experiments.record import Record
from recprune.experiments.report import Picture, Section, Table, Text
from recprune.experiments.timing import Search, index_search, interleaved, peer_search
from recprune.index import Index
from recprune.peers import registry
from recprune.peers.peer import CodesAndVectors
from recprune.types import CodeArray, Float32Array, Json, Progress

_WIDTH = 512
_SUB_ITEMS = 256
_BYTES_PER_ITEM = 80  # codes, index, and what building it takes for a while
_METHODS = ("auto", "scan", "pqtopk", "recjpqprune", "default")
_PEERS = ("faiss_pq", "torch_pqtopk")
_SLOW = {"pqtopk", "recjpqprune", "default", *_PEERS}
_PUBLISHED_MS = 1_408  # PQTopK, 100 M items, M = 8 (Petrov et al., RecSys 2024)


def measure(
    num_items: int, num_splits: int, queries: int, memory: int, seed: int, progress: Progress
) -> Json:
    """Time every method that fits into memory on random codes."""
    progress("drawing random codes")
    codes, embeddings, users = random_model(num_items, num_splits, queries, seed)
    progress("building the index")
    threads = os.cpu_count() or 1
    begun = time.perf_counter()
    index = Index.build(codes, embeddings, threads=threads)
    build_seconds = time.perf_counter() - begun
    described = index.describe()
    searches: dict[str, Search] = {}
    left_out: dict[str, str] = {}
    for method in _METHODS:
        if method == "default" and 4 * num_items * _WIDTH > min(memory // 4, 4 << 30):
            left_out[method] = f"needs {4 * num_items * _WIDTH / 1e9:,.0f} GB of item vectors"
            continue
        searches[method] = index_search(index, method)
    model = CodesAndVectors(codes, embeddings)
    for family in _PEERS:
        progress(f"building {family}")
        reason = registry.why_not(family, model.shape, memory // 3)
        if reason is None:
            searches[family] = peer_search(registry.build(family, model, memory // 3)[0])
        else:
            left_out[family] = reason
    slow = max(3, queries // (10 if num_items >= 10_000_000 else 2))
    with registry.one_thread():
        timed = interleaved(
            searches, users, 10, seed=seed, block=max(5, queries // 10),
            limits={name: slow for name in searches if name in _SLOW}, progress=progress,
        )  # fmt: skip
    return {
        "items": num_items,
        "splits": num_splits,
        "bytes_per_item": described["bytes_per_item"],
        "layout": described["layout"],
        "instruction_set": described["instruction_set"],
        "build_seconds": build_seconds,
        "build_threads": threads,
        "methods": {name: found.summary() for name, found in timed.items()},
        "left_out": left_out,
    }


def random_model(
    num_items: int, num_splits: int, queries: int, seed: int
) -> tuple[CodeArray, Float32Array, Float32Array]:
    """Return random codes, sub-item embeddings, and sequence embeddings."""
    rng = np.random.default_rng(seed)
    codes = np.frombuffer(rng.bytes(num_items * num_splits), np.uint8).reshape(-1, num_splits)
    shape = (num_splits, _SUB_ITEMS, _WIDTH // num_splits)
    embeddings = rng.standard_normal(shape, np.float32)
    # Trained embeddings make scores with a few sharp peaks; squared normals do too.
    users = rng.standard_normal((queries, _WIDTH), np.float32)
    return codes, embeddings, users * np.abs(users)


class Scaling:
    """Time against the number of items."""

    name = "scaling"
    title = "Scaling: from a million items to a billion"

    def parts(self, plan: Plan) -> list[Part]:
        """One for each size that fits into memory."""
        sizes = (20_000, 100_000) if plan.quick else (10**6, 10**7, 10**8, 10**9)
        fitting = [size for size in sizes if size * _BYTES_PER_ITEM < 0.9 * plan.memory_bytes]
        return [self._part(plan, size) for size in fitting]

    def _part(self, plan: Plan, size: int) -> Part:
        queries = plan.sized(min(200, max(30, 2 * 10**9 // size)), 10)
        settings = {"items": size, "splits": 8, "queries": queries, "seed": plan.seed}
        return Part(
            f"{size}",
            settings,
            lambda progress: measure(size, 8, queries, plan.memory_bytes, plan.seed, progress),
            minutes=1.0 + size / 4e7,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A log–log picture, and the table under it."""
        ordered = sorted(records, key=lambda record: int(record.figures["items"]))
        series = _series(ordered, "items")
        picture = lines(
            series,
            x_label="items", y_label="median time of a search, ms", log_x=True, log_y=True,
        )  # fmt: skip
        return Section(
            self.title,
            self.name,
            (
                Text(
                    "Random codes, M = 8, B = 256, d = 512, K = 10, one thread, S included. "
                    "The sub-linear engine gains on everything that reads every code. Published "
                    f"for PQTopK at 100 M items: {_PUBLISHED_MS:,} ms (Petrov, Macdonald and "
                    "Tonellotto, RecSys 2024; TensorFlow on 16 cores)."
                ),
                Picture(
                    "scaling", picture,
                    "Median search time against the number of items, by method, both logarithmic.",
                    "Time of one search against the number of items.",
                ),
                _table(ordered, "items", "items"),
                Text(_machines(ordered)),
            ),
        )  # fmt: skip


class Splits:
    """Time against the number of splits."""

    name = "splits"
    title = "Splits: longer codes"

    def parts(self, plan: Plan) -> list[Part]:
        """One for each number of splits."""
        size = plan.sized(1_000_000, 20_000)
        return [self._part(plan, size, splits) for splits in (4, 8, 16, 32)]

    def _part(self, plan: Plan, size: int, splits: int) -> Part:
        queries = plan.sized(200, 10)
        settings = {"items": size, "splits": splits, "queries": queries, "seed": plan.seed}
        return Part(
            f"{splits}",
            settings,
            lambda progress: measure(size, splits, queries, plan.memory_bytes, plan.seed, progress),
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A picture and a table."""
        ordered = sorted(records, key=lambda record: int(record.figures["splits"]))
        picture = lines(
            _series(ordered, "splits"),
            x_label="splits M", y_label="median time of a search, ms", log_x=True, log_y=True,
        )  # fmt: skip
        items = int(ordered[0].figures["items"])
        return Section(
            self.title,
            self.name,
            (
                Text(
                    f"{items:,} items with random codes, K = 10, one thread. Cells pair eight "
                    "splits of at most 256 sub-items; with other codes `auto` is the filtered "
                    "scan, or the plain one."
                ),
                Picture(
                    "splits", picture,
                    "Median search time against the number of splits, by method.",
                    "Time of one search against the number of splits.",
                ),
                _table(ordered, "splits", "splits"),
            ),
        )  # fmt: skip


def _series(records: Sequence[Record], over: str) -> dict[str, tuple[list[float], list[float]]]:
    series: dict[str, tuple[list[float], list[float]]] = {}
    for record in records:
        for name, figures in record.figures["methods"].items():
            xs, ys = series.setdefault(name, ([], []))
            xs.append(float(record.figures[over]))
            ys.append(figures["p50_us"] / 1000)
    return series


def _table(records: Sequence[Record], over: str, header: str) -> Table:
    rows, notes = [], []
    for record in records:
        figures = record.figures
        fastest = figures["methods"]["auto"]["p50_us"]
        for name, entry in figures["methods"].items():
            share = entry.get("items_touched")
            rows.append((
                f"{figures[over]:,}", name, f"{entry['p50_us'] / 1000:,.3f}",
                f"{entry['p95_us'] / 1000:,.3f}", f"{entry['p50_us'] / fastest:,.1f} ×",
                "" if share is None else f"{share / figures['items']:.2%}",
                f"{figures['bytes_per_item']:.1f}" if name == "auto" else "",
                f"{figures['build_seconds']:,.1f}" if name == "auto" else "",
            ))  # fmt: skip
        for name, reason in figures["left_out"].items():
            notes.append(f"{figures[over]:,} {header}, {name}: {reason}.")
    return Table(
        (header, "method", "median ms", "p95 ms", "÷ auto", "looked at", "bytes an item",
         "build s"),
        tuple(rows),
        "Left out: " + " ".join(notes) if notes else "",
    )  # fmt: skip


def _machines(records: Sequence[Record]) -> str:
    named = [
        f"{record.figures['items']:,} items on {record.machine['cpu']} "
        f"({record.machine['cores']} cores, {record.machine['memory_gigabytes']:.0f} GB, "
        f"{record.figures['instruction_set']})"
        for record in records
    ]
    return "Measured: " + "; ".join(named) + "."
