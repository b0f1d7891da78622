"""Unsafe settings, the paper's future work: what is lost when a search stops before it is sure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from recprune.evaluate import RankedUsers, user_values
from recprune.experiments.charts import Panel, lines, two_panels
from recprune.experiments.experiment import Part, Plan, model_name
from recprune.experiments.record import Record
from recprune.experiments.report import Block, Picture, Section, Table, Text
from recprune.experiments.timing import Search, index_search, interleaved
from recprune.experiments.workload import Workload
from recprune.methods import Auto, Method, RecJPQPrune
from recprune.results import TopK
from recprune.types import Int32Array, Int64Array, Json, Progress

_EXACT = "exact"
_KINDS: dict[str, Callable[[type[Auto] | type[RecJPQPrune], float], Method]] = {
    "max_steps": lambda method, value: method(max_steps=int(value)),
    "over_inflation": lambda method, value: method(over_inflation=value),
    "deadline_us": lambda method, value: method(deadline_us=value),
}
_METHODS: dict[str, type[Auto] | type[RecJPQPrune]] = {"recjpqprune": RecJPQPrune, "auto": Auto}
Grid: TypeAlias = dict[str, dict[str, list[float]]]  # method → kind of setting → values
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
    for method in _METHODS
}
_KEPT = 0.99  # of exact NDCG@10
_GAIN = 1.05  # times as fast: less than that is no gain
_CHOOSING, _REPORTED = 0, 1  # halves of the users: what is chosen on one is told of the other
_METRIC = "NDCG@10"


class Unsafe:
    """Quality against time, for searches that stop early."""

    name = "unsafe"
    title = "Unsafe settings: stopping before it is proven"

    def parts(self, plan: Plan) -> list[Part]:
        """One for each model."""
        return [self._part(plan, workload) for workload in plan.workloads]

    def _part(self, plan: Plan, workload: Workload) -> Part:
        queries = plan.sized(200, 10)
        users = plan.sized(len(workload.targets), 100)
        grid = _QUICK_GRID if plan.quick else FULL_GRID
        settings = {
            "workload": workload.checksum(), "queries": queries, "users": users, "halves": 2,
            "grid": grid, "seed": plan.seed,
        }  # fmt: skip
        return Part(
            workload.name,
            settings,
            lambda progress: measure(workload, grid, queries, users, plan.seed, progress),
            minutes=2.0,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """Curves for each model, and the settings that lose next to nothing."""
        blocks: list[Block] = [
            Text(
                "K = 10. `max_steps` and `deadline_us` stop a search early, `over_inflation` "
                "raises the threshold by that share of the way up to the best conceivable score. A "
                "search then reports its gap: no missing item scores higher than the K-th found "
                "plus the gap. Times are medians of one thread, S included. Curves join the values "
                "of a setting in their order, over all users that are counted below. A setting "
                f"that keeps {_KEPT:.0%} of NDCG@10 is chosen by one half of these users, and its "
                f"quality told by the other; less than {_GAIN - 1:.0%} counts as no "
                "gain of time. NDCG@10 may be above the exact one by chance: it knows one relevant "
                "item of a user."
            )
        ]
        for record in records:
            blocks += _blocks(record)
        return Section(self.title, self.name, tuple(blocks))


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
        settings.append((name, _EXACT, None, _METHODS[name]()))
        settings += [
            (name, kind, value, _KINDS[kind](_METHODS[name], value))
            for kind, values in kinds.items()
            for value in values
        ]
    searches: dict[str, Search] = {
        f"{name} {kind} {value}": index_search(index, method)
        for name, kind, value, method in settings
    }
    timed = interleaved(searches, users[:num_queries], 10, seed=seed, progress=progress)
    exact = index.search(users, 10, threads=2).ids
    halves = (slice(0, len(users) // 2), slice(len(users) // 2, len(users)))
    targets = workload.targets[: len(users)]
    entries = []
    for name, kind, value, method in settings:
        progress(f"answers of {name}, {kind}")
        # Against a clock, threads would be in each other's way.
        found = index.search(users, 10, method=method, threads=1 if kind == "deadline_us" else 2)
        entries.append({
            "method": name, "kind": kind, "value": value,
            **_quality(found, exact, targets, slice(None)),
            "halves": [_quality(found, exact, targets, half) for half in halves],
            **timed[f"{name} {kind} {value}"].summary(),
        })  # fmt: skip
    hits = (exact == targets[:, None]).any(1)
    return {
        "log": workload.log,
        "model": workload.model,
        "items": index.num_items,
        "users": len(users),
        "hits": int(hits.sum()),
        "halves": [
            {"users": len(hits[half]), "hits": int(hits[half].sum())} for half in halves
        ],
        "instruction_set": index.describe()["instruction_set"],
        "entries": entries,
    }  # fmt: skip


def _quality(found: TopK, exact: Int64Array, targets: Int32Array, chosen: slice) -> Json:
    """Return how good the answers to some of the users are."""
    ids, stats = found.ids[chosen], found.stats
    gaps = (stats.upper_bound - stats.threshold)[chosen]
    gap = float(np.median(np.maximum(gaps, 0.0)))
    ranked = RankedUsers.of_targets(ids, targets[chosen])
    return {
        "ndcg": float(user_values(ranked, [_METRIC])[_METRIC].mean()),
        "recall": recall(ids, exact[chosen]),
        "same": float((ids == exact[chosen]).all(1).mean()),
        "proven": float(stats.exact[chosen].mean()),
        "gap": gap if np.isfinite(gap) else None,  # infinite: fewer than K items were found
    }


def recall(found: Int64Array, exact: Int64Array) -> float:
    """Return the share of the exact top K that was found; −1 stands for nothing."""
    hit = (exact[:, :, None] == found[:, None, :]).any(2) & (exact >= 0)
    return float(hit.sum() / max(1, (exact >= 0).sum()))


def cheapest(entries: Sequence[Json], method: str) -> Json:
    """Return the fastest entry that keeps NDCG@10 of the half that chooses.

    Exact search always does, and is returned unless another is faster by more than noise.
    """
    own = [entry for entry in entries if entry["method"] == method]
    exact = _exact(own, method)
    least = _KEPT * exact["halves"][_CHOOSING]["ndcg"]
    kept = [
        entry
        for entry in own
        if entry["halves"][_CHOOSING]["ndcg"] >= least and _is_faster(entry, exact)
    ]
    return min(kept, key=lambda entry: float(entry["p50_us"]), default=exact)


def _is_faster(entry: Json, other: Json) -> bool:
    return bool(_GAIN * entry["p50_us"] <= other["p50_us"])


def _blocks(record: Record) -> list[Block]:
    figures = record.figures
    entries, model, log = figures["entries"], model_name(figures["model"]), figures["log"]
    methods = list(dict.fromkeys(entry["method"] for entry in entries))
    verdicts = [_verdict(entries, method) for method in methods] if _has_hits(figures) else []
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
                    _curves(entries, "recall", 100), "exact top 10 found, %", mark=marks[1],
                    in_order=True,
                ),
                x_label="median time of a search, ms", log_x=True, stacked=True,
            ),
            f"NDCG@10 and recall of the exact top 10 against median time for {model} on {log}.",
            f"What unsafe searches find in less time: {log}, {model}.",
        )
    ]  # fmt: skip
    gaps = _curves([entry for entry in entries if entry["gap"] is not None], "gap")
    if gaps:
        pictures.append(
            Picture(
                f"unsafe-gap-{record.part}",
                lines(
                    gaps, x_label="median time of a search, ms",
                    y_label="median reported gap, score", log_x=True, in_order=True,
                ),
                f"Reported gap against median time for {model} on {log}.",
                f"What unsafe searches can still promise: {log}, {model}. Where fewer than ten "
                "items were found for most users, there is no gap to report.",
            )
        )  # fmt: skip
    return [
        Text(
            f"**{log}, {model}**: {figures['items']:,} items; {record.machine['cpu']}, "
            f"{figures['instruction_set']}. {_basis(figures)} "
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


def _verdict(entries: Sequence[Json], method: str) -> str:
    best = cheapest(entries, method)
    exact = _exact(entries, method)
    if best is exact:
        return (
            f"No unsafe setting of `{method}` that keeps {_KEPT:.0%} of NDCG@10 is faster than the "
            f"exact search by {_GAIN - 1:.0%} or more."
        )
    told, whole = best["halves"][_REPORTED], exact["halves"][_REPORTED]
    return (
        f"The fastest setting of `{method}` that keeps {_KEPT:.0%} of NDCG@10 is "
        f"**{_setting(best)}**: {exact['p50_us'] / best['p50_us']:.2f} × as fast as exact search; "
        f"on the other half it keeps {told['ndcg'] / whole['ndcg']:.1%} of NDCG@10, and finds "
        f"{told['recall']:.1%} of the exact top 10."
    )


def _has_hits(figures: Json) -> bool:
    return all(half["hits"] for half in figures["halves"])


def _basis(figures: Json) -> str:
    """Say how many users NDCG@10 can change with."""
    users = f"of {figures['users']:,} test users"
    if not _has_hits(figures):
        return (
            f"Too few {users} have their item in the exact top 10 ({figures['hits']:,}): there is "
            "no NDCG@10 to keep."
        )
    halves = " and ".join(f"{half['hits']:,}" for half in figures["halves"])
    return (
        f"NDCG@10 rests on {figures['hits']:,} {users}, whose item is in the exact top 10: "
        f"{halves} of the two halves."
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
            told = chosen["halves"][_REPORTED]
            rows.append((
                method, _setting(chosen), f"{chosen['p50_us'] / 1e3:,.3f}",
                f"{exact['p50_us'] / chosen['p50_us']:.2f} ×", f"{told['ndcg']:.4f}",
                f"{told['recall']:.1%}", f"{told['proven']:.1%}",
            ))  # fmt: skip
    note = (
        f"The fastest setting of each kind that keeps {_KEPT:.0%} of NDCG@10 of one half of the "
        "users; quality is that of the other half."
    )
    if without:
        note += f" None is faster than exact search by {_GAIN - 1:.0%}: {'; '.join(without)}."
    return Table(
        ("method", "setting", "median ms", "exact ÷ it", "NDCG@10", "top 10 found", "proven exact"),
        tuple(rows),
        note,
    )  # fmt: skip
