"""RQ2 of the paper: scoring time against the ranking cutoff K, and on to K = 4,096."""

from __future__ import annotations

from collections.abc import Sequence

from recprune.experiments.framework.experiment import (
    ExperimentPart,
    Need,
    Setup,
    model_name,
    section_of,
    where_measured,
)
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import (
    COMPARED,
    NEARLY,
    agreement,
    agreement_in_words,
    index_search,
    interleaved,
    milliseconds,
    unsuited,
)
from recprune.experiments.framework.workload import Workload
from recprune.experiments.report.charts import lines
from recprune.experiments.report.document import Block, Picture, Section, Table, Text
from recprune.search.methods import Cells
from recprune.types import Json, Progress

# Not `cells`, which `auto` takes where they pay; nor `default`, whose time is that of the product
# with all item vectors, whatever K is.
_METHODS = ("auto", "scan", "recjpqprune", "pqtopk")
_CUTOFFS = tuple(2**power for power in range(13))  # 1 … 4,096
_QUICK_CUTOFFS = (1, 16, 256, 4096)
_PAPER_CUTOFF = 256  # the largest in the paper


class RQ2:
    """Median and tail of the scoring time for every K."""

    name = "rq2"
    title = "RQ2: ranking cutoff"
    needs: frozenset[Need] = frozenset({"workloads"})

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each model."""
        return [self._part(setup, workload) for workload in setup.workloads]

    def _part(self, setup: Setup, workload: Workload) -> ExperimentPart:
        queries = setup.sized(128, 5)
        cutoffs = _QUICK_CUTOFFS if setup.quick else _CUTOFFS
        settings = {
            "workload": workload.checksum(),
            "queries": queries,
            "cutoffs": list(cutoffs),
            "compared": COMPARED,
            "seed": setup.seed,
        }
        return ExperimentPart(
            workload.name,
            settings,
            lambda progress: measure(workload, cutoffs, queries, setup.seed, progress),
            minutes=1.0,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A picture and a table for each model."""
        return section_of(
            self,
            "One thread, one query at a time, S included; all methods and all K take turns in "
            "one run. `recjpqprune` takes 8 sub-item ids a step. In the tables: median and p95 "
            "in milliseconds.",
            *map(_blocks, records),
        )


def measure(
    workload: Workload, cutoffs: Sequence[int], num_queries: int, seed: int, progress: Progress
) -> Json:
    """Time every method at every cutoff that the catalogue has items for."""
    index = workload.index
    queries = workload.sequence_embeddings[:num_queries]
    possible = [k for k in cutoffs if k <= index.num_items]
    left_out = {
        method: reason for method in _METHODS if (reason := unsuited(index, method)) is not None
    }
    methods = [method for method in _METHODS if method not in left_out]
    # All cutoffs in one run, so that what slows the machine down for a while bends no curve.
    timed = interleaved(
        {f"{method} {k}": index_search(index, method, k) for method in methods for k in possible},
        queries,
        0,
        seed=seed,
        block=32,
        progress=progress,
    )
    for k in possible:
        agreed = agreement({method: timed[f"{method} {k}"] for method in methods})
    entries: Json = {
        method: [{"k": k, **timed[f"{method} {k}"].summary()} for k in possible]
        for method in methods
    }
    for entry in entries["auto"]:
        entry["by_cells"] = timed[f"auto {entry['k']}"].share_by(Cells.name)
    return {
        **workload.describe(),
        "methods": entries,
        "agreed": agreed,
        "left_out": left_out,
    }


def _blocks(record: Record) -> list[Block]:
    figures = record.figures
    methods, model = figures["methods"], model_name(figures["model"])
    picture = lines(
        {
            method: (
                [entry["k"] for entry in entries],
                [entry["p50_us"] / 1e3 for entry in entries],
            )
            for method, entries in methods.items()
        },
        x_label="K",
        y_label="median time of a search, ms",
        log_x=True,
        log_y=True,
    )
    rows = []
    for at, first in enumerate(methods["auto"]):
        times = [
            f"{_time(entries[at], 'p50_us')} / {_time(entries[at], 'p95_us') or '–'}"
            for entries in methods.values()
        ]
        scored = (
            f"{methods['recjpqprune'][at]['items_scored'] / figures['items']:.1%}"
            if "recjpqprune" in methods
            else ""
        )
        rows.append((f"{first['k']:,}", *times, scored, f"{first['by_cells']:.0%}"))
    left_out = " ".join(f"{name}: {reason}." for name, reason in figures["left_out"].items())
    return [
        Text(
            f"{where_measured(record)} {_growth(methods)} {_verdict(methods)} "
            f"{agreement_in_words(figures.get('agreed'))}"
        ),
        Picture(
            f"rq2-{record.part}",
            picture,
            f"Median search time against K for {model} on {figures['log']}, by method, both "
            "logarithmic.",
            f"Time of one search against K, {figures['log']}, {model}.",
        ),
        Table(
            ("K", *methods, "scored", "by cells"),
            tuple(rows),
            f"{methods['auto'][0]['queries']:,} queries for every method and K. "
            "Scored: the share of the items by `recjpqprune`. By cells: the share of the searches "
            "for which `auto` took them. " + (f"Left out: {left_out}" if left_out else ""),
        ),
    ]


def _time(entry: Json, name: str) -> str:
    """Write a time with about three digits."""
    time = entry[name] / 1e3
    return milliseconds(entry, name, 3 if time < 1 else 2 if time < 10 else 1)


def _growth(methods: Json) -> str:
    """Say how much longer a search takes for the paper's largest K, and for ours."""
    cutoffs = [entry["k"] for entry in methods["auto"]]
    sentences = []
    for end in sorted({max(k for k in cutoffs if k <= _PAPER_CUTOFF), cutoffs[-1]}):
        at = cutoffs.index(end)
        factors = ", ".join(
            f"`{method}` {entries[at]['p50_us'] / entries[0]['p50_us']:.1f} ×"
            for method, entries in methods.items()
        )
        sentences.append(f"K = {end:,}: {factors}")
    return f"Median time as a multiple of that for K = {cutoffs[0]:,}. {'; '.join(sentences)}."


def _verdict(methods: Json) -> str:
    """Say whether `auto` is the fastest, and where it is not."""
    slower = []
    for at, entry in enumerate(methods["auto"]):
        name = min(methods, key=lambda method: methods[method][at]["p50_us"])
        factor = entry["p50_us"] / methods[name][at]["p50_us"]
        if factor > NEARLY:
            slower.append(f"K = {entry['k']:,} (`{name}` is {factor:.2f} × as fast)")
    count, near = len(methods["auto"]), f"within {NEARLY - 1:.0%} of it"
    if not slower:
        return f"`auto` is the fastest at every K, or {near}."
    if len(slower) > count / 2:
        return f"At most K, `auto` is **not** the fastest or {near}: {', '.join(slower)}."
    return f"`auto` is the fastest, or {near}, at all K but {', '.join(slower)}."
