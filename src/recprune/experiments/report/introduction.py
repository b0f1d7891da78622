"""How the report begins: what was found, and what its words mean, made from the records."""

from __future__ import annotations

from collections.abc import Sequence

from recprune.experiments.framework.record import Record, by_log, records_of
from recprune.experiments.framework.workload import GIVEN
from recprune.experiments.ours.peer_section import verdict
from recprune.experiments.ours.prunable import answer
from recprune.experiments.ours.scaling import PEERS
from recprune.experiments.ours.shape_section import choices
from recprune.experiments.ours.unsafe import gains, has_interval
from recprune.experiments.paper.rq1 import direction
from recprune.experiments.report.document import Block, Section, Table, Text

_TERMS = (
    ("auto", "our method: cells or a filtered scan, whichever suits the codes and the query"),
    ("cells", "ours: items grouped by pairs of sub-items, groups that cannot matter left out"),
    ("scan", "ours: all items, but through a filter, so that few are scored"),
    ("recjpqprune", "Algorithm 1 of the paper, in native code"),
    (
        "pqtopk",
        "every item in the order of ids, in native code: scored, or since commit db00cde filtered "
        "first, and the few that are left scored (the column *scored* tells which)",
    ),
    (
        "default",
        "Transformer Default: the product with a vector of every item, by NumPy, and exact scores "
        "for whomever rounding leaves in doubt",
    ),
    ("φ", "the sequence embedding: what a model makes of a history, and a search begins with"),
    ("S", "scores of all sub-items, split by split; an item's score is the sum of its own"),
    ("θ, σ", "the K-th best score found so far; the highest that an unseen item can have"),
    ("scored", "items whose score was computed, repeats counted, as a share of all items"),
    ("looked at", "items that went through a filter, scored or not; repeats count"),
    ("steps", "batches of sub-item ids (`recjpqprune`), or lists or cells (ours), visited"),
)
_QUICK = (
    "**A quick run**: few queries, small models and catalogues, in whatever else the machine was "
    "doing. It shows that everything works; no figure here is to be cited.",
)
_LOGS = {
    "gitlog": "who changed which file, in the histories of large open-source repositories",
    "tmall-like": "synthetic, with as many items as the paper's Tmall, and fewer users",
    "synthetic": "synthetic and small, for a quick run",
    "gowalla": "check-ins, one of the paper's two",
    "tmall": "purchases, one of the paper's two",
}


def introduction(records: Sequence[Record], *, quick: bool = False) -> Section:
    """Return the first section: every sentence for which there are records."""
    found = (
        *(_QUICK if quick else ()),
        *_versions(records),
        *_speed(records_of(records, "rq1")),
        *_exactness(records_of(records, "rq1")),
        *_size(records_of(records, "scaling")),
        *_noise(records_of(records, "splits")),
        *choices(records_of(records, "shapes")),
        *_drift(records_of(records, "rq1"), records_of(records, "rq3")),
        *_torch(records_of(records, "peers")),
        *(
            f"Beside other libraries, on {record.figures['log']}: "
            f"{verdict(record.figures['peers'])}"
            for record in records_of(records, "peers")
        ),
        *_stopping(records_of(records, "unsafe")),
        *(
            f"Models trained to be pruned, on {record.figures['log']}: "
            + answer(record.figures, "recjpqprune")
            for record in records_of(records, "prunable")
        ),
    )
    blocks: list[Block] = [
        Text(
            "The best K of a catalogue, found without scoring every item, and yet exactly: this is "
            "the evaluation of the paper (Petrov, Macdonald and Tonellotto, SIGIR 2025) repeated, "
            "and what came after. Everything below is made from recorded measurements; published "
            "figures are marked as such."
        ),
        *(Text(sentence) for sentence in found),
        Text(_logs(records)),
        # One column: words read from the left.
        Table(("what words mean",), tuple((f"**{word}**: {what}",) for word, what in _TERMS)),
    ]
    return Section("In short", "in-short", tuple(blocks))


def _versions(records: Sequence[Record]) -> list[str]:
    """Say that several versions were measured, and which sections compare within one."""
    commits = {str(record.machine.get("commit")) for record in records}
    if len(commits) < 2:
        return []
    return [
        f"Versions: this page joins measurements of {len(commits)} states of the sources, as not "
        "all models can be trained for each; every section names its own. Later ones are faster, "
        "`pqtopk` above all, so compare within a section and a machine."
    ]


def _speed(records: Sequence[Record]) -> list[str]:
    """Say what a search takes, log by log."""
    sentences = []
    for log, own in by_log(records).items():
        ranges = []
        for method in ("auto", "recjpqprune", "pqtopk", "default"):  # ours, and the paper's
            times = [
                record.figures["methods"][method]["p50_us"] / 1000
                for record in own
                if method in record.figures["methods"]
            ]
            if times:
                ranges.append(f"`{method}` {_range(times)} ms")
        sentences.append(
            f"**{log}**, {own[0].figures['items']:,} items, K = 10, one thread, medians of "
            f"{len(own)} model{'s' if len(own) > 1 else ''}: {', '.join(ranges)}. {direction(own)}"
        )
    return sentences


def _range(times: Sequence[float]) -> str:
    low, high = f"{min(times):,.2f}", f"{max(times):,.2f}"
    return low if low == high else f"{low} to {high}"


def _exactness(records: Sequence[Record]) -> list[str]:
    agreed = [
        count
        for record in records
        for name, count in record.figures.get("agreed", {}).items()
        if name != "pqtopk"  # the reference of all others
    ]
    if agreed:
        return [
            f"Exactness: {sum(agreed):,} timed answers, by every other method and model, have the "
            "items and the bits of the scores that scoring everything by `pqtopk` gives."
        ]
    values = [
        {entry["ndcg"] for entry in record.figures["methods"].values() if "ndcg" in entry}
        for record in records
    ]
    if not values or any(len(found) > 1 for found in values):
        return []
    return [
        f"Exactness: NDCG@10 of {len(values)} models is the same, to the bit, by every "
        "method that answered all users."
    ]


def _size(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    largest = max(records, key=lambda record: int(record.figures["items"]))
    figures = largest.figures
    each = ", ".join(
        f"{PEERS.get(name, f'`{name}`')} {entry['p50_us'] / 1000:,.1f} ms "
        f"({entry['queries']:,} queries)"
        for name, entry in figures["methods"].items()
    )
    return [
        f"Size: over {figures['items']:,} items of random codes, on a machine of "
        f"{largest.hardware} but by one thread, medians are {each}."
    ]


def _noise(records: Sequence[Record]) -> list[str]:
    """Say how far apart two measurements of the same work are: of long codes, `auto` scans."""
    ratios = {}
    for record in records:
        auto, scan = (record.figures["methods"][name] for name in ("auto", "scan"))
        if auto["bytes_touched"] == scan["bytes_touched"]:
            times = auto["p50_us"], scan["p50_us"]
            ratios[record.figures["splits"]] = max(times) / min(times)
    if not ratios:
        return []
    return [
        f"Noise: for codes of {' and '.join(map(str, sorted(ratios)))} splits, `auto` does just "
        f"what `scan` does, and their medians differ by up to {max(ratios.values()):.2f} ×. "
        "Smaller differences than that, anywhere in this report, may be the machine's."
    ]


def _drift(rq1: Sequence[Record], rq3: Sequence[Record]) -> list[str]:
    """Say how far apart they are minutes later: two experiments time the same searches."""
    earlier = {(record.figures["log"], record.figures["model"]): record for record in rq1}
    ratios = []
    for record in rq3:
        other = earlier.get((record.figures["log"], record.figures["model"]))
        if other is None or other.hardware != record.hardware:
            continue
        for name, entry in record.figures["references"].items():
            times = (entry["p50_us"], other.figures["methods"][name]["p50_us"])
            ratios.append(max(times) / min(times))
    if not ratios:
        return []
    return [
        "Across experiments, compare ratios rather than times: what RQ1 and RQ3 both measure, "
        f"minutes apart, differs by up to {max(ratios):.2f} ×."
    ]


def _torch(records: Sequence[Record]) -> list[str]:
    """Say whether Algorithm 1 is faster than PQTopK where both are torch's, as in the paper."""
    sentences = []
    for record in records:
        times = {entry["family"]: entry["p50_us"] for entry in record.figures["peers"]}
        if {"torch RecJPQPrune", "torch PQTopK"} <= times.keys():
            ratio = times["torch RecJPQPrune"] / times["torch PQTopK"]
            sentences.append(
                f"In torch, on {record.figures['log']}, Algorithm 1 takes {ratio:.2f} × the time "
                "of scoring every item; the paper has both in TensorFlow. Native code makes "
                "scoring so much cheaper that the order can turn round."
            )
    return sentences


def _stopping(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    cases = [gain for record in records for gain in gains(record.figures)]
    sure = [gain for gain in cases if gain > 1]
    outcome = f"{min(sure):.1f} to {max(sure):.1f} × as fast as exact search" if sure else "none"
    measured = all(has_interval(record.figures) for record in records)
    basis = "by a 95 % interval" if measured else "for each of two halves of the users, no more"
    return [
        f"Stopping early: of {len(cases)} cases (a model of a log, and a method), {len(sure)} have "
        f"a setting that saves time and keeps 99 % of NDCG@10 ({basis}): {outcome}."
    ]


def _logs(records: Sequence[Record]) -> str:
    of_logs = by_log([record for record in records if "log" in record.figures])
    given = {
        log
        for log, own in of_logs.items()
        if {record.figures.get("model") for record in own} <= {GIVEN, None}
        and any("model" in record.figures for record in own)
    }
    unknown = ("a log that was given", "a trained model that was given as arrays")
    described = {log: what for log, what in _LOGS.items() if log not in given}
    each = [f"**{log}**: {described.get(log, unknown[log in given])}" for log in of_logs]
    return f"The logs. {'; '.join(each)}." if each else "No log was used."
