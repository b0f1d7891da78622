"""Unsafe settings, the paper's future work: what is lost when a search stops before it is sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from recprune.evaluation.metrics import RankedUsers, user_values
from recprune.evaluation.resampling import bootstrap_mean
from recprune.experiments.framework.experiment import (
    ExperimentPart,
    Need,
    Setup,
    model_name,
    section_of,
    where_measured,
)
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import Search, index_search, interleaved, recall
from recprune.experiments.framework.workload import Workload
from recprune.experiments.report.charts import Panel, lines, two_panels
from recprune.experiments.report.document import Block, Picture, Section, Table, Text
from recprune.search.methods import METHODS, Method
from recprune.types import Float64Array, Int32Array, Int64Array, Json, Progress

_EXACT = "exact"
Grid: TypeAlias = dict[str, dict[str, list[float]]]  # method → kind of setting → values
# Of the methods that can stop early: the paper's, and the one that is used unless another is named.
# A step of Algorithm 1 is 8 sub-item ids, a step of `auto` one list or one cell; and so are times.
FULL_GRID: Grid = {
    "recjpqprune": {
        "max_steps": [1, 2, 3, 4, 6, 8, 12, 16, 24],
        "over_inflation": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
        "deadline_us": [250, 500, 1000, 2000, 4000, 8000],
    },
    "auto": {
        "max_steps": [1, 4, 16, 64, 256, 512, 1024, 2048, 4096],
        "over_inflation": [0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9],
        "deadline_us": [25, 50, 100, 150, 200, 300, 500],
    },
}
_QUICK_GRID: Grid = {
    method: {"max_steps": [1, 16], "over_inflation": [0.3, 0.9], "deadline_us": [50, 1000]}
    for method in FULL_GRID
}
_KEPT = 0.99  # of exact NDCG@10
_GAIN = 1.25  # times as fast: less than that may be noise
_METRIC = "NDCG@10"


class Unsafe:
    """Quality against time, for searches that stop early."""

    name = "unsafe"
    title = "Unsafe settings: stopping before it is proven"
    needs: frozenset[Need] = frozenset({"workloads"})

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each model whose users' next items are known: NDCG@10 is what is lost."""
        known = (workload for workload in setup.workloads if len(workload.targets))
        return [self._part(setup, workload) for workload in known]

    def _part(self, setup: Setup, workload: Workload) -> ExperimentPart:
        queries = setup.sized(200, 10)
        users = setup.sized(len(workload.targets), 100)
        grid = _QUICK_GRID if setup.quick else FULL_GRID
        settings = {
            "workload": workload.checksum(),
            "queries": queries,
            "users": users,
            "kept": _KEPT,
            "grid": grid,
            "seed": setup.seed,
        }
        return ExperimentPart(
            workload.name,
            settings,
            lambda progress: measure(workload, grid, queries, users, setup.seed, progress),
            minutes=2.0,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """Curves for each model, and the settings that lose next to nothing."""
        return section_of(
            self,
            "K = 10. `max_steps` and `deadline_us` stop a search early, `over_inflation` "
            "raises the threshold by that share of the way up to the best conceivable score. A "
            "search then reports its gap: no missing item scores higher than the K-th found "
            "plus the gap. Times are medians of one thread, S included. Curves join the values "
            "of a setting in their order, over all users that are counted below. A setting "
            f"counts as keeping {_KEPT:.0%} of NDCG@10 only if that is more than chance: if "
            "the lower end of the 95 % interval of what it keeps, by a bootstrap that draws "
            f"users with both of their values, is at least {_KEPT:.0%}. Less than "
            f"{_GAIN - 1:.0%} counts as no gain of time. NDCG@10 may be above the exact one by "
            "chance: it knows one relevant item of a user. A setting is chosen by "
            "the same users that judge it: on others it may keep a little less.",
            *map(_blocks, records),
        )


def measure(
    workload: Workload,
    grid: Grid,
    num_queries: int,
    num_users: int,
    seed: int,
    progress: Progress,
) -> Json:
    """Time every setting on some queries, and compare its answers to users with the exact ones."""
    index, users = workload.index, workload.sequence_embeddings[:num_users]
    settings: list[tuple[str, str, float | None, Method]] = []
    for name, kinds in grid.items():
        method = METHODS[name]
        settings.append((name, _EXACT, None, method))
        settings += [
            (name, kind, value, _stopping_early(method, {kind: value}))
            for kind, values in kinds.items()
            for value in values
        ]
    searches: dict[str, Search] = {
        f"{name} {kind} {value}": index_search(index, method)
        for name, kind, value, method in settings
    }
    timed = interleaved(searches, users[:num_queries], 10, seed=seed, progress=progress)
    exact = index.search(users, 10, threads=2).ids
    targets = workload.targets[: len(users)]
    exact_values = _ndcg_of_users(exact, targets)
    entries = []
    for name, kind, value, method in settings:
        progress(f"answers of {name}, {kind}")
        # Against a clock, threads would be in each other's way.
        found = index.search(users, 10, method=method, threads=1 if kind == "deadline_us" else 2)
        values = _ndcg_of_users(found.ids, targets)
        gap = float(np.median(np.maximum(found.stats.upper_bound - found.stats.threshold, 0.0)))
        entries.append(
            {
                "method": name,
                "kind": kind,
                "value": value,
                "ndcg": float(values.mean()),
                # At least 0: the setting keeps its share of NDCG@10, and not by chance.
                "margin_low": bootstrap_mean(values - _KEPT * exact_values).low,
                "recall": recall(found.ids, exact),
                "same": float((found.ids == exact).all(1).mean()),
                "proven": float(found.stats.exact.mean()),
                "gap": gap if np.isfinite(gap) else None,  # infinite: fewer than K items were found
                **timed[f"{name} {kind} {value}"].summary(),
            }
        )
    return {
        **workload.describe(),
        "users": len(users),
        "hits": int((exact == targets[:, None]).any(1).sum()),
        "entries": entries,
    }


def _stopping_early(method: Method, limit: Json) -> Method:
    return replace(method, **limit)


def _ndcg_of_users(ids: Int64Array, targets: Int32Array) -> Float64Array:
    return user_values(RankedUsers.of_targets(ids, targets), [_METRIC])[_METRIC]


def cheapest(entries: Sequence[Json], method: str) -> Json:
    """Return the fastest entry of a method that keeps NDCG@10, and not by chance.

    Exact search always does, and is returned unless another is faster by more than noise.
    """
    exact = _exact(entries, method)
    kept = [entry for entry in _faster(entries, method) if _keeps(entry, exact)]
    return min(kept, key=lambda entry: float(entry["p50_us"]), default=exact)


def has_interval(figures: Json) -> bool:
    """Whether a record has an interval of what is kept; older ones do not."""
    return all("margin_low" in entry for entry in figures["entries"])


def gains(figures: Json) -> list[float]:
    """Return for each method how many times as fast a setting that keeps NDCG@10 is; 1: none."""
    if not figures["hits"]:
        return []
    entries = figures["entries"]
    return [
        float(_exact(entries, method)["p50_us"] / cheapest(entries, method)["p50_us"])
        for method in dict.fromkeys(entry["method"] for entry in entries)
    ]


def _faster(entries: Sequence[Json], method: str) -> list[Json]:
    exact = _exact(entries, method)
    return [entry for entry in entries if entry["method"] == method and _is_faster(entry, exact)]


def _keeps(entry: Json, exact: Json) -> bool:
    """Whether NDCG@10 is kept, and not by chance."""
    if "margin_low" in entry:
        return bool(entry["margin_low"] >= 0)
    # Older records have no interval, but two halves of the users: both must agree.
    return all(
        own["ndcg"] >= _KEPT * other["ndcg"]
        for own, other in zip(entry["halves"], exact["halves"], strict=True)
    )


def _is_faster(entry: Json, other: Json) -> bool:
    return bool(_GAIN * entry["p50_us"] <= other["p50_us"])


def _blocks(record: Record) -> list[Block]:
    figures = record.figures
    entries, model, log = figures["entries"], model_name(figures["model"]), figures["log"]
    methods = list(dict.fromkeys(entry["method"] for entry in entries))
    verdicts = [_verdict(figures, method) for method in methods] if figures["hits"] else []
    marks = [
        {
            f"exact {entry['method']}": (entry["p50_us"] / 1e3, scale * entry[what])
            for entry in entries
            if entry["kind"] == _EXACT
        }
        for what, scale in (("ndcg", 1), ("recall", 100))
    ]
    pictures: list[Block] = [
        Picture(
            f"unsafe-{record.part}",
            two_panels(
                Panel(_curves(entries, "ndcg"), "NDCG@10", mark=marks[0], in_order=True),
                Panel(
                    _curves(entries, "recall", 100),
                    "exact top 10 found, %",
                    mark=marks[1],
                    in_order=True,
                ),
                x_label="median time of a search, ms",
                log_x=True,
                stacked=True,
            ),
            f"NDCG@10 and recall of the exact top 10 against median time for {model} on {log}.",
            f"What unsafe searches find in less time: {log}, {model}.",
        )
    ]
    gaps = _curves([entry for entry in entries if entry["gap"] is not None], "gap")
    if gaps:
        pictures.append(
            Picture(
                f"unsafe-gap-{record.part}",
                lines(
                    gaps,
                    x_label="median time of a search, ms",
                    y_label="median reported gap, score",
                    log_x=True,
                    in_order=True,
                ),
                f"Reported gap against median time for {model} on {log}.",
                f"What unsafe searches can still promise: {log}, {model}. Where fewer than ten "
                "items were found for most users, there is no gap to report.",
            )
        )
    return [
        Text(
            f"{where_measured(record)} {_basis(figures)} "
            + " ".join((*verdicts, _compared(entries)))
        ),
        *pictures,
        _table(entries, methods),
    ]


def _curves(
    entries: Sequence[Json], what: str, scale: float = 1
) -> dict[str, tuple[list[float], list[float]]]:
    """Return what is drawn over time, one curve for each method and kind of setting.

    A curve goes by the setting's value: by time, noise would make it a zigzag.
    """
    series: dict[str, tuple[list[float], list[float]]] = {}
    unsafe = [entry for entry in entries if entry["kind"] != _EXACT]
    for entry in sorted(unsafe, key=lambda entry: float(entry["value"])):
        xs, ys = series.setdefault(f"{entry['method']}, {entry['kind']}", ([], []))
        xs.append(entry["p50_us"] / 1e3)
        ys.append(scale * entry[what])
    return dict(sorted(series.items()))


def _setting(entry: Json) -> str:
    return _EXACT if entry["kind"] == _EXACT else f"{entry['kind']} = {entry['value']:g}"


def _exact(entries: Sequence[Json], method: str) -> Json:
    return next(entry for entry in entries if entry["method"] == method and entry["kind"] == _EXACT)


def _verdict(figures: Json, method: str) -> str:
    entries = figures["entries"]
    best, exact = cheapest(entries, method), _exact(entries, method)
    if best is not exact:
        return (
            f"The fastest setting of `{method}` that keeps {_KEPT:.0%} of NDCG@10 is "
            f"**{_setting(best)}**: {exact['p50_us'] / best['p50_us']:.2f} × as fast as exact "
            f"search; it keeps {best['ndcg'] / exact['ndcg']:.1%} of NDCG@10, and finds "
            f"{best['recall']:.1%} of the exact top 10."
        )
    perhaps = [
        _setting(entry)
        for entry in _faster(entries, method)
        if entry["ndcg"] >= _KEPT * exact["ndcg"]
    ]
    if perhaps:
        return (
            f"Whether a faster setting of `{method}` keeps {_KEPT:.0%} of NDCG@10 cannot be told "
            f"with {figures['hits']:,} such users: {', '.join(perhaps)} may, or may by chance."
        )
    return (
        f"No setting of `{method}` that is faster than the exact search by {_GAIN - 1:.0%} or more "
        f"keeps {_KEPT:.0%} of NDCG@10."
    )


def _basis(figures: Json) -> str:
    """Say how many users NDCG@10 can change with."""
    users = f"of {figures['users']:,} test users"
    if not figures["hits"]:
        return f"None {users} has their item in the exact top 10: there is no NDCG@10 to keep."
    basis = f"NDCG@10 rests on {figures['hits']:,} {users}, whose item is in the exact top 10."
    if has_interval(figures):
        return basis
    return (
        f"{basis} This record has no interval: a setting counts as keeping NDCG@10 if it does for "
        "each of two halves of the users."
    )


def _compared(entries: Sequence[Json]) -> str:
    """Say which unsafe settings of Algorithm 1 are faster than `auto`, which loses nothing."""
    auto = _exact(entries, "auto")
    others = [entry for entry in entries if entry["method"] == "recjpqprune"]
    faster = [_setting(entry) for entry in others if _is_faster(entry, auto)]
    if faster:
        return f"Faster than exact `auto` is `recjpqprune` with {', '.join(faster)}."
    return f"No setting of `recjpqprune` is faster than exact `auto` by {_GAIN - 1:.0%} or more."


def _table(entries: Sequence[Json], methods: Sequence[str]) -> Table:
    """Of each kind of setting, show the fastest that keeps NDCG@10."""
    rows, without = [], []
    for method in methods:
        own = [entry for entry in entries if entry["method"] == method]
        exact = _exact(own, method)
        for kind in dict.fromkeys(entry["kind"] for entry in own):
            chosen = cheapest([exact, *(entry for entry in own if entry["kind"] == kind)], method)
            if kind != _EXACT and chosen is exact:
                without.append(f"{method}, {kind}")
                continue
            rows.append(
                (
                    method,
                    _setting(chosen),
                    f"{chosen['p50_us'] / 1e3:,.3f}",
                    f"{exact['p50_us'] / chosen['p50_us']:.2f} ×",
                    f"{chosen['ndcg']:.4f}",
                    f"{chosen['recall']:.1%}",
                    f"{chosen['proven']:.1%}",
                )
            )
    note = (
        f"The fastest setting of each kind that keeps {_KEPT:.0%} of NDCG@10; times over "
        f"{entries[0]['queries']:,} queries."
    )
    if without:
        note += (
            f" Without one that keeps it for sure and is faster than exact search by "
            f"{_GAIN - 1:.0%}: {'; '.join(without)}."
        )
    return Table(
        ("method", "setting", "median ms", "exact ÷ it", "NDCG@10", "top 10 found", "proven exact"),
        tuple(rows),
        note,
    )
