"""Write the table of docs/models.md that compares exact decoding with a beam over a graph.

    python -m benchmarks.decoding_table

Figures come from `docs/measured/decoding-*.json` (benchmarks/decoding.py); nothing is typed in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from recprune.types import Json

FOLDER = Path(__file__).parents[1] / "docs"
_BEGIN = "<!-- decoding -->\n"
_END = "<!-- end -->"
_DECODINGS = ("", "beam", "neighbours", "items scored", "looked at", "median", "× exact", "found")
_GRAPHS = ("items", "neighbours", "graph made in", "threads", "graph", "codes", "measured on")


def with_table(text: str, records: Sequence[Json]) -> str:
    """Return the document with the table of these records in its place."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"the document has no place for {_BEGIN.strip()}")
    return before + begin + "\n".join(table(records)) + "\n" + end + after


def records() -> list[Json]:
    """Return what was measured, the smallest catalogue first."""
    paths = (FOLDER / "measured").glob("decoding-*.json")
    found: list[Json] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return sorted(found, key=lambda record: int(record["index"]["items"]))


def table(records: Sequence[Json], *, every: bool = False) -> list[str]:
    """Return the lines: exact searches, beams that no other one dominates, and their graphs."""
    lines = _header(_DECODINGS)
    for record in records:
        exact, *beams = record["decodings"].values()
        shown = beams if every else _pareto_front(beams)
        lines += [_decoding(_title(record), exact), *(_decoding("", entry) for entry in shown)]
    return [*lines, "", *_header(_GRAPHS), *(_graph(record) for record in records)]


def _pareto_front(beams: Sequence[Json]) -> Iterator[Json]:
    """Give, from the fastest on, the beams that find more than every faster one, as shown."""
    most = 0.0
    for entry in sorted(beams, key=lambda entry: float(entry["ratio"])):
        found = round(entry["recall"], 3)
        if found > most:
            most = found
            yield entry


def _title(record: Json) -> str:
    index = record["index"]
    sizes = f"{index['items']:,} items, M = {index['splits']}"
    return f"{record['title']}, {sizes}" if record["title"] else sizes


def _decoding(title: str, entry: Json) -> str:
    return _row(
        title,
        f"{entry['beam']}" if "beam" in entry else "exact",
        f"{entry['neighbours']}" if "neighbours" in entry else "",
        f"{entry['items_scored']:,.0f}",
        "" if "beam" in entry else f"{entry['items_touched']:,.0f}",  # a walk has no filter
        f"{entry['p50_us']:,.0f} µs",
        f"{entry['ratio']:.1f}",
        f"{100 * entry['recall']:.1f} %",
    )


def _graph(record: Json) -> str:
    graph, index = record["graph"], record["index"]
    return _row(
        f"{index['items']:,}",
        f"{graph['neighbours']}",
        "" if graph["seconds"] is None else f"{graph['seconds']:,.0f} s",
        "" if graph["seconds"] is None else f"{graph['threads']}",
        f"{graph['megabytes']:,.0f} MB",
        f"{record['codes_megabytes']:,.1f} MB",
        f"{record['machine']['cpu']}, {index['instruction_set']}",
    )


def _header(names: Sequence[str]) -> list[str]:
    return [_row(*names), f"|{'---|' * len(names)}"]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    document = FOLDER / "models.md"
    text = document.read_text(encoding="utf-8")
    document.write_text(with_table(text, records()), encoding="utf-8")
