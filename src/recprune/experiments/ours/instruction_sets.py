"""What each instruction set and each layout takes: time against bytes, in one interleaved run.

A machine runs every set that is older than its own, so one machine tells what others would gain or
lose by theirs. It does not tell how fast other machines are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from recprune._native import instruction_sets
from recprune.experiments.framework.experiment import ExperimentPart, Need, Setup
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import (
    COMPARED,
    Answer,
    Search,
    agreement,
    agreement_in_words,
    index_search,
    interleaved,
    milliseconds,
    peer_search,
)
from recprune.experiments.ours.scaling import WARM, random_model
from recprune.experiments.peers import families
from recprune.experiments.peers.peer import CodesAndVectors
from recprune.experiments.report.document import Block, Section, Table, Text
from recprune.search.index import Index
from recprune.search.index_arrays import Layout
from recprune.types import Float32Array, Json, Progress

_K = 10
_SPLITS = 8
_LAYOUTS: tuple[Layout, ...] = ("full", "slim", "compact")
_METHODS = ("scan", "pqtopk")  # beside `auto`, in the full layout
_PEER = "faiss_pq"
_SLOW_QUERIES = 100  # that the peer and portable code get


class InstructionSets:
    """Time of a search by instruction set and layout."""

    name = "instruction-sets"
    title = "Instruction sets and layouts"
    needs: frozenset[Need] = frozenset()

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each size."""
        sizes = (20_000,) if setup.quick else (10**6, 10**7)
        return [self._part(setup, size) for size in sizes]

    def _part(self, setup: Setup, size: int) -> ExperimentPart:
        queries = setup.sized(500, 10)
        settings = {
            "items": size,
            "splits": _SPLITS,
            "queries": queries,
            "slow_queries": _SLOW_QUERIES,
            "warm": WARM,
            "seed": setup.seed,
            "compared": COMPARED,
        }
        return ExperimentPart(
            f"{size}",
            settings,
            lambda progress: measure(size, queries, setup.memory_bytes, setup.seed, progress),
            minutes=1.0 + size / 5e6,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A table for each size."""
        ordered = sorted(records, key=lambda record: int(record.figures["items"]))
        opening = Text(
            f"Random codes, M = {_SPLITS}, B = 256, d = 512, K = {_K}, one thread, S and Python "
            "included; medians in µs, in brackets the 99th percentile where there were 500 "
            "queries. Every set of the machine's own processor takes its turn (`RECPRUNE_ISA`): "
            "other machines have other caches and clocks. [Layouts](search.md#memory) differ in "
            "what they keep."
        )
        return Section(
            self.title, self.name, (opening, *(block for own in ordered for block in _blocks(own)))
        )


def measure(num_items: int, queries: int, memory: int, seed: int, progress: Progress) -> Json:
    """Time `auto` in every layout, and other methods, with every instruction set."""
    codes, embeddings, users = random_model(num_items, _SPLITS, queries, seed)
    indexes: dict[str, Index] = {}
    for layout in _LAYOUTS:
        progress(f"building the {layout} layout")
        indexes[layout] = Index.build(codes, embeddings, layout=layout, threads=os.cpu_count() or 1)
    searches: dict[str, Search] = {}
    for isa in instruction_sets():
        for name, index in indexes.items():
            searches[f"{isa} {name}"] = _with(isa, index_search(index, "auto"))
        for method in _METHODS:
            searches[f"{isa} {method}"] = _with(isa, index_search(indexes["full"], method))
    ours = list(searches)
    model = CodesAndVectors(codes, embeddings)
    if families.why_not(_PEER, model.shape, memory // 3) is None:
        searches[_PEER] = peer_search(families.build(_PEER, model, memory // 3)[0])
    slow = {name: _SLOW_QUERIES for name in searches if name == _PEER or "portable" in name}
    with families.one_thread():
        timed = interleaved(
            searches, users, _K, seed=seed, warm=WARM, limits=slow, progress=progress
        )
    return {
        "items": num_items,
        "instruction_sets": list(instruction_sets()),
        "bytes_per_item": {
            name: index.describe()["bytes_per_item"] for name, index in indexes.items()
        },
        "searches": {name: found.summary() for name, found in timed.items()},
        "agreed": agreement({name: timed[name] for name in ours}),
    }


def _with(isa: str, search: Search) -> Search:
    """Return a search by one instruction set, which the core looks up with every call."""

    def searched(query: Float32Array, k: int) -> Answer:
        before = os.environ.get("RECPRUNE_ISA")
        os.environ["RECPRUNE_ISA"] = isa
        try:
            return search(query, k)
        finally:
            if before is None:
                del os.environ["RECPRUNE_ISA"]
            else:
                os.environ["RECPRUNE_ISA"] = before

    return searched


def _blocks(record: Record) -> list[Block]:
    figures = record.figures
    searches = figures["searches"]
    peer = searches.get(_PEER)

    def time_of(name: str) -> str:
        entry = searches[name]
        often_enough = milliseconds(entry, "p99_us")
        return f"{entry['p50_us']:,.0f}" + (f" ({entry['p99_us']:,.0f})" if often_enough else "")

    rows = []
    for isa in figures["instruction_sets"]:
        row = [f"`{isa}`", *(time_of(f"{isa} {name}") for name in (*_LAYOUTS, *_METHODS))]
        if peer is not None:
            row.append(f"{peer['p50_us'] / searches[f'{isa} full']['p50_us']:,.0f} ×")
        rows.append(tuple(row))
    sizes = tuple(
        f"`auto`, {name}: {figures['bytes_per_item'][name]:,.1f} bytes an item" for name in _LAYOUTS
    )
    header = ("instruction set", *sizes, *(f"`{name}`" for name in _METHODS))
    said = f"**{figures['items']:,} items**; {record.machine['cpu']}."
    if peer is not None:
        header = (*header, "FAISS PQ ÷ `auto`, full")
        said += f" FAISS PQ takes {peer['p50_us']:,.0f} µs."
    return [Text(f"{said} {agreement_in_words(figures['agreed'])}"), Table(header, tuple(rows))]
