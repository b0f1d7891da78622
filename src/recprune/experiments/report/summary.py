"""The results in short, for the README: made from the records, like the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from recprune.experiments.framework.experiment import in_paper_order, model_name
from recprune.experiments.framework.record import Record, records_of
from recprune.experiments.ours.peer_section import verdict
from recprune.experiments.report.headline import fastest_measured, headline
from recprune.storage import writing_file
from recprune.types import InputError

# The two places of the README, in their order.
_HEADLINE, _RESULTS = "headline", "results"
# As columns: the paper's, then ours. Not `cells`, which `auto` takes where they pay.
_METHODS = ("default", "pqtopk", "recjpqprune", "scan", "auto")


def summary(records: Sequence[Record]) -> str:
    """Return as Markdown: times of methods and models, beside others, and for more items."""
    rows = _times(in_paper_order(records_of(records, "rq1")))
    record = fastest_measured(records)
    if record is not None:
        figures = record.figures
        rows += ["", f"Beside others, on {figures['log']}: {verdict(figures['peers'])}"]
    scaling = sorted(records_of(records, "scaling"), key=lambda record: record.figures["items"])
    if scaling:
        each = (
            f"{record.figures['methods']['auto']['p50_us'] / 1000:,.2f} ms for "
            f"{record.figures['items']:,}"
            for record in scaling
        )
        last = scaling[-1].hardware
        elsewhere = f" (the last on a machine of {last})" if last != scaling[0].hardware else ""
        rows += [
            "",
            f"`auto` over random codes, by the number of items: {', '.join(each)}{elsewhere}.",
        ]
    return "\n".join(rows) + "\n"


def _times(measured: Sequence[Record]) -> list[str]:
    """Return a table for each machine and version, as times compare within one; fastest first."""
    if not measured:
        raise InputError("there is no record of rq1 to sum up")
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(measured, key=lambda record: str(record.figures["log"])):
        machine = (
            f"{record.machine['cpu']}, {record.machine['cores']} cores, "
            f"{record.figures['instruction_set']}"
        )
        groups.setdefault((machine, str(record.machine["commit"])), []).append(record)
    rows: list[str] = []
    for (machine, commit), own in sorted(groups.items(), key=lambda group: _fastest(group[1])):
        rows += [
            "| median ms, K = 10, one thread | items | " + " | ".join(_METHODS) + " |",
            "|---|---:|" + "---:|" * len(_METHODS),
            *map(_row, own),
            "",
            f"Measured on: {machine}; sources of {commit}.",
            "",
        ]
    return rows[:-1]


def _fastest(records: Sequence[Record]) -> float:
    return min(float(record.figures["methods"]["auto"]["p50_us"]) for record in records)


def _row(record: Record) -> str:
    figures = record.figures
    times = [figures["methods"].get(method) for method in _METHODS]
    cells = ["" if entry is None else f"{entry['p50_us'] / 1000:,.3f}" for entry in times]
    name = f"{figures['log']}, {model_name(figures['model'])}"
    return f"| {name} | {figures['items']:,} | " + " | ".join(cells) + " |"


def check_place(path: Path) -> None:
    """Refuse a Markdown file that cannot be read, or has no place for figures and table."""
    _replaced(_read(path), path, {_HEADLINE: "", _RESULTS: ""})


def put_summary(path: Path, records: Sequence[Record]) -> None:
    """Write the figures that matter most, and the table, between their marks of a Markdown file."""
    made = {_HEADLINE: headline(records), _RESULTS: summary(records)}
    text = _replaced(_read(path), path, made)
    with writing_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _replaced(text: str, path: Path, made: Mapping[str, str]) -> str:
    """Return a text with each block between the marks of its name."""
    for name, block in made.items():
        first, last = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        begin, end = text.find(first), text.find(last)
        if begin < 0 or end < begin:
            raise InputError(
                f"{path}: has no place for the {name}, {first.strip()} … {last.strip()}"
            )
        text = text[: begin + len(first)] + block + text[end:]
    return text
