"""The table of docs/catalogue.md that says what a soak came to.

python -m benchmarks.soak.table
"""

from __future__ import annotations

import json
from pathlib import Path

from recprune.types import Json

FOLDER = Path(__file__).parents[2] / "docs"
_BEGIN, _END = "<!-- soak -->\n", "<!-- /soak -->"


def rows(record: Json) -> list[tuple[str, str]]:
    counts, back = record["counts"], record["read_back"]
    return [
        ("minutes", f"{record['seconds'] / 60:.0f}"),
        (
            "items put, amended, removed",
            f"{counts['put']:,}, {counts.get('amended', 0):,}, {counts['removed']:,}",
        ),
        ("events", f"{counts['events']:,}"),
        (
            "workers killed, whole service killed",
            f"{counts['workers killed']:,}, {counts['service killed']:,}",
        ),
        ("compactions (every other one is killed)", f"{counts['compactions']:,}"),
        ("folders loaded anew", f"{counts['reloads']:,}"),
        (
            "refreshes (half are killed once), models put in place",
            f"{counts.get('refreshes', 0):,}, {counts.get('put in place', 0):,}",
        ),
        ("answers compared, ids and score bits", f"{counts['compared']:,}"),
        ("**wrong answers**", f"{len(record['wrong'])}"),
        ("**requests that failed**", f"{len(record['failed'])}"),
        (
            "cut by a kill, or turned away, and asked again",
            f"{counts.get('cut', 0) + counts.get('turned away', 0):,}",
        ),
        (
            "the latest that a change was seen after its acknowledgement",
            f"{1000 * record['late_s']:.0f} ms",
        ),
        ("items in the end, numbers given out", f"{back['items']:,}, {back['numbers']:,}"),
        (
            "rankings of all items in the end that are equal",
            f"{back['equal']} of {back['rankings']}",
        ),
    ]


def with_table(text: str, record: Json) -> str:
    """Return the document with the table of a record in its place."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"the document has no place for {_BEGIN.strip()}")
    lines = ["| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in rows(record))]
    return before + begin + "\n".join(lines) + "\n" + end + after


def recorded() -> Json:
    """Return what was measured."""
    record: Json = json.loads((FOLDER / "measured" / "soak.json").read_text(encoding="utf-8"))
    return record


def main() -> None:
    path = FOLDER / "catalogue.md"
    text = with_table(path.read_text(encoding="utf-8"), recorded())
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
