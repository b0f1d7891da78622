"""Write the tables of docs/scale-out.md: what was measured, and a plan for one billion items.

    python -m benchmarks.scale_plan

Figures come from `docs/measured` (benchmarks/shards.py, benchmarks/batch.py) and from the records
of the experiment `scaling`; nothing is typed in.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import NormalDist

import numpy as np

from recprune.experiments.framework.record import Record, load_record
from recprune.types import Json

FOLDER = Path(__file__).parents[1] / "docs"
ITEMS = 10**9
SHARDS = (1, 4, 8, 16, 32)
_SIZES = (10**6, 10**7, 10**8, 10**9)
_STAGES = ("ids", "encode", "search", "io")
_Z_99 = NormalDist().inv_cdf(0.99)


def search_times(num_items: float) -> tuple[float, float]:
    """Return the median and the spread (σ of the logarithm) of a search of so many items, in ms.

    Between the sizes that were measured, times follow a power law.
    """
    measured = [_record(size).figures["methods"]["auto"] for size in _SIZES]
    medians = [entry["p50_us"] / 1000 for entry in measured]
    spreads = [_spread(entry) for entry in measured]
    place = np.log(num_items)
    median = np.exp(np.interp(place, np.log(_SIZES), np.log(medians)))
    return float(median), float(np.interp(place, np.log(_SIZES), spreads))


def _record(size: int) -> Record:
    return load_record(FOLDER / "records" / f"scaling.{size}.json")


def _spread(times: Json) -> float:
    return float(np.log(times["p99_us"] / times["p50_us"])) / _Z_99


def slowest_of(shards: int, median: float, spread: float, share: float) -> float:
    """Return a quantile of the slowest of several independent lognormal times."""
    return median * float(np.exp(spread * NormalDist().inv_cdf(share ** (1 / shards))))


def plan() -> str:
    measured = _measured("shards")
    constants = measured["constants"]
    call = constants["call_to_one_shard_us"]
    size = _record(10**8).figures["bytes_per_item"]
    smallest, largest = _record(_SIZES[0]), _record(_SIZES[-1])
    elsewhere = (
        ", its largest size on another machine than the others"
        if largest.hardware != smallest.hardware
        else ""
    )
    sent = constants["bytes_to_and_from_a_shard"]
    rows = [
        "| shards | items in each | memory of each | search, median | slowest shard, p99 "
        "| with the call, p99 | sent for a query |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shards in SHARDS:
        items = ITEMS / shards
        median, spread = search_times(items)
        slowest = slowest_of(shards, median, spread, 0.99)
        calls = slowest_of(shards, call["p50_us"] / 1000, _spread(call), 0.99)
        rows.append(
            f"| {shards} | {items / 1e6:,.0f} M | {items * size / 1e9:,.1f} GB | {median:.2f} ms "
            f"| {slowest:.1f} ms | {slowest + (calls if shards > 1 else 0):.1f} ms "
            f"| {f'{shards * sent / 1000:.1f} kB' if shards > 1 else 'nothing'} |"
        )
    rows += [
        "",
        f"From measurements: {size:.0f} bytes an item; `auto` over random codes (the experiment "
        f"`scaling`{elsewhere}); a call to a shard that has nothing to do "
        f"{call['p50_us'] / 1000:.1f} ms in the median, {call['p99_us'] / 1000:.1f} ms at p99; "
        f"{sent:,.0f} bytes to and from a shard for a query of K = 10 (`benchmarks/shards.py`, "
        f"{measured['shards']} shards). A query waits for the slowest of its shards, so p99 is "
        "that of the slowest: times taken as lognormal and independent.",
    ]
    return "\n".join(rows) + "\n"


def shards() -> str:
    """Return how a sharded index was measured to answer, as Markdown."""
    measured = _measured("shards")
    rows = [
        "| one query | median | p99 | items scored | looked at | sent for a query |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, entry in measured["single_queries"].items():
        sent = f"{entry['network_bytes']:,.0f} bytes" if entry["network_bytes"] else "nothing"
        rows.append(
            f"| {name} | {entry['p50_us'] / 1000:.2f} ms | {entry['p99_us'] / 1000:.2f} ms "
            f"| {entry['items_scored']:,.0f} | {entry['touched_share']:.1%} | {sent} |"
        )
    rows += [
        "",
        f"| {measured['queries']:,} queries at once | queries/s | items scored |",
        "|---|---:|---:|",
    ]
    rows += [
        *(
            f"| {name} | {entry['queries_per_second']:,.0f} | {entry['items_scored']:,.0f} |"
            for name, entry in measured["batches"].items()
        ),
    ]
    return "\n".join(rows) + "\n" + _where(measured)


def batch() -> str:
    """Return how fast batches were measured to be, as Markdown."""
    measured = _measured("batch")
    rows = [
        "| workers | users/s | ÷ one worker | ids | encoding | search | reading and writing |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    speeds: dict[int, float] = {}
    for workers in sorted({entry["workers"] for entry in measured["rounds"]}):
        own = [entry for entry in measured["rounds"] if entry["workers"] == workers]
        speeds[workers] = float(np.median([entry["users_per_second"] for entry in own]))
        spent = {stage: sum(entry["seconds"][stage] for entry in own) for stage in _STAGES}
        shares = " | ".join(f"{spent[stage] / sum(spent.values()):.0%}" for stage in _STAGES)
        rows.append(
            f"| {workers} | {speeds[workers]:,.0f} | {speeds[workers] / speeds[1]:.2f} | {shares} |"
        )
    rows += ["", f"{measured['users']:,} test users of gitlog with gSASRecJPQ; medians."]
    return "\n".join(rows) + "\n" + _where(measured)


def _measured(name: str) -> Json:
    found: Json = json.loads((FOLDER / "measured" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _where(measured: Json) -> str:
    here = measured["machine"]
    return f"\n*{here['cpu']}, {here['cores']} cores, commit {here['commit']}.*\n"


def with_tables(text: str) -> str:
    """Return a document with the tables between their marks."""
    for name, make in (("batch", batch), ("shards", shards), ("plan", plan)):
        mark = f"<!-- {name}: begin -->\n"
        begin, end = text.index(mark) + len(mark), text.index(f"<!-- {name}: end -->\n")
        text = text[:begin] + make() + text[end:]
    return text


def main() -> None:
    """Put the tables into their document."""
    path = FOLDER / "scale-out.md"
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
