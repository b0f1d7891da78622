"""The section on peers: sentences, pictures and tables, made from the figures of a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from recprune.experiments.framework.experiment import model_name
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import milliseconds
from recprune.experiments.report.charts import scatter
from recprune.experiments.report.document import Block, Picture, Table, Text
from recprune.types import Json

OWN_FAMILY = "recprune"
_AUTO, _OTHERS = "recprune auto", "recprune, others"
_LITTLE = 0.01  # of NDCG@10
_RECALLS = (0.9, 0.99)
_SAME_BUT_FOR_ROUNDING = 0.99  # recall@10 of an exact peer: ties and the order of additions
# Engines of learned sparse retrieval, and what they ask to be cited for their use.
_SPARSE = {
    "BMP": "Block-Max Pruning: Mallia, Suel and Tonellotto, "
    "[SIGIR 2024](https://arxiv.org/abs/2405.01117).",
    "Seismic": "Seismic: Bruch, Nardini, Rulli and Venturini, "
    "[SIGIR 2024](https://doi.org/10.1145/3626772.3657769) and "
    "[CIKM 2024](https://doi.org/10.1145/3627673.3679977), with Venuta "
    "[ECIR 2025](https://doi.org/10.1007/978-3-031-88714-7_43), with Fontana Forward Index "
    "Compression for Learned Sparse Retrieval (ECIR 2026), and "
    "[Sketching and Nearest Neighbor Search](https://arxiv.org/abs/2509.24815).",
}
_RECALL_TICKS = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)


def peer_blocks(record: Record) -> list[Block]:
    figures = record.figures
    log = figures["log"]
    # Ours first, then other exact ones; approximate ones by library, as they were built.
    entries = sorted(
        figures["peers"], key=lambda entry: (entry["family"] != OWN_FAMILY, not entry["exact"])
    )
    fastest = _auto(entries)["p50_us"]
    rows = [
        (
            _label(entry),
            f"{entry['queries']:,}",
            milliseconds(entry, "p50_us"),
            milliseconds(entry, "p95_us"),
            f"{entry['p50_us'] / fastest:,.2f} ×",
            f"{entry['recall']:.4f}",
            "–" if (lost := _lost(entry)) is None else f"{lost:+.2%}",
        )
        for entry in entries
    ]
    notes = [f"{key}: {reason}." for key, reason in figures["left_out"].items()]
    structures = {entry["family"]: entry for entry in entries}  # one for all of its searches
    settings = [
        f"{family}: {entry['settings']}."
        for family, entry in structures.items()
        if entry["settings"]
    ]
    return [
        Text(
            f"**{log}**, {model_name(figures['model'])}, {figures['items']:,} items; "
            f"{record.machine['cpu']}, {figures['instruction_set']}. {verdict(entries)}"
        ),
        Picture(
            f"peers-{log}",
            _recall_picture(entries),
            f"Median time of a search against recall@10, {log}, by library and setting.",
            "Down and to the right is better. The points of one library are its settings. What is "
            "missing to a recall of 1 is on a logarithmic scale; at 1 stands what finds all.",
        ),
        Table(
            ("search", "queries", "median ms", "p95 ms", "÷ auto", "recall@10", "NDCG@10 lost"),
            tuple(rows),
            f"{_users(entries)} {_loss(_auto(entries))}"
            f"{_ended(figures.get('not_tried'))}"
            + ("Left out: " + " ".join(notes) if notes else "No peer was left out."),
        ),
        Table(
            ("built", "exact", "memory, MB", "build, s"),
            tuple(
                (
                    family,
                    "yes" if entry["exact"] else "no",
                    f"{entry['bytes'] / 1e6:,.0f}",
                    f"{entry['build_seconds']:,.1f}",
                )
                for family, entry in structures.items()
            ),
            f"By {figures['build_threads']} threads. {' '.join(settings)}",
        ),
        *_ndcg_picture(entries, log),
        *_sparse(entries),
    ]


def _sparse(entries: Sequence[Json]) -> list[Block]:
    """Say how codes become sparse vectors, where engines for these were measured, and cite them."""
    families = {entry["family"].partition(",")[0] for entry in entries}
    found = [name for name in _SPARSE if name in families]
    if not found:
        return []
    return [
        Text(
            f"{' and '.join(found)} hold items as sparse vectors: sub-item b of split m is a term, "
            "an item has one of each split, all with the same weight, and a query has S, less the "
            "lowest of each split, for all of them. S is counted in the times, as for all; "
            "so is naming the terms of a query, with their weights, where an engine takes nothing "
            "else (BMP); names that stay the same are made before. "
            + " ".join(_SPARSE[name] for name in found)
        )
    ]


def _ndcg_picture(entries: Sequence[Json], log: str) -> list[Block]:
    """Draw time against the NDCG@10 that is kept, where the exact answers have any."""
    kept = {
        entry["name"]: 100 * (1 - lost) for entry in entries if (lost := _lost(entry)) is not None
    }
    if len(kept) < len(entries):
        return []
    picture = _picture(
        entries,
        "NDCG@10, % of that of the exact answers",
        lambda entry: kept[entry["name"]],
        joined=False,
    )
    return [
        Picture(
            f"peers-ndcg-{log}",
            picture,
            f"Median time of a search against the NDCG@10 that is kept, {log}.",
            "The same against the NDCG@10 that is kept.",
        )
    ]


def _recall_picture(entries: Sequence[Json]) -> str:
    """Draw time against recall, spread where it crowds: by the logarithm of what is missing."""
    # The scale goes as far as the approximate ones do; a recall of 1 stands beyond.
    missing = [1 - entry["recall"] for entry in entries if entry["recall"] < 1]
    finest = float(-np.log10(min(missing))) if missing else 1.0
    whole = finest + 0.4

    def place(recall: float) -> float:
        return float(-np.log10(1 - recall)) if recall < 1 else whole

    lowest = min(place(entry["recall"]) for entry in entries)
    below = max((tick for tick in _RECALL_TICKS if place(tick) <= lowest), default=0.0)
    ticks = {
        place(tick): f"{tick:g}"
        for tick in _RECALL_TICKS
        if tick >= below and place(tick) <= finest
    }
    return _picture(
        entries,
        "recall@10",
        lambda entry: place(entry["recall"]),
        joined=True,
        x_ticks=ticks | {whole: "1"},
    )


def _picture(
    entries: Sequence[Json],
    x_label: str,
    place: Callable[[Json], float],
    *,
    joined: bool,
    x_ticks: Mapping[float, str] | None = None,
) -> str:
    groups: dict[str, list[Json]] = {}
    # Lines come first: the first names get the colours that are easiest to tell apart.
    for entry in sorted(entries, key=lambda entry: (entry["name"] != "auto", entry["exact"])):
        groups.setdefault(_group(entry), []).append(entry)
    points = {
        group: ([place(entry) for entry in found], [entry["p50_us"] / 1000 for entry in found])
        for group, found in groups.items()
    }
    labels = {
        group: [entry["name"] for entry in found]
        for group, found in groups.items()
        if group in (_AUTO, _OTHERS)
    }
    return scatter(
        points,
        x_label=x_label,
        y_label="median time of a search, ms",
        log_y=True,
        highlight=_AUTO,
        labels=labels,
        joined=joined,
        x_ticks=x_ticks,
        apart=[group for group, found in groups.items() if group == _OTHERS or len(found) == 1],
    )


def _group(entry: Json) -> str:
    if entry["family"] != OWN_FAMILY:
        return str(entry["family"])
    return _AUTO if entry["name"] == "auto" else _OTHERS


def _auto(entries: Sequence[Json]) -> Json:
    return next(entry for entry in entries if entry["name"] == "auto")


def _label(entry: Json) -> str:
    return f"**recprune {entry['name']}**" if entry["family"] == OWN_FAMILY else entry["name"]


def _users(entries: Sequence[Json]) -> str:
    """Say for how many users the answers were compared; slow searches get fewer."""
    asked = _auto(entries)["users"]
    fewer = [f"{entry['name']} {entry['users']:,}" for entry in entries if entry["users"] < asked]
    return f"Answers to {asked:,} users" + (f" ({'; '.join(fewer)})." if fewer else ".")


def _loss(auto: Json) -> str:
    """Say what the loss of NDCG@10 is relative to, where it is known what users took next."""
    if auto["exact_ndcg"] is None:
        return "What they took next is not known. "
    return (
        "NDCG@10 lost is relative to that of the exact answers to the same users, which is "
        f"{auto['exact_ndcg']:.4f} for those of `auto`. "
    )


def _ended(not_tried: Mapping[str, int] | None) -> str:
    """Say which settings were not tried, and why; nothing for records without that figure."""
    if not not_tried:
        return ""
    each = "; ".join(f"{family}: {count}" for family, count in not_tried.items())
    return (
        "The settings of a library were tried up to the first that, in a short trial before the "
        "times above were taken, found 99 % of the exact top 10 or took longer than FAISS PQ, "
        f"which is exact; more thorough ones, not tried: {each}. "
    )


def _lost(entry: Json) -> float | None:
    """Return the share of the exact answers' NDCG@10 that is lost; below 0, it is gained.

    None where it is not known what users took, or the exact answers have none of it.
    """
    exact = entry["exact_ndcg"]
    return float(1 - entry["ndcg"] / exact) if exact else None


def time_of_auto(entries: Sequence[Json]) -> float:
    """Return the median microseconds of `auto`."""
    return float(_auto(entries)["p50_us"])


def fastest_approximate(entries: Sequence[Json], recall: float) -> Json | None:
    """Return the fastest of the approximate peers that find so much; None if none does."""
    enough = [entry for entry in entries if not entry["exact"] and entry["recall"] >= recall]
    return min(enough, key=lambda entry: float(entry["p50_us"]), default=None)


def verdict(entries: Sequence[Json]) -> str:
    """Say how the fastest peers compare with `auto`."""
    auto = _auto(entries)
    peers = [entry for entry in entries if entry["family"] != OWN_FAMILY]
    exact = [entry for entry in peers if entry["exact"]]
    approximate = [entry for entry in peers if not entry["exact"]]
    sentences = [f"`auto` takes {auto['p50_us'] / 1000:,.3f} ms and is exact."]
    if exact:
        sentences.append(f"The fastest exact peer is {_named_time(exact, auto)}.")
        sentences += _agreement(exact)
    if approximate:
        faster = [entry for entry in approximate if entry["p50_us"] < auto["p50_us"]]
        sentences.append(
            f"Of the {len(approximate)} approximate settings tried, {len(faster) or 'none'} "
            f"{'is' if len(faster) < 2 else 'are'} faster than `auto`"
            + (
                f"; the best recall@10 among them is {max(e['recall'] for e in faster):.3f}."
                if faster
                else "."
            )
        )
        for least in _RECALLS:
            best = fastest_approximate(approximate, least)
            sentences.append(
                f"With a recall@10 of {least:g} or more, the fastest of them is "
                f"{_named_time([best], auto)}."
                if best
                else f"None of them reaches a recall@10 of {least:g}."
            )
        good = [
            entry for entry in approximate if (lost := _lost(entry)) is not None and lost <= _LITTLE
        ]
        if good:
            sentences.append(
                f"Of those that lose at most {_LITTLE:.0%} of NDCG@10, the fastest is "
                f"{_named_time(good, auto)}."
            )
    return " ".join(sentences)


def _agreement(exact: Sequence[Json]) -> list[str]:
    """Say how far exact peers agree with us, and what may be the reason where they do not."""
    others = [entry for entry in exact if entry["recall"] < _SAME_BUT_FOR_ROUNDING]
    same = [entry["recall"] for entry in exact if entry["recall"] >= _SAME_BUT_FOR_ROUNDING]
    sentences = [
        f"**{entry['name']} disagrees**: it finds {entry['recall']:.2%} of our top 10, which is "
        "more than rounding explains."
        for entry in others
    ]
    if same and min(same) < 1.0:
        sentences.append(
            f"{'The other exact' if others else 'Exact'} peers find {min(same):.2%} of our top 10 "
            "or more: they add floats in another order, and break ties in their own way."
        )
    return sentences


def _named_time(entries: Sequence[Json], auto: Json) -> str:
    best = min(entries, key=lambda entry: float(entry["p50_us"]))
    ratio = best["p50_us"] / auto["p50_us"]
    return f"{best['name']}: {best['p50_us'] / 1000:,.3f} ms, {ratio:,.1f} × `auto`"
