"""RQ1 of the paper: how long scoring takes, method by method, model by model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recprune.experiments.charts import bars
from recprune.experiments.experiment import Part, Plan, model_name
from recprune.experiments.record import Record
from recprune.experiments.report import Block, Picture, Section, Table, Text
from recprune.experiments.timing import Search, index_search, interleaved
from recprune.experiments.workload import Workload
from recprune.types import InputError, Json, Progress

_METHODS = ("auto", "cells", "scan", "recjpqprune", "pqtopk", "default")
_DENSE_BYTES = 16 << 30


class RQ1:
    """Median and tail of the scoring time, K = 10, and the proof that nothing is lost."""

    name = "rq1"
    title = "RQ1: scoring time"

    def parts(self, plan: Plan) -> list[Part]:
        """One for each model."""
        return [self._part(plan, workload) for workload in plan.workloads]

    def _part(self, plan: Plan, workload: Workload) -> Part:
        queries = plan.sized(1024, 20)
        settings = {
            "workload": workload.checksum(), "queries": queries, "k": 10, "seed": plan.seed
        }  # fmt: skip
        return Part(
            workload.name,
            settings,
            lambda progress: _measure(workload, queries, plan, progress),
            minutes=2.0,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A table and a picture for each log."""
        blocks: list[Block] = [
            Text(
                "K = 10, one thread, one query at a time, sub-item scores S included; "
                "`recjpqprune` takes 8 sub-item ids a step, as in the paper. All methods take "
                "turns in one run. **NDCG@10 is that of the answers themselves**: the same for "
                "every method, because the answers are."
            )
        ]
        logs: dict[str, list[Record]] = {}
        for record in records:
            logs.setdefault(record.figures["log"], []).append(record)
        for log, entries in logs.items():
            blocks += _blocks(log, entries)
        return Section(self.title, self.name, tuple(blocks))


def _measure(workload: Workload, num_queries: int, plan: Plan, progress: Progress) -> Json:
    index = workload.index
    queries = workload.sequence_embeddings[:num_queries]
    searches: dict[str, Search] = {}
    left_out: dict[str, str] = {}
    dense_bytes = 4 * index.num_items * index.width
    for method in _METHODS:
        if method == "default" and dense_bytes > min(_DENSE_BYTES, plan.memory_bytes // 2):
            left_out[method] = f"needs {dense_bytes / 1e9:,.1f} GB of item vectors"
            continue
        try:
            index.search(queries[:1], 1, method=method)
        except InputError as error:
            left_out[method] = str(error)
            continue
        searches[method] = index_search(index, method)
    timed = interleaved(
        searches, queries, 10, seed=plan.seed,
        limits={"default": plan.sized(100, 5)}, progress=progress,
    )  # fmt: skip
    progress("comparing the answers")
    exhaustive = timed["pqtopk"].ids
    methods: Json = {}
    for name, found in timed.items():
        # The slow ones met some of the queries only; all answers to those are compared.
        if name != "default" and not np.array_equal(found.ids, exhaustive):
            raise AssertionError(f"{name} disagrees with pqtopk: this is a bug")
        methods[name] = found.summary()
    every = workload.sequence_embeddings
    for name in (name for name in searches if name != "default"):
        progress(f"NDCG@10 by {name}")
        methods[name]["ndcg"] = workload.ndcg(index.search(every, 10, method=name, threads=2).ids)
    return {
        "log": workload.log,
        "model": workload.model,
        "items": index.num_items,
        "users": len(every),
        "instruction_set": index.describe()["instruction_set"],
        "methods": methods,
        "left_out": left_out,
    }


def _blocks(log: str, records: Sequence[Record]) -> list[Block]:
    rows, times, notes = [], {}, []
    for record in records:
        figures = record.figures
        model = model_name(figures["model"])
        fastest = figures["methods"]["auto"]["p50_us"]
        times[model] = {name: entry["p50_us"] / 1000 for name, entry in figures["methods"].items()}
        for name, entry in figures["methods"].items():
            ndcg = entry.get("ndcg")
            rows.append((
                model, name, *(f"{entry[at] / 1000:,.3f}" for at in ("p50_us", "p95_us", "p99_us")),
                f"{entry['p50_us'] / fastest:,.1f} ×",
                f"{entry['items_scored'] / figures['items']:.2%}",
                f"{entry['items_touched'] / figures['items']:.2%}",
                f"{entry['steps']:,.0f}",
                "" if ndcg is None else f"{ndcg:.4f}",
            ))  # fmt: skip
        notes += [f"{model}, {name}: {reason}." for name, reason in figures["left_out"].items()]
    first = records[0]
    place = (
        f"{first.figures['items']:,} items; {first.machine['cpu']}, "
        f"{first.figures['instruction_set']}."
    )
    return [
        Text(f"**{log}**: {place}"),
        Table(
            ("model", "method", "median ms", "p95 ms", "p99 ms", "÷ auto", "scored", "looked at",
             "steps", "NDCG@10"),
            tuple(rows),
            "Left out: " + " ".join(notes) if notes else "",
        ),
        Picture(
            f"rq1-{log}", bars(times, x_label="median time of a search, ms", log_x=True),
            f"Median scoring time of each method for the models of {log}.",
            f"Median time of one search, {log}, logarithmic.",
        ),
    ]  # fmt: skip
