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
from recprune.index import Index
from recprune.methods import Default, Method
from recprune.types import InputError, Json, Progress, RecpruneError

_METHODS = ("auto", "cells", "scan", "recjpqprune", "pqtopk", "default")


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
                f"turns in one run. {_same_answers(records)}"
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
    for name in _METHODS:
        method: str | Method = name
        searched = index
        if name == "default":
            if dense_bytes > plan.memory_bytes // 4:
                left_out[name] = f"needs {dense_bytes / 1e9:,.1f} GB of item vectors"
                continue
            method = Default(max_bytes=dense_bytes)
            # An index of its own: the item vectors stay as long as their index does.
            searched = Index.build(workload.codes, workload.sub_item_embeddings, layout="compact")
        try:
            searched.search(queries[:1], 1, method=method)
        except InputError as error:
            left_out[name] = str(error)
            continue
        searches[name] = index_search(searched, method)
    timed = interleaved(
        searches, queries, 10, seed=plan.seed,
        limits={"default": plan.sized(100, 5)}, progress=progress,
    )  # fmt: skip
    progress("comparing the answers")
    exhaustive = timed["pqtopk"].ids
    methods: Json = {}
    for name, found in timed.items():
        # The slow ones met some of the queries only.
        if not np.array_equal(found.ids, exhaustive[found.numbers]):
            raise RecpruneError(f"{name} disagrees with pqtopk: this is a bug")
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


def _same_answers(records: Sequence[Record]) -> str:
    """Say whether all methods found the same, from what they found."""
    for record in records:
        found = {entry["ndcg"] for entry in record.figures["methods"].values() if "ndcg" in entry}
        if len(found) != 1:
            return f"**{record.part}: the methods differ in NDCG@10, which is a bug.**"
    return (
        "Every method answered every query that it met with the same items, and NDCG@10 over all "
        "users is the same to the last bit."
    )


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
