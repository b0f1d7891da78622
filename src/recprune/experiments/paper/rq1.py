"""RQ1 of the paper: how long scoring takes, method by method, model by model."""

from __future__ import annotations

from collections.abc import Sequence

from recprune.experiments.framework.experiment import (
    ExperimentPart,
    Need,
    Setup,
    model_name,
    section_of,
)
from recprune.experiments.framework.record import Record, by_log
from recprune.experiments.framework.timing import (
    COMPARED,
    Search,
    agreement,
    agreement_in_words,
    index_search,
    interleaved,
    milliseconds,
    unsuited,
)
from recprune.experiments.framework.workload import Workload
from recprune.experiments.paper import published
from recprune.experiments.report.charts import bars
from recprune.experiments.report.document import Block, Picture, Section, Table, Text
from recprune.search.index import Index
from recprune.search.methods import METHODS, Default, Method
from recprune.types import Json, Progress

_COMPARED = ("default", "pqtopk", "recjpqprune")  # those of the paper
_FEW_QUERIES = "Percentiles that rest on too few queries are left blank."


class RQ1:
    """Median and tail of the scoring time, K = 10, and the proof that nothing is lost."""

    name = "rq1"
    title = "RQ1: scoring time"
    needs: frozenset[Need] = frozenset({"workloads"})

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each model."""
        return [self._part(setup, workload) for workload in setup.workloads]

    def _part(self, setup: Setup, workload: Workload) -> ExperimentPart:
        queries = setup.sized(1024, 20)
        settings = {
            "workload": workload.checksum(),
            "queries": queries,
            "k": 10,
            "seed": setup.seed,
            "compared": COMPARED,
        }
        return ExperimentPart(
            workload.name,
            settings,
            lambda progress: _measure(workload, queries, setup, progress),
            minutes=2.0,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A table and a picture for each log."""
        return section_of(
            self,
            "K = 10, one thread, one query at a time, sub-item scores S included; "
            "`recjpqprune` takes 8 sub-item ids a step, as in the paper. All methods take "
            f"turns in one run. {_same_answers(records)}",
            *(_blocks(log, own) for log, own in by_log(records).items()),
            [_beside_published(records)],
        )


def _measure(workload: Workload, num_queries: int, setup: Setup, progress: Progress) -> Json:
    index = workload.index
    queries = workload.sequence_embeddings[:num_queries]
    searches: dict[str, Search] = {}
    left_out: dict[str, str] = {}
    dense_bytes = 4 * index.num_items * index.width
    for name in METHODS:
        method: str | Method = name
        searched = index
        if name == "default":
            if dense_bytes > setup.memory_bytes // 4:
                left_out[name] = f"needs {dense_bytes / 1e9:,.1f} GB of item vectors"
                continue
            method = Default(max_bytes=dense_bytes)
            # An index of its own: the item vectors stay as long as their index does.
            searched = Index.build(workload.codes, workload.sub_item_embeddings, layout="compact")
        if (reason := unsuited(searched, method)) is not None:
            left_out[name] = reason
            continue
        searches[name] = index_search(searched, method)
    timed = interleaved(
        searches,
        queries,
        10,
        seed=setup.seed,
        limits={"default": setup.sized(100, 5)},
        progress=progress,
    )
    progress("comparing the answers")
    agreed = agreement({"pqtopk": timed["pqtopk"], **timed})
    methods: Json = {name: found.summary() for name, found in timed.items()}
    every = workload.sequence_embeddings
    knows_targets = len(workload.targets) > 0
    for name in (name for name in searches if name != "default" and knows_targets):
        progress(f"NDCG@10 by {name}")
        methods[name]["ndcg"] = workload.ndcg(index.search(every, 10, method=name, threads=2).ids)
    if "default" in timed and knows_targets:
        # Too slow for all users: both are compared by NDCG@10 of the users that it answered.
        met = timed["default"].numbers
        methods["default"]["met"] = {
            "default": workload.ndcg(timed["default"].ids, met),
            "pqtopk": workload.ndcg(timed["pqtopk"].ids[met], met),
        }
    return {
        **workload.describe(),
        "users": len(every),
        "methods": methods,
        "agreed": agreed,
        "left_out": left_out,
    }


def _same_answers(records: Sequence[Record]) -> str:
    """Say whether all methods found the same, from what they found."""
    for record in records:
        found = {entry["ndcg"] for entry in record.figures["methods"].values() if "ndcg" in entry}
        if len(found) > 1:
            return f"**{record.part}: the methods differ in NDCG@10, which is a bug.**"
    words = [agreement_in_words(record.figures.get("agreed")) for record in records]
    agreed = dict.fromkeys(sentence for sentence in words if sentence)
    same = "NDCG@10 over all users is the same to the last bit, by every method that has it below."
    return " ".join((*agreed, same))


def _blocks(log: str, records: Sequence[Record]) -> list[Block]:
    rows, times, notes = [], {}, []
    for record in records:
        figures = record.figures
        model = model_name(figures["model"])
        fastest = figures["methods"]["auto"]["p50_us"]
        times[model] = {name: entry["p50_us"] / 1000 for name, entry in figures["methods"].items()}
        for name, entry in figures["methods"].items():
            ndcg = entry.get("ndcg")
            rows.append(
                (
                    model,
                    name,
                    f"{entry['queries']:,}",
                    *(milliseconds(entry, at) for at in ("p50_us", "p95_us", "p99_us")),
                    f"{entry['p50_us'] / fastest:,.1f} ×",
                    f"{entry['items_scored'] / figures['items']:.2%}",
                    f"{entry['items_touched'] / figures['items']:.2%}",
                    f"{entry['steps']:,.0f}",
                    "" if ndcg is None else f"{ndcg:.4f}",
                )
            )
        notes += [
            f"Left out, {model}, {name}: {reason}." for name, reason in figures["left_out"].items()
        ]
        met = figures["methods"].get("default", {}).get("met")
        if met is not None:
            notes.append(
                f"{model}, NDCG@10 of the {figures['methods']['default']['queries']:,} users whom "
                f"`default` answered: {met['default']:.4f}, and {met['pqtopk']:.4f} by `pqtopk`."
            )
    first = records[0]
    place = (
        f"{first.figures['items']:,} items; {first.machine['cpu']}, "
        f"{first.figures['instruction_set']}."
    )
    return [
        Text(f"**{log}**: {place} {direction(records)}"),
        Table(
            (
                "model",
                "method",
                "queries",
                "median ms",
                "p95 ms",
                "p99 ms",
                "÷ auto",
                "scored",
                "looked at",
                "steps",
                "NDCG@10",
            ),
            tuple(rows),
            " ".join((*notes, _FEW_QUERIES)),
        ),
        Picture(
            f"rq1-{log}",
            bars(times, x_label="median time of a search, ms", log_x=True),
            f"Median scoring time of each method for the models of {log}.",
            f"Median time of one search, {log}, logarithmic.",
        ),
    ]


def direction(records: Sequence[Record]) -> str:
    """Say whether Algorithm 1 is faster than scoring everything on a log, as published or not."""
    ratios = _ratios(records, "p50_us")
    if not ratios:
        return ""
    shares = [
        record.figures["methods"]["pqtopk"]["items_scored"] / record.figures["items"]
        for record in records
    ]
    if min(shares) < 1:
        each = ", ".join(f"{ratio:,.1f} × ({model})" for model, ratio in ratios.items())
        return (
            f"In the median, `recjpqprune` takes {each} the time of `pqtopk`, which here filters "
            f"all items by small integers and scores {max(shares):.2%} of them at most: that is "
            "not the published comparison, with an engine that scores every item."
        )
    slower = [model for model, ratio in ratios.items() if ratio > 1]
    each = ", ".join(f"{ratio:.2f} × ({model})" for model, ratio in ratios.items())
    printed = [entry.recjpqprune / entry.pqtopk for entry in published.SCORING_TIMES]
    outcome = (
        "Algorithm 1 is faster than scoring every item, as published"
        if not slower
        else "**Algorithm 1 is slower than scoring every item for "
        f"{'every model' if len(slower) == len(ratios) else ', '.join(slower)}**, the other way "
        "round than published"
    )
    return (
        f"In the median, `recjpqprune` takes {each} the time of `pqtopk`: {outcome} "
        f"({min(printed):.2f} × to {max(printed):.2f} ×).{_tail(records)}"
    )


def _tail(records: Sequence[Record]) -> str:
    """Say the same of the slow searches, if there are enough of them."""
    ratios = _ratios(records, "p95_us").values()
    if not ratios:
        return ""
    return f" At the 95th percentile it takes {min(ratios):.2f} × to {max(ratios):.2f} ×."


def _ratios(records: Sequence[Record], at: str) -> dict[str, float]:
    """Return for each model how many times as long Algorithm 1 takes, where queries are enough."""
    ratios = {}
    for record in records:
        both = [record.figures["methods"].get(name) for name in ("recjpqprune", "pqtopk")]
        if all(entry and milliseconds(entry, at) for entry in both):
            ours, exhaustive = both
            ratios[model_name(record.figures["model"])] = ours[at] / exhaustive[at]
    return ratios


def _beside_published(records: Sequence[Record]) -> Table:
    """Put our medians and those of the paper into one table."""
    rows = []
    for record in records:
        times = {name: entry["p50_us"] / 1000 for name, entry in record.figures["methods"].items()}
        rows.append(_median_row(record.figures["log"], record.figures["model"], times))
    for entry in published.SCORING_TIMES:
        times = {name: getattr(entry, name) for name in _COMPARED}
        rows.append(_median_row(f"{entry.log} (published)", entry.model, times))
    return Table(
        ("log", "model", *(f"{name}, ms" for name in _COMPARED), "recjpqprune ÷ pqtopk"),
        tuple(rows),
        f"Medians. Published: Table 2 of {published.SOURCE}; {published.MACHINE}, other logs and "
        "another machine than ours, where these two are native code: compare the last column, "
        "where `pqtopk` has scored every item.",
    )


def _median_row(log: str, model: str, times: dict[str, float]) -> tuple[str, ...]:
    cells = (f"{times[name]:,.2f}" if name in times else "" for name in _COMPARED)
    both = "recjpqprune" in times and "pqtopk" in times
    ratio = f"{times['recjpqprune'] / times['pqtopk']:.2f} ×" if both else ""
    return (log, model_name(model), *cells, ratio)
