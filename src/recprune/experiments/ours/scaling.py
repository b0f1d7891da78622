"""How far one machine goes: time against the number of items, and against that of splits.

As in the simulation of PQTopK (Petrov, Macdonald and Tonellotto, RecSys 2024), codes are random:
search then finds no structure that would help it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from recprune.experiments.framework.experiment import ExperimentPart, Need, Setup
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import (
    COMPARED,
    Search,
    agreement,
    agreement_in_words,
    index_search,
    interleaved,
    milliseconds,
    peer_search,
)
from recprune.experiments.peers import families
from recprune.experiments.peers.peer import CodesAndVectors
from recprune.experiments.report.chart_style import Points
from recprune.experiments.report.charts import lines
from recprune.experiments.report.document import Picture, Section, Table, Text
from recprune.search.index import Index
from recprune.search.methods import Default, Method
from recprune.types import CodeArray, Float32Array, Json, Progress, random_generator

_WIDTH = 512
_SUB_ITEMS = 256
_BYTES_PER_ITEM = 80  # codes, index, and what building it takes for a while
# In the order of the notes under a table. Not `cells`, which `auto` takes wherever they pay.
_METHODS = ("auto", "scan", "pqtopk", "recjpqprune", "default")
PEERS = {"faiss_pq": "FAISS PQ", "torch_pqtopk": "torch PQTopK"}  # by what readers call them
_SLOW = {"pqtopk", "recjpqprune", "default", *PEERS}  # these get fewer queries
# Untimed queries. A method that streams through gigabytes empties the caches: over 100 M items, the
# next one takes so many queries to be as fast as when it runs alone.
WARM = 10
_SAFE = 0.7  # share of the memory that an index and what methods add to it may fill
_SECONDS = 600.0  # that the queries of one method may take
_HARDWARE = ("cpu", "cores", "memory_gigabytes")  # by which machines are distinguished
_PUBLISHED_MS = 1_408  # PQTopK, 100 M items, M = 8 (Petrov et al., RecSys 2024)


def measure(
    num_items: int,
    num_splits: int,
    queries: int,
    memory: int,
    seed: int,
    progress: Progress,
    seconds: float = _SECONDS,
) -> Json:
    """Time every method that fits into memory, and into `seconds`, on random codes."""
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
    dense_bytes = 4 * num_items * _WIDTH
    list_bytes = 4 * num_items * num_splits
    crowded = described["bytes"] + codes.nbytes + list_bytes > _SAFE * memory
    for name in _METHODS:
        method: str | Method = name
        if name == "recjpqprune" and crowded:
            left_out[name] = f"needs {list_bytes / 1e9:,.0f} GB of posting lists beside the index"
            continue
        if name == "default":
            if dense_bytes > memory // 2:
                left_out[name] = f"needs {dense_bytes / 1e9:,.0f} GB of item vectors"
                continue
            method = Default(max_bytes=dense_bytes)
        searches[name] = index_search(index, method)
    model = CodesAndVectors(codes, embeddings)
    for family in PEERS:
        progress(f"building {family}")
        reason = families.why_not(family, model.shape, memory // 3)
        if reason is None:
            searches[family] = peer_search(families.build(family, model, memory // 3)[0])
        else:
            left_out[family] = reason
    slow = min(max(3, queries // 2), max(6, 2 * 10**8 // num_items))
    with families.one_thread():
        for name in [name for name in searches if name in _SLOW]:
            progress(f"trying {name}")
            each = _seconds(searches[name], users[0])
            if each * slow > seconds:
                del searches[name]
                left_out[name] = (
                    f"a query takes {each:,.1f} s, so that {slow} would take longer than "
                    f"{seconds / 60:,.0f} minutes"
                )
        timed = interleaved(
            searches,
            users,
            10,
            seed=seed,
            block=_block(queries),
            warm=WARM,
            limits={name: slow for name in searches if name in _SLOW},
            progress=progress,
        )
    return {
        "items": num_items,
        "splits": num_splits,
        "bytes_per_item": described["bytes_per_item"],
        "layout": described["layout"],
        "instruction_set": described["instruction_set"],
        "build_seconds": build_seconds,
        "build_threads": threads,
        "methods": {name: found.summary() for name, found in timed.items()},
        "agreed": agreement({name: timed[name] for name in _METHODS if name in timed}),
        "left_out": left_out,
    }


def _block(queries: int) -> int:
    """Return how many queries a method gets in a row."""
    return max(5, queries // 4)


def _seconds(search: Search, query: Float32Array) -> float:
    """Return about how long a search takes, without what it builds on first use."""
    search(query, 10)
    begun = time.perf_counter()
    search(query, 10)
    return time.perf_counter() - begun


def random_model(
    num_items: int, num_splits: int, queries: int, seed: int
) -> tuple[CodeArray, Float32Array, Float32Array]:
    """Return random codes, sub-item embeddings, and sequence embeddings."""
    rng = random_generator(seed)
    codes = np.frombuffer(rng.bytes(num_items * num_splits), np.uint8).reshape(-1, num_splits)
    shape = (num_splits, _SUB_ITEMS, _WIDTH // num_splits)
    embeddings = rng.standard_normal(shape, np.float32)
    # Trained embeddings make scores with a few sharp peaks; squared normals do too.
    users = rng.standard_normal((queries, _WIDTH), np.float32)
    return codes, embeddings, users * np.abs(users)


class Scaling:
    """Time against the number of items."""

    name = "scaling"
    title = "Scaling: time against the number of items"
    needs: frozenset[Need] = frozenset()

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each size that fits into memory."""
        sizes = (20_000, 100_000) if setup.quick else (10**6, 10**7, 10**8, 10**9)
        fitting = [size for size in sizes if size * _BYTES_PER_ITEM < 0.9 * setup.memory_bytes]
        return [self._part(setup, size) for size in fitting]

    def _part(self, setup: Setup, size: int) -> ExperimentPart:
        queries = setup.sized(200, 10)
        settings = _settings(setup, size, 8, queries)
        return ExperimentPart(
            f"{size}",
            settings,
            lambda progress: measure(size, 8, queries, setup.memory_bytes, setup.seed, progress),
            minutes=1.0 + size / 4e7,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A log–log picture, and the table under it."""
        ordered = sorted(records, key=lambda record: int(record.figures["items"]))
        picture = _picture(ordered, "items", "items")
        return Section(
            self.title,
            self.name,
            (
                Text(
                    "Random codes, M = 8, B = 256, d = 512, K = 10, one thread, S included. "
                    f"{_gain(ordered)} Published for PQTopK at 100 M items: {_PUBLISHED_MS:,} ms "
                    "(Petrov, Macdonald and Tonellotto, RecSys 2024; TensorFlow on 16 cores). "
                    f"{_agreed(ordered, 'items')}"
                ),
                Picture(
                    "scaling",
                    picture,
                    "Median search time against the number of items, by method, both logarithmic.",
                    f"Time of one search against the number of items. {_joined(ordered, 'items')}",
                ),
                _table(ordered, "items", "items"),
                Text(_machines(ordered)),
            ),
        )


class Splits:
    """Time against the number of splits."""

    name = "splits"
    title = "Splits: longer codes"
    needs: frozenset[Need] = frozenset()

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each number of splits."""
        size = setup.sized(1_000_000, 20_000)
        return [self._part(setup, size, splits) for splits in (4, 8, 16, 32)]

    def _part(self, setup: Setup, size: int, splits: int) -> ExperimentPart:
        queries = setup.sized(200, 10)
        settings = _settings(setup, size, splits, queries)
        return ExperimentPart(
            f"{splits}",
            settings,
            lambda progress: measure(
                size, splits, queries, setup.memory_bytes, setup.seed, progress
            ),
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A picture and a table."""
        ordered = sorted(records, key=lambda record: int(record.figures["splits"]))
        picture = _picture(ordered, "splits", "splits M")
        items = int(ordered[0].figures["items"])
        return Section(
            self.title,
            self.name,
            (
                Text(
                    f"{items:,} items with random codes, K = 10, one thread. Of a million "
                    "items, `auto` searches the cells of codes of up to 12 splits, and scans "
                    f"longer ones. {_agreed(ordered, 'splits')}"
                ),
                Picture(
                    "splits",
                    picture,
                    "Median search time against the number of splits, by method.",
                    "Time of one search against the number of splits. "
                    + _joined(ordered, "splits"),
                ),
                _table(ordered, "splits", "splits"),
            ),
        )


def _settings(setup: Setup, size: int, splits: int, queries: int) -> Json:
    return {
        "items": size,
        "splits": splits,
        "queries": queries,
        "seed": setup.seed,
        "block": _block(queries),
        "warm": WARM,
        "compared": COMPARED,
        "seconds": _SECONDS,
    }


def _by_machine(records: Sequence[Record]) -> list[list[Record]]:
    """Return the records of each machine, those of the machine with most of them first."""
    found: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        # Versions may differ from run to run; what the times depend on most is the hardware.
        found.setdefault(tuple(record.machine.get(name) for name in _HARDWARE), []).append(record)
    return sorted(found.values(), key=len, reverse=True)


def _picture(records: Sequence[Record], over: str, x_label: str) -> str:
    """Draw a line for each method and machine: what machines differ in is no effect of size."""
    first, *others = (_series(own, over) for own in _by_machine(records))
    elsewhere: dict[str, list[Points]] = {}
    for series in others:
        for name, points in series.items():
            elsewhere.setdefault(name, []).append(points)
    return lines(
        first,
        elsewhere=elsewhere,
        x_label=x_label,
        y_label="median time of a search, ms",
        log_x=True,
        log_y=True,
    )


def _joined(records: Sequence[Record], over: str) -> str:
    """Say which points are of which machine, if there are several."""
    _, *others = _by_machine(records)
    if not others:
        return ""
    values = ", ".join(f"{record.figures[over]:,}" for own in others for record in own)
    return (
        f"Hollow points, with dots between those of one machine, are from another machine: {values}"
        f" {over}."
    )


def _gain(records: Sequence[Record]) -> str:
    """Say how far `auto` is ahead of the scan, which looks at every item, as sizes grow."""
    sentences = []
    for at in dict.fromkeys((0, len(records) - 1)):
        figures = records[at].figures
        scan, auto = (figures["methods"][name]["p50_us"] for name in ("scan", "auto"))
        sentences.append(f"{scan / auto:,.1f} × that of `auto` at {figures['items']:,} items")
    return f"The time of `scan`, which looks at every item, is {' and '.join(sentences)}."


def _agreed(records: Sequence[Record], over: str) -> str:
    """Say at which sizes methods agreed, and on how many queries."""
    return " ".join(
        f"{record.figures[over]:,} {over}: {words}"
        for record in records
        if (words := agreement_in_words(record.figures.get("agreed")))
    )


def _series(records: Sequence[Record], over: str) -> dict[str, Points]:
    series: dict[str, tuple[list[float], list[float]]] = {}
    for record in records:
        for name, figures in record.figures["methods"].items():
            xs, ys = series.setdefault(PEERS.get(name, name), ([], []))
            xs.append(float(record.figures[over]))
            ys.append(figures["p50_us"] / 1000)
    return dict(series)


def _table(records: Sequence[Record], over: str, header: str) -> Table:
    rows, notes, built = [], [], []
    for record in records:
        figures = record.figures
        fastest = figures["methods"]["auto"]["p50_us"]
        for name, entry in figures["methods"].items():
            rows.append(
                (
                    f"{figures[over]:,}",
                    PEERS.get(name, name),
                    f"{entry['queries']:,}",
                    milliseconds(entry, "p50_us"),
                    milliseconds(entry, "p95_us"),
                    f"{entry['p50_us'] / fastest:,.1f} ×",
                    _share(entry.get("items_touched"), figures["items"]),
                    _share(entry.get("items_scored"), figures["items"]),
                )
            )
        built.append(
            f"{figures[over]:,} {header}, {figures['bytes_per_item']:.1f} bytes an item in "
            f"{figures['build_seconds']:,.1f} s by {figures['build_threads']} threads"
        )
        for name in (*_METHODS, *PEERS):
            if name not in figures["methods"]:
                reason = figures["left_out"].get(name, "not run, and no reason was recorded")
                notes.append(f"{figures[over]:,} {header}, {PEERS.get(name, name)}: {reason}.")
    return Table(
        (header, "method", "queries", "median ms", "p95 ms", "÷ auto", "looked at", "scored"),
        tuple(rows),
        "Percentiles that rest on too few queries are left blank. Looked at: items that went "
        "through a filter, scored or not. Index built: "
        f"{'; '.join(built)}. " + ("Left out: " + " ".join(notes) if notes else ""),
    )


def _share(count: float | None, items: int) -> str:
    """Return a share of the items; empty for peers, which do not count them."""
    if count is None:
        return ""
    share = count / items
    return "< 0.01%" if 0 < share < 1e-4 else f"{share:.2%}"


def _machines(records: Sequence[Record]) -> str:
    named = [
        f"{record.figures['items']:,} items on {record.machine['cpu']} "
        f"({record.machine['cores']} cores, {record.machine['memory_gigabytes']:.0f} GB, "
        f"{record.figures['instruction_set']})"
        for record in records
    ]
    return "Measured: " + "; ".join(named) + "."
