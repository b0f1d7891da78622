"""The table and the pictures of docs/reliability.md, from the records of sieges.

    python -m benchmarks.siege.table

Records are docs/measured/siege-sqlite.json and siege-redis.json; nothing is typed in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recprune.commands.console import print_table
from recprune.experiments.report.chart_style import COLOURS, MUTED, STYLE, WIDTH, set_scales, svg_of
from recprune.types import Json

FOLDER = Path(__file__).parents[2] / "docs"
STORES = {"sqlite": "SQLite", "redis": "Redis"}
_BEGIN, _END = "<!-- siege -->\n", "<!-- /siege -->\n"
# What a request of the load may end in, once it has been asked again where it was cut.
_TURNED_AWAY, _NO_STORE, _CUT_AGAIN = "turned-away", "no-store", "cut-again"
# Of requests that were cut, those that may meet a second kill when they are asked again: there is a
# kill every four seconds, and an answer takes some hundredths of one.
_TWICE = 0.005


# Figures -----------------------------------------------------------------------------------------


def requests(record: Json) -> int:
    """Requests of the load and of the witness; one that is asked again is the same one."""
    outcomes = record["load"]["outcomes"]
    of_load = sum(count for name, count in outcomes.items() if name != "cut")
    return int(of_load + record["witness"].get("requests", 0))


def turned_away(record: Json) -> int:
    outcomes, witness = record["load"]["outcomes"], record["witness"]
    return int(outcomes.get(_TURNED_AWAY, 0) + witness.get("turned away", 0))


def without_store(record: Json) -> int:
    outcomes, witness = record["load"]["outcomes"], record["witness"]
    return int(outcomes.get(_NO_STORE, 0) + witness.get("no store", 0))


def admitted(record: Json) -> int:
    """Requests that were let in, and did not need a store that was away."""
    return requests(record) - turned_away(record) - without_store(record)


def cut(record: Json) -> int:
    """Requests under way in a worker that was killed, before their answer had begun."""
    return int(record["load"]["outcomes"].get("cut", 0) + record["witness"].get("cut", 0))


def failed(record: Json) -> int:
    """Admitted requests without a proper answer, those that were cut after asking once more."""
    outcomes = record["load"]["outcomes"]
    improper = sum(
        count
        for name, count in outcomes.items()
        if name.startswith("status-") or name in (_CUT_AGAIN, "no-retry-after")
    )
    return int(improper + record["witness"]["failed"])


def cut_again(record: Json) -> int:
    """Of those, the ones that were cut by a second kill when they were asked again."""
    unanswered = [said for said in record["witness"]["said"] if said.endswith(": unanswered")]
    return int(record["load"]["outcomes"].get(_CUT_AGAIN, 0)) + len(unanswered)


def wrong(record: Json) -> int:
    return int(record["load"]["outcomes"].get("wrong", 0) + record["witness"]["wrong"])


def faults_of(record: Json) -> list[str]:
    """Say what happened that must not."""
    hardships, service = record["hardships"], record["service"]
    statuses = {
        status: count
        for status, count in service["statuses"].items()
        if status.startswith("5") and status != "503"
    }
    twice = cut_again(record)
    must_be_none = {
        "failed among the admitted, not by two kills": failed(record) - cut_again(record),
        "cut twice, more often than kills explain": twice if twice > _TWICE * cut(record) else 0,
        "wrong answers": wrong(record),
        "acknowledged events lost": record["events"]["lost"],
        "acknowledged events not in their place": record["events"]["misplaced"],
        "answers that the store is away while it was there": record["no_store_at_other_times"],
        "slow clients that were not got rid of": sum(hardships["slow_clients_held"].values()),
        "broken clients answered with 5xx": len(hardships["broken_clients_faults"]),
        "5xx that the service counts itself": sum(statuses.values()),
        "errors in the log that were not expected": len(service["errors"]),
        "swaps that did not happen": record["plan"]["swaps"] - hardships["swaps"],
    }
    return [f"{what}: {count}" for what, count in must_be_none.items() if count]


# The table ---------------------------------------------------------------------------------------


def rows(record: Json) -> list[tuple[str, str]]:
    """Return what is said of a siege, a name and a figure each."""
    hardships, memory, events = record["hardships"], record["memory"], record["events"]
    strikes = hardships["strikes"]
    away = strikes.get("Redis away", 0) + strikes.get("SQLite locked", 0)
    kills = strikes.get("killing", 0)
    clients = sum(hardships["slow_clients_ended"].values())
    broken = sum(hardships["broken_clients"].values())
    acknowledged = events["acknowledged_to_witness"] + events["acknowledged_to_load"]
    return [
        ("minutes under siege", f"{record['plan']['minutes']:g}"),
        ("capacity, alone", f"{record['capacity_per_second']:,.0f}/s"),
        ("twice that, on the load's schedule", f"{record['offered_per_second']:,.0f}/s"),
        ("sent in fact, as connections wait for slow answers", f"{_sent(record):,.0f}/s"),
        ("**requests**", f"{requests(record):,}"),
        ("turned away at once (503 with `Retry-After`)", f"{turned_away(record):,}"),
        ("told that the store is away (503), while it was", f"{without_store(record):,}"),
        ("the same, while it was there", f"{record['no_store_at_other_times']:,}"),
        ("**admitted**", f"{admitted(record):,}"),
        ("cut by kill -9 before the answer began, and asked again", f"{cut(record):,}"),
        ("**failed among the admitted**, after asking again once", f"{failed(record):,}"),
        ("of these, cut a second time", f"{cut_again(record):,}"),
        ("**wrong answers**, of all that were compared", f"{wrong(record):,}"),
        ("events acknowledged", f"{acknowledged:,}"),
        ("**acknowledged events lost**", f"{events['lost']:,}"),
        ("acknowledged events out of order", f"{events['misplaced']:,}"),
        ("p99 at half load, before", f"{record['half']['p99_ms']:,.0f} ms"),
        ("p99 **in the siege**, of the admitted", f"{record['siege_p99_ms']:,.0f} ms"),
        ("p99 at half load, afterwards", f"{record['after']['p99_ms']:,.0f} ms"),
        ("p99 of being turned away", f"{record['turned_away_p99_ms']:,.0f} ms"),
        ("**memory** of all processes at the start", f"{memory['start_mb']:,.0f} MB"),
        ("at the end", f"{memory['end_mb']:,.0f} MB"),
        ("of the worker that was spared, first quarter", f"{memory['spared_start_mb']:,.1f} MB"),
        ("of the same, last quarter", f"{memory['spared_end_mb']:,.1f} MB"),
        ("its growth in ten minutes", f"{memory['spared_mb_per_10_min']:+,.1f} MB"),
        ("workers killed with -9", f"{kills:,}"),
        ("folders swapped", f"{hardships['swaps']:,}"),
        ("times that the disk was full", f"{strikes.get('full disk', 0):,}"),
        ("times that the store was away", f"{away:,}"),
        ("jumps of the clock", f"{strikes.get('clock jumps', 0):,}"),
        ("slow clients, all of them sent away", f"{clients:,}"),
        ("broken clients", f"{broken:,}"),
        ("seconds until it was ready again", f"{record['recovery_s']:g}"),
    ]


def _sent(record: Json) -> float:
    """Return the rate at which the load came to ask, over the whole siege."""
    seconds = 60.0 * float(record["plan"]["minutes"])
    return float(sum(record["load"]["outcomes"].values())) / seconds


def table(records: dict[str, Json]) -> list[str]:
    """Return the lines of the table, a column for each store."""
    columns = [rows(record) for record in records.values()]
    lines = [
        "| | " + " | ".join(STORES[store] for store in records) + " |",
        "|---|" + "---:|" * len(records),
    ]
    lines += [
        f"| {entries[0][0]} | " + " | ".join(value for _, value in entries) + " |"
        for entries in zip(*columns, strict=True)
    ]
    machines = {
        f"{record['machine']['cpu']}, {record['machine']['cores']} cores"
        for record in records.values()
    }
    lines += ["", f"Measured on {' and '.join(sorted(machines))}, load and witness included."]
    return lines


def with_table(text: str, records: dict[str, Json]) -> str:
    """Return the document with the table of these records in its place."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"the document has no place for {_BEGIN.strip()}")
    return before + begin + "\n".join(table(records)) + "\n" + end + after


def records() -> dict[str, Json]:
    """Return what was measured, by store."""
    paths = {store: FOLDER / "measured" / f"siege-{store}.json" for store in STORES}
    return {store: json.loads(path.read_text(encoding="utf-8")) for store, path in paths.items()}


def show(record: Json) -> None:
    """Print the table of one siege."""
    store = STORES[record["plan"]["histories"]]
    shown = [(name.replace("**", "").replace("`", ""), value) for name, value in rows(record)]
    print_table("siege", ("", store), shown)


# The pictures ------------------------------------------------------------------------------------


def picture(record: Json) -> str:
    """Draw the course of a siege: times, memory, and what was done, over the same minutes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
        times, memory, done = figure.subplots(3, 1, sharex=True, height_ratios=(2, 2, 1.6))
        load = record["course"]["load"]
        minutes = [entry["second"] / 60 for entry in load]
        times.plot(minutes, [entry["p99_ms"] for entry in load], color=COLOURS[0])
        times.axhline(record["half"]["p99_ms"], color=MUTED, linestyle="--", linewidth=1)
        times.set(title="p99 of the admitted, ms (dashed: at half load, before)")
        set_scales(times, log_x=False, log_y=True)
        taken = record["course"]["memory"]
        memory.plot(
            [entry["second"] / 60 for entry in taken],
            [entry["mb"] for entry in taken],
            color=COLOURS[0],
        )
        spared = [entry for entry in taken if entry["spared_mb"]]
        memory.plot(
            [entry["second"] / 60 for entry in spared],
            [entry["spared_mb"] for entry in spared],
            color=COLOURS[1],
        )
        memory.set(title="memory, MB: all processes, and the worker that was spared")
        memory.set_ylim(bottom=0)
        _draw_diary(done, record["diary"])
        done.set(xlabel="minutes", title="what was done")
        return svg_of(figure)


def _draw_diary(axes: Axes, diary: Sequence[Json]) -> None:
    """Draw a line for each hardship, and a mark wherever it struck."""
    names = list(dict.fromkeys(entry["hardship"] for entry in diary))
    for row, name in enumerate(names):
        strikes = [entry for entry in diary if entry["hardship"] == name]
        # A stroke that is too short to be seen is drawn as long as a tenth of a second.
        spans = [
            (entry["begun"] / 60, max(entry["ended"] - entry["begun"], 0.1) / 60)
            for entry in strikes
        ]
        colour = COLOURS[row % len(COLOURS)]
        axes.broken_barh(spans, (row - 0.35, 0.7), facecolors=colour, edgecolor=colour)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(False, axis="y")


def main() -> None:
    document = FOLDER / "reliability.md"
    found = records()
    document.write_text(with_table(document.read_text(encoding="utf-8"), found), encoding="utf-8")
    for store, record in found.items():
        place = FOLDER / "pictures" / f"siege-{store}.svg"
        place.write_text(picture(record), encoding="utf-8")


if __name__ == "__main__":
    main()
