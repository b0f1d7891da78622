"""Running experiments part by part, and making the report from what they recorded."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recprune.experiments.experiment import Experiment, Part, Plan, in_paper_order
from recprune.experiments.record import Record, load_record, records_of, save_record
from recprune.experiments.registry import EXPERIMENTS
from recprune.experiments.report import Section, Table, write_html, write_markdown
from recprune.machine import machine
from recprune.types import InputError, Progress, StorageError

TITLE = "Results: the paper reproduced, and what came after"


_LOAD = (
    "Load: processes that wanted to run, on average, at the end of a part; one is the measurement."
)


@dataclass(frozen=True)
class Outcome:
    """How much was done."""

    run: int
    kept: int  # were there already


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of these names, in the order of the report; all, if there are none."""
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise InputError(
                f"there is no experiment {name!r}{meant}: there are {', '.join(known)}"
            )
    return [entry for entry in EXPERIMENTS if not names or entry.name in names]


def run_experiments(
    experiments: Sequence[Experiment], plan: Plan, records: Path, progress: Progress
) -> Outcome:
    """Run every part that has no record yet; those recorded with the same settings are kept."""
    work = [(experiment, part) for experiment in experiments for part in experiment.parts(plan)]
    left = [entry for entry in work if not _is_recorded(records, *entry)]
    measured_on = machine()  # the sources that were loaded: those on disk may change meanwhile
    begun = time.monotonic()
    minutes_done, minutes_left = 0.0, sum(part.minutes for _, part in left)
    for number, (experiment, part) in enumerate(left, 1):
        where = f"{experiment.name} {part.name} ({number} of {len(left)}"
        # Before anything is done, by what it took on a machine with two cores.
        each = (time.monotonic() - begun) / minutes_done if minutes_done else 60.0
        where += f", about {each * minutes_left / 60:.0f} min to go"
        figures = part.run(partial(_show, progress, where))
        # What else runs on a machine shows in every time.
        here = measured_on | {"load": round(os.getloadavg()[0], 1)}
        save_record(records, Record(experiment.name, part.name, part.settings, here, figures))
        minutes_done += part.minutes
        minutes_left -= part.minutes
    return Outcome(len(left), len(work) - len(left))


def write_report(records: Sequence[Record], markdown: Path, html: Path, pictures: Path) -> None:
    """Make the report, as Markdown with pictures and as one HTML file, from the records alone."""
    if not records:
        raise InputError("there are no records to report")
    known = {experiment.name for experiment in EXPERIMENTS}
    for record in records:
        if record.experiment not in known:
            raise StorageError(f"{record.file_name}: a record of an experiment that is not known")
    ordered = in_paper_order(records)
    sections = [
        _section(experiment, own)
        for experiment in EXPERIMENTS
        if (own := records_of(ordered, experiment.name))
    ]
    sections.append(_machines(records))
    write_markdown(TITLE, sections, markdown, pictures)
    write_html(TITLE, sections, html)


def _section(experiment: Experiment, records: Sequence[Record]) -> Section:
    try:
        return experiment.section(records)
    except (KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"the records of {experiment.name} are not as this version writes them "
            f"({type(error).__name__}: {error}): remove them, and they are measured again"
        ) from None


def _machines(records: Sequence[Record]) -> Section:
    """Say what was measured where, and with which versions."""
    found: dict[tuple[tuple[str, str], ...], set[str]] = {}
    loads: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for record in records:
        named = tuple(
            (name, f"{value}") for name, value in record.machine.items() if value and name != "load"
        )
        found.setdefault(named, set()).add(record.experiment)
        loads.setdefault(named, []).append(record.machine.get("load", 0.0))
    order = [experiment.name for experiment in EXPERIMENTS]
    rows = [
        (
            ", ".join(sorted(experiments, key=order.index)),
            ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in named),
            f"{min(loads[named]):.1f} to {max(loads[named]):.1f}" if any(loads[named]) else "",
        )
        for named, experiments in found.items()
    ]
    return Section(
        "What was measured where",
        "machines",
        (Table(("what", "where", "load"), tuple(rows), _LOAD),),
    )


def _show(progress: Progress, where: str, step: str) -> None:
    progress(f"{where}): {step}")


def _is_recorded(records: Path, experiment: Experiment, part: Part) -> bool:
    path = records / f"{experiment.name}.{part.name}.json"
    return path.exists() and load_record(path).settings == part.settings
