"""The figures that matter most, for the first screen of the README: made from the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recprune.experiments.framework.record import Record, records_of
from recprune.experiments.ours.peer_section import fastest_approximate, time_of_auto
from recprune.experiments.ours.scaling import PEERS

_RECALL = 0.99  # that an approximate index must reach to stand beside an exact one


@dataclass(frozen=True)
class Published:
    """NDCG@10 that others have published of a log, by the protocol of our record of it."""

    model: str
    ndcg: float


# Leave-one-out, full catalogue, seen items left out: tables of blondered/transformer_benchmark and
# cornac's pull request 715. Full vectors, but for RPG's codes of texts.
_PUBLISHED = {
    "amazon-beauty": (
        Published("SASRec with sampled softmax", 0.0531),
        Published("eSASRec", 0.0523),
        Published("RPG", 0.0464),
        Published("TIGER", 0.0384),
    ),
}
# What a model of the record is called there, and here.
_LEARNT = ("learnt, M = 8", "codes of 8 bytes an item")


def headline(records: Sequence[Record]) -> str:
    """Return as Markdown one row for each figure that has a record."""
    rows = [*_speed(records), *_quality(records), *_peers(records)]
    lines = ["| | |", "|---:|---|", *(f"| **{what}** | {text} |" for what, text in rows)]
    return "\n".join(lines) + "\n"


def _speed(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Say what the exact top 10 of the fewest items takes that were measured: a million."""
    measured = sorted(records_of(records, "scaling"), key=lambda record: record.figures["items"])
    if not measured:
        return []
    record = measured[0]
    methods = record.figures["methods"]
    auto = methods["auto"]["p50_us"]
    peer = methods.get("faiss_pq")
    beside = (
        f"; {PEERS['faiss_pq']}, exact too, takes {peer['p50_us'] / auto:.0f} × that"
        if peer
        else ""
    )
    return [
        (
            f"{auto:.0f} µs",
            f"for the exact top 10 of {record.figures['items']:,} items, one query on one core "
            f"({record.machine['cpu']}, {record.figures['instruction_set']}){beside}",
        )
    ]


def _quality(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Say how good models with codes are, beside the best that others published."""
    rows = []
    for record in records_of(records, "quality"):
        name, ours = _LEARNT
        if record.part not in _PUBLISHED or name not in record.figures["quality"]:
            continue
        ndcg, *_ = record.figures["quality"][name]["all"]["NDCG@10"]
        others = ", ".join(f"{entry.model} {entry.ndcg:.4f}" for entry in _PUBLISHED[record.part])
        rows.append((f"{ndcg:.4f}", f"NDCG@10 on {record.part} with {ours}; published: {others}"))
    return rows


def _peers(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Say how much longer the best approximate index takes, and what it finds."""
    record = fastest_measured(records)
    if record is None:
        return []
    entries = record.figures["peers"]
    best = fastest_approximate(entries, _RECALL)
    if best is None:
        return []
    tried = sum(not entry["exact"] for entry in entries)
    return [
        (
            f"{best['p50_us'] / time_of_auto(entries):.0f} ×",
            f"as long takes the fastest approximate search that finds {_RECALL * 100:.0f} % of the "
            f"same answers: {best['name']}, of {tried} settings of libraries that were tried "
            f"({record.figures['log']}, {record.figures['items']:,} items)",
        )
    ]


def fastest_measured(records: Sequence[Record]) -> Record | None:
    """Return the record of peers on the fastest machine, by `auto`, and with the latest engine."""
    measured = records_of(records, "peers")
    times = {record.part: time_of_auto(record.figures["peers"]) for record in measured}
    return min(measured, key=lambda record: times[record.part], default=None)
