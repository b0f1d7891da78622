"""What learnt codes do to pruning: models of one log that differ in their codes, searched in turns.

SVD codes cut every split into parts of equally many items. Learnt codes (`codes=learnt`) put items
together that the model need not tell apart, and may be longer. Both change what a search can skip.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recprune.experiments.framework.experiment import ExperimentPart, Need, Setup, section_of
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import (
    COMPARED,
    Search,
    Timed,
    agreement,
    index_search,
    milliseconds,
    side_by_side,
    unsuited,
)
from recprune.experiments.framework.workload import Workload
from recprune.experiments.paper.score_shape import statistics_of
from recprune.experiments.report.document import Block, Section, Table, Text
from recprune.preparation.codebook import Codebook
from recprune.search.index import Index, instruction_set
from recprune.search.methods import Cells, RecJPQPrune
from recprune.types import Float32Array, Int64Array, Json, Progress, random_generator

_K = 10
# In the order of the tables. The first answers all queries: the others are compared with it.
_METHODS = ("auto", "cells", "scan", "pqtopk", "recjpqprune")
_CUTOFFS = (1, 100, 1000)  # beside K = 10
_AT_CUTOFFS = ("auto", "scan")
_SHARES = (16, 4)  # one item in so many, drawn at random, makes a smaller catalogue
_AT_SHARES = ("auto", "scan", "pqtopk")
_SLOW = {f"recjpqprune {_K}": 100}  # queries that it gets: it takes up to a tenth of a second
_GROUPS = (1, 2, 4)  # splits that are visited together
_UNITS = 250  # that the slack is cut into, as in the search
_QUIET = 2.0  # processes that want to run, the measurement being one


class OtherCodes:
    """Time and work of a search, by codes."""

    name = "codes"
    title = "Beyond the paper: what learnt codes do to pruning"
    needs: frozenset[Need] = frozenset({"codes"})

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each log with such models; it is named after the instruction set as well."""
        logs = dict.fromkeys(workload.log for workload in setup.codes)
        return [
            self._part(setup, log, [own for own in setup.codes if own.log == log]) for log in logs
        ]

    def _part(self, setup: Setup, log: str, workloads: Sequence[Workload]) -> ExperimentPart:
        queries, looked_at = setup.sized(300, 10), setup.sized(30, 3)
        ordered = sorted(workloads, key=lambda own: (_kind(own) == "learnt", own.codes.shape[1]))
        settings = {
            "workloads": {workload.model: workload.checksum() for workload in ordered},
            "queries": queries,
            "looked_at": looked_at,
            "cutoffs": [_K, *_CUTOFFS],
            "shares": list(_SHARES),
            "seed": setup.seed,
            "compared": COMPARED,
        }
        return ExperimentPart(
            f"{log}-{instruction_set()}",
            settings,
            lambda progress: measure(ordered, queries, looked_at, setup.seed, progress),
            minutes=1.0 * len(workloads),
        )

    def section(self, records: Sequence[Record]) -> Section:
        """Four tables for each log."""
        return section_of(
            self,
            "Models of the preset `recommended` that differ in their codes alone: those of the "
            "SVD, and [learnt ones](models.md#codes-that-learn). What is searched for is φ, "
            "without the boosts of a repeat head. K = 10 unless a table says otherwise, one "
            "thread, one query at a time, S included; all models, methods, K and sizes take turns "
            "in one run.",
            *map(_blocks, records),
        )


def measure(
    workloads: Sequence[Workload], queries: int, looked_at: int, seed: int, progress: Progress
) -> Json:
    """Return the figures of all models, timed in one interleaved run."""
    smaller = [_smaller_indexes(workload, seed) for workload in workloads]
    searches = [_searches(*pair) for pair in zip(workloads, smaller, strict=True)]
    embeddings = [workload.sequence_embeddings[:queries] for workload in workloads]
    timed = side_by_side(searches, embeddings, _K, seed=seed, limits=_SLOW, progress=progress)
    models = []
    for workload, found in zip(workloads, timed, strict=True):
        progress(f"looking at the scores of {workload.model}")
        models.append(_figures(workload, found, looked_at))
    return {
        "log": workloads[0].log,
        "items": workloads[0].index.num_items,
        "instruction_set": instruction_set(),
        "models": models,
    }


def balance(codes: Codebook) -> Json:
    """Return how evenly sub-items serve the items, and how many items no score tells apart.

    `even` sub-items that serve equally many items each would be as good at telling items apart as
    those that there are: 1 / Σ share², the mean over splits.
    """
    served = codes.occupancy()
    shares = served / codes.num_items
    return {
        "least": int(served.min()),
        "most": int(served.max()),
        "even": float((1.0 / (shares**2).sum(1)).mean()),
        "items_sharing_a_code": codes.items_sharing_full_code(),
    }


def pigeonhole_shares(
    sub_item_scores: Float32Array, codes: Int64Array, threshold: float, groups: Sequence[int]
) -> list[float]:
    """Return the share of the items that must be looked at, for each number of splits in a group.

    An item within the slack is within the limit of one of its groups (docs/search.md): all
    items that are, counted once for each such group. The limits are raised where that adds the
    fewest items. S is [M, B], and θ the final one: no search of this kind can do with less.
    """
    slack = float(sub_item_scores.max(1).sum()) - threshold
    deficits = sub_item_scores.max(1, keepdims=True) - sub_item_scores
    units = np.minimum(np.floor(deficits * (_UNITS / max(slack, 1e-30))), _UNITS + 1)
    own = [row.astype(np.int64)[column] for row, column in zip(units, codes.T, strict=True)]
    shares = []
    for group in groups:
        sums = [sum(own[at : at + group]) for at in range(0, len(own), group)]
        counts = [np.bincount(np.minimum(each, _UNITS + 1), minlength=_UNITS + 2) for each in sums]
        shares.append(_cheapest(counts) / len(codes))
    return shares


def _cheapest(counts: Sequence[Int64Array]) -> int:
    """Return how many items limits t with Σ (t + 1) = L + 1 let in, raised where that is cheap."""
    limits, total = [0] * len(counts), 0
    for _ in range(_UNITS + 1):
        costs = [int(own[limit]) for own, limit in zip(counts, limits, strict=True)]
        cheapest = int(np.argmin(costs))
        total += costs[cheapest]
        limits[cheapest] += 1
    return total


def _smaller_indexes(workload: Workload, seed: int) -> dict[int, Index]:
    """Return indexes of items drawn at random, by how many these are."""
    found = {}
    order = random_generator(seed).permutation(len(workload.codes))
    for share in _SHARES:
        chosen = np.sort(order[: len(order) // share])
        embeddings = workload.sub_item_embeddings
        found[len(chosen)] = Index.build(workload.codes[chosen], embeddings, threads=2)
    return found


def _searches(workload: Workload, smaller: dict[int, Index]) -> dict[str, Search]:
    """Return what is timed, by method and K, or by method and number of items."""
    index = workload.index
    found = {
        f"{method} {_K}": index_search(index, method)
        for method in _METHODS
        if unsuited(index, method) is None  # cells need 4 to 16 splits
    }
    for cutoff in _CUTOFFS:
        for method in _AT_CUTOFFS:
            found[f"{method} {cutoff}"] = index_search(index, method, cutoff)
    for items, catalogue in smaller.items():
        for method in _AT_SHARES:
            found[f"{method} of {items}"] = index_search(catalogue, method)
    return found


def _figures(workload: Workload, timed: dict[str, Timed], looked_at: int) -> Json:
    """Return the figures of one model."""
    index = workload.index
    at_k = {method: timed[name] for method in _METHODS if (name := f"{method} {_K}") in timed}
    agreed = agreement(at_k)
    for cutoff in _CUTOFFS:
        agreement({method: timed[f"{method} {cutoff}"] for method in _AT_CUTOFFS})
    sizes = sorted({len(workload.codes) // share for share in _SHARES})
    for items in sizes:
        agreement({method: timed[f"{method} of {items}"] for method in _AT_SHARES})
    whole = {f"{method} of {index.num_items}": timed[f"{method} {_K}"] for method in _AT_SHARES}
    every: dict[str, Timed] = {**timed, **whole}
    return {
        "model": workload.model,
        "codes": _kind(workload),
        "splits": index.num_splits,
        "sub_items": index.num_sub_items,
        "bytes_per_item": index.describe()["bytes_per_item"],
        "balance": balance(Codebook(workload.codes, index.num_sub_items)),
        "shape": _shape(workload, looked_at),
        "methods": {
            method: {**found.summary(), "by_cells": found.share_by(Cells.name)}
            for method, found in at_k.items()
        },
        "cutoffs": [_row(every, "k", k, "", _AT_CUTOFFS) for k in sorted((_K, *_CUTOFFS))],
        "sizes": [
            _row(every, "items", items, "of ", _AT_SHARES) for items in (*sizes, index.num_items)
        ],
        "agreed": agreed,
    }


def _row(
    timed: dict[str, Timed], over: str, value: int, before: str, methods: Sequence[str]
) -> Json:
    """Return the figures of some methods at one K, or at one number of items."""
    found = {method: timed[f"{method} {before}{value}"] for method in methods}
    return {
        over: value,
        "by_cells": found["auto"].share_by(Cells.name),
        **{method: own.summary() for method, own in found.items()},
    }


def _shape(workload: Workload, looked_at: int) -> Json:
    """Return what the scores of some users look like, the means over them."""
    index = workload.index
    embeddings = workload.sequence_embeddings[:looked_at]
    scores = index.sub_item_scores(embeddings)
    found = index.search(embeddings, min(_K, index.num_items), threads=2)
    thresholds = found.scores[:, -1].astype(np.float64)
    statistics = statistics_of(scores, thresholds)
    codes = np.asarray(workload.codes).astype(np.int64)
    shares = [
        pigeonhole_shares(table, codes, float(threshold), _GROUPS)
        for table, threshold in zip(scores, thresholds, strict=True)
    ]
    return {
        "users": len(embeddings),
        "slack_share": float(statistics["slack_share"].mean()),
        "high_share": float(statistics["high_30"].mean()) / scores[0].size,
        "pigeonhole": {
            f"{group}": [float(np.median(own)), float(np.percentile(own, 95))]
            for group, own in zip(_GROUPS, np.array(shares).T, strict=True)
        },
    }


def _kind(workload: Workload) -> str:
    """Return where the codes come from: svd, random or learnt."""
    return str(workload.settings["model"]["codes"])


def _blocks(record: Record) -> list[Block]:
    figures = record.figures
    models, items = figures["models"], figures["items"]
    return [
        Text(
            f"**{figures['log']}**: {items:,} items; {record.machine['cpu']}, "
            f"{figures['instruction_set']}. {_verdict(figures)} {_agreed(models)}{_shared(record)}"
        ),
        _methods_table(models, items),
        *([Text(_causes(figures))] if len(models) > 1 else []),
        _shape_table(models),
        _sweep_table(models, "cutoffs", "k", "K", _AT_CUTOFFS),
        _sweep_table(models, "sizes", "items", "items", _AT_SHARES),
    ]


def _methods_table(models: Sequence[Json], items: int) -> Table:
    rows = [
        (
            _name(model),
            method,
            f"{entry['queries']:,}",
            milliseconds(entry, "p50_us"),
            milliseconds(entry, "p95_us"),
            f"{entry['p50_us'] / model['methods']['pqtopk']['p50_us']:.2f} ×",
            f"{entry['items_scored'] / items:.2%}",
            f"{entry['items_touched'] / items:.2%}",
            f"{entry['steps']:,.0f}",
            f"{entry['bytes_touched'] / 1e6:,.2f}",
            f"{entry['by_cells']:.0%}" if method == "auto" else "",
        )
        for model in models
        for method, entry in model["methods"].items()
    ]
    sizes = ", ".join(f"{_name(model)} {model['bytes_per_item']:.1f}" for model in models)
    return Table(
        (
            "codes",
            "method",
            "queries",
            "median ms",
            "p95 ms",
            "÷ pqtopk",
            "scored",
            "looked at",
            "steps",
            "MB read",
            "by cells",
        ),
        tuple(rows),
        "By cells: the share of the searches for which `auto` took them; they need eight splits. "
        f"Bytes of the index an item: {sizes}.",
    )


def _shape_table(models: Sequence[Json]) -> Table:
    rows = []
    for model in models:
        own, shape = model["balance"], model["shape"]
        visited = (f"{low:.1%} / {high:.1%}" for low, high in shape["pigeonhole"].values())
        rows.append(
            (
                _name(model),
                f"{own['least']:,} to {own['most']:,}",
                f"{own['even']:.0f} of {model['sub_items']}",
                f"{own['items_sharing_a_code']:,}",
                f"{shape['high_share']:.1%}",
                f"{_weight(model):.2f} ×",
                f"{shape['slack_share']:.2f}",
                *visited,
            )
        )
    return Table(
        (
            "codes",
            "items a sub-item",
            "as good as even",
            "items sharing a code",
            "high sub-items",
            "their weight",
            "slack ÷ reach",
            *(f"groups of {group}" for group in _GROUPS),
        ),
        tuple(rows),
        "As good as even: 1 ÷ Σ share², the mean over splits. High sub-items: those above 30 % of "
        "the way from the mean of S to its maximum. Their weight: items of a sub-item that "
        "`recjpqprune` visits, to those of an average one. Groups: the share of the items that "
        "must be looked at if so many splits are visited together, median and p95 of "
        f"{models[0]['shape']['users']} users, θ being known; counted, not timed.",
    )


def _sweep_table(
    models: Sequence[Json], part: str, over: str, header: str, methods: Sequence[str]
) -> Table:
    """Return the times of some methods at every K or size, model by model."""
    rows = []
    for model in models:
        for entry in model[part]:
            times = (
                f"{milliseconds(entry[method], 'p50_us')} / {milliseconds(entry[method], 'p95_us')}"
                for method in methods
            )
            rows.append((_name(model), f"{entry[over]:,}", *times, f"{entry['by_cells']:.0%}"))
    drawn = " Smaller catalogues: items drawn at random." if over == "items" else ""
    return Table(
        ("codes", header, *methods, "by cells"),
        tuple(rows),
        f"Median and p95 in milliseconds.{drawn}",
    )


def _name(model: Json) -> str:
    kind = "SVD" if model["codes"] == "svd" else model["codes"]
    return f"{kind}, M = {model['splits']}"


def _weight(model: Json) -> float:
    """Return how many items the sub-items that Algorithm 1 visits serve, 1 being the average."""
    entry = model["methods"]["recjpqprune"]
    sub_items = entry["steps"] * RecJPQPrune().sub_items_per_step
    average = model["methods"]["pqtopk"]["items_touched"] / model["sub_items"]
    return float(entry["items_scored"]) / float(sub_items * average)


def _agreed(models: Sequence[Json]) -> str:
    answers = sum(sum(model["agreed"].values()) for model in models)
    return (
        f"Of {answers:,} answers at K = {_K}, all have the items and the bits of the scores that "
        "every other method gives."
    )


def _shared(record: Record) -> str:
    """Say so if other work ran on the machine: long searches are interrupted, short ones rarely."""
    load = float(record.machine.get("load", 0.0))
    if load <= _QUIET:
        return ""
    return (
        f" **The machine was shared** (load {load}): searches of milliseconds were interrupted, "
        "shorter ones rarely, so that ratios between them, and all p95, are exaggerated; what was "
        "scored, looked at and read is not touched by that."
    )


def _verdict(figures: Json) -> str:
    """Say what every other kind of code does to both ways of pruning, beside the first."""
    base, *others = figures["models"]
    items = int(figures["items"])

    def scored(model: Json) -> float:
        return float(model["methods"]["recjpqprune"]["items_scored"]) / items

    def ratio(model: Json, at: str) -> float:
        own, first = (float(each["methods"]["auto"][at]) for each in (model, base))
        return own / first

    sentences = []
    for model in others:
        better = scored(model) < scored(base)
        sentences.append(
            f"{_name(model)}: Algorithm 1 scores {'fewer' if better else '**more**'} items than "
            f"with {_name(base)}, {scored(model):.0%} in place of {scored(base):.0%}; `auto` takes "
            f"{ratio(model, 'p50_us'):.2f} × as long in the median, "
            f"{ratio(model, 'p95_us'):.2f} × at the 95th percentile."
        )
    return " ".join(sentences)


def _causes(figures: Json) -> str:
    """Say why, from what was counted."""
    base, *others = figures["models"]
    sentences = []
    for model in others:
        own, first = model["shape"], base["shape"]
        sentences.append(
            f"{_name(model)}: {own['high_share']:.1%} of the sub-items score high for a user "
            f"({_name(base)}: {first['high_share']:.1%}), and those that are visited serve "
            f"{_weight(model):.2f} × as many items as the average ({_weight(base):.2f} ×)."
        )
        if model["splits"] > base["splits"]:
            pairs, fours = (own["pigeonhole"][f"{group}"][0] for group in (2, 4))
            sentences.append(
                f"θ falls {own['slack_share']:.0%} of the way from the best conceivable score to "
                f"the average one ({first['slack_share']:.0%}), pairs of splits would have to look "
                f"at {pairs:.0%} of the items and groups of four at {fours:.1%}. Cells are pairs "
                "of eight splits, so `auto` scans: it reads "
                f"{model['methods']['auto']['bytes_touched'] / 1e6:.1f} MB, through a filter that "
                f"leaves {model['methods']['auto']['items_scored']:,.0f} items to be scored."
            )
    if figures["instruction_set"] != "avx512":
        sentences.append("Without AVX-512, that filter looks items up one by one.")
    return "**Why.** " + " ".join(sentences)
