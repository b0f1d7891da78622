"""RQ3 of the paper: Algorithm 1 against its batch size, the sub-item ids that a step takes."""

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
)
from recprune.experiments.framework.workload import Workload
from recprune.experiments.report.charts import Panel, two_panels
from recprune.experiments.report.document import Block, Picture, Section, Table, Text
from recprune.search.methods import RecJPQPrune
from recprune.types import Json, Progress

_STEPS = tuple(2**power for power in range(8))  # 1 … 128
_QUICK_STEPS = (1, 8, 128)
_REFERENCES = ("auto", "pqtopk")  # our default, and scoring every item
_PUBLISHED_BEST = 8  # Petrov, Macdonald and Tonellotto, SIGIR 2025, section 6.3


class RQ3:
    """Time and share of items scored against `sub_items_per_step`."""

    name = "rq3"
    title = "RQ3: sub-items per step"
    needs: frozenset[Need] = frozenset({"workloads"})

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each model."""
        return [self._part(setup, workload) for workload in setup.workloads]

    def _part(self, setup: Setup, workload: Workload) -> ExperimentPart:
        queries = setup.sized(250, 5)
        sizes = _QUICK_STEPS if setup.quick else _STEPS
        settings = {
            "workload": workload.checksum(),
            "queries": queries,
            "sub_items_per_step": list(sizes),
            "compared": COMPARED,
            "seed": setup.seed,
        }
        return ExperimentPart(
            workload.name,
            settings,
            lambda progress: measure(workload, sizes, queries, setup.seed, progress),
            minutes=0.5,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A picture of two panels and a table for each model."""
        return section_of(
            self,
            "K = 10, one thread, S included; all settings take turns in one run. An item may "
            "be scored once for every split, so that more than 100 % are possible. Published: "
            f"a sweet spot around {_PUBLISHED_BEST} for all models (Petrov, Macdonald and "
            "Tonellotto, SIGIR 2025, section 6.3).",
            *map(_blocks, records),
        )


def measure(
    workload: Workload, sizes: Sequence[int], num_queries: int, seed: int, progress: Progress
) -> Json:
    """Time Algorithm 1 with every size of a step that a split has sub-items for."""
    index = workload.index
    queries = workload.sequence_embeddings[:num_queries]
    possible = [size for size in sizes if size <= index.num_sub_items]
    searches = {
        f"{size}": index_search(index, RecJPQPrune(sub_items_per_step=size)) for size in possible
    } | {name: index_search(index, name) for name in _REFERENCES}
    timed = interleaved(searches, queries, 10, seed=seed, progress=progress)
    return {
        **workload.describe(),
        "steps": [{"sub_items_per_step": size, **timed[f"{size}"].summary()} for size in possible],
        "references": {name: timed[name].summary() for name in _REFERENCES},
        "agreed": agreement(timed),
    }


def _blocks(record: Record) -> list[Block]:
    figures = record.figures
    entries, items, model = figures["steps"], figures["items"], model_name(figures["model"])
    sizes = [entry["sub_items_per_step"] for entry in entries]
    times = {"recjpqprune": (sizes, [entry["p50_us"] / 1e3 for entry in entries])} | {
        name: (sizes, [entry["p50_us"] / 1e3] * len(sizes))
        for name, entry in figures["references"].items()
    }
    scored = [100 * entry["items_scored"] / items for entry in entries]
    picture = two_panels(
        Panel(times, "median time of a search, ms", log_y=True),
        Panel({"recjpqprune": (sizes, scored)}, "items scored (median), %"),
        x_label="sub-items per step",
        log_x=True,
    )
    best = min(entry["p50_us"] for entry in entries)
    rows = [
        (
            f"{entry['sub_items_per_step']}",
            milliseconds(entry, "p50_us"),
            milliseconds(entry, "p95_us"),
            f"{entry['p50_us'] / best:.2f} ×",
            f"{share / 100:.1%}",
            f"{entry['steps']:,.0f}",
        )
        for entry, share in zip(entries, scored, strict=True)
    ]
    return [
        Text(
            f"{where_measured(record)} {_best_in_words(entries, figures['references'])} "
            f"{agreement_in_words(figures.get('agreed'))}"
        ),
        Picture(
            f"rq3-{record.part}",
            picture,
            f"Median search time and share of items scored against sub-items per step for {model} "
            f"on {figures['log']}.",
            f"Algorithm 1 with steps of different sizes, {figures['log']}, {model}; `auto` and "
            "`pqtopk`, which have no such setting, as references.",
        ),
        Table(
            ("sub-items per step", "median ms", "p95 ms", "÷ best", "scored", "steps"),
            tuple(rows),
            f"{entries[0]['queries']:,} queries for every setting.",
        ),
    ]


def _best_in_words(entries: Sequence[Json], references: Json) -> str:
    best = min(entries, key=lambda entry: float(entry["p50_us"]))
    size = best["sub_items_per_step"]
    near = [
        f"{entry['sub_items_per_step']}"
        for entry in entries
        if entry is not best and entry["p50_us"] <= NEARLY * best["p50_us"]
    ]
    sentence = f"Best: **{size}**, in {best['p50_us'] / 1e3:,.3f} ms"
    if near:
        sentence += f" ({' and '.join(near)} within {NEARLY - 1:.0%} of it)"
    compared = [
        f"`{name}` takes {entry['p50_us'] / best['p50_us']:.2f} × the time of the best"
        for name, entry in references.items()
    ]
    published = next(
        (entry for entry in entries if entry["sub_items_per_step"] == _PUBLISHED_BEST), None
    )
    if published is not None and published is not best:
        compared.insert(
            0,
            f"the published {_PUBLISHED_BEST} takes {published['p50_us'] / best['p50_us']:.2f} ×",
        )
    return f"{sentence}; {', '.join(compared)}."
