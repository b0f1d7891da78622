"""Running experiments part by part, and making the report from what they recorded."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from recprune.experiments.framework.experiment import (
    Experiment,
    ExperimentPart,
    Setup,
    in_paper_order,
)
from recprune.experiments.framework.machine import machine
from recprune.experiments.framework.record import Record, load_record, records_of, save_record
from recprune.experiments.registry import EXPERIMENTS
from recprune.experiments.report.document import Section, Table, Text, write_html, write_markdown
from recprune.experiments.report.introduction import introduction
from recprune.storage import writing_file
from recprune.types import InputError, Progress, StorageError, no_progress

_PARTS = "parts.txt"  # lies among the records, and names all that there should be
TITLE = "Results: the paper reproduced, and what came after"
_LOAD = (
    "Load: processes that wanted to run, on average, at the end of a part; one is the measurement."
)


@dataclass(frozen=True)
class Outcome:
    """How much was done."""

    run: int
    kept: int  # were there already
    of_others: int  # of these, by other sources than those that run now


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of these names, in the order of the report; all, if there are none."""
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    names = [name.lower() for name in names]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise InputError(
                f"there is no experiment {name!r}{meant}: there are {', '.join(known)}"
            )
    return [entry for entry in EXPERIMENTS if not names or entry.name in names]


def run_experiments(
    experiments: Sequence[Experiment],
    setup: Setup,
    records: Path,
    progress: Progress,
    announce: Progress = no_progress,
) -> Outcome:
    """Run every part that has no record yet; those recorded with the same settings are kept.

    `progress` is called with every step, `announce` with every part that is done.
    """
    work = [(experiment, part) for experiment in experiments for part in experiment.parts(setup)]
    _note_parts(records, experiments, [_file_name(*entry) for entry in work])
    kept = [record for entry in work if (record := _recorded(records, *entry)) is not None]
    done = {record.file_name for record in kept}
    left = [entry for entry in work if _file_name(*entry) not in done]
    measured_on = machine()  # the sources that were loaded: those on disk may change meanwhile
    begun = time.monotonic()
    minutes_done, minutes_left = 0.0, sum(part.minutes for _, part in left)
    for number, (experiment, part) in enumerate(left, 1):
        where = f"{experiment.name} {part.name} ({number} of {len(left)}"
        # Before anything is done, by what it took on a machine with two cores.
        each = (time.monotonic() - begun) / minutes_done if minutes_done else 60.0
        where += f", about {each * minutes_left / 60:.0f} min to go"
        started = time.monotonic()
        figures = part.run(partial(_show, progress, where))
        # What else runs on a machine shows in every time.
        here = measured_on | {"load": round(os.getloadavg()[0], 1)}
        save_record(records, Record(experiment.name, part.name, part.settings, here, figures))
        minutes_done += part.minutes
        minutes_left -= part.minutes
        to_go = max(0.0, (time.monotonic() - begun) / minutes_done * minutes_left / 60)
        announce(
            f"{experiment.name} {part.name}: {time.monotonic() - started:.0f} s, "
            f"{number} of {len(left)}, about {to_go:.0f} min to go"
        )
    others = [record for record in kept if record.machine.get("commit") != measured_on["commit"]]
    return Outcome(len(left), len(kept), len(others))


def missing_records(records: Path) -> list[str]:
    """Return the files that a run meant to write and has not: it was interrupted."""
    planned = records / _PARTS
    names = planned.read_text(encoding="utf-8").splitlines() if planned.exists() else []
    return [name for name in names if not (records / name).exists()]


def _note_parts(records: Path, experiments: Sequence[Experiment], names: Sequence[str]) -> None:
    """Note what these experiments will write, beside what others were to write."""
    path, own = records / _PARTS, {experiment.name for experiment in experiments}
    before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # Parts of the same experiment that were measured with another instruction set are kept.
    others = [
        name
        for name in before
        if name.partition(".")[0] not in own or (name not in names and (records / name).exists())
    ]
    records.mkdir(parents=True, exist_ok=True)
    with writing_file(path) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in (*others, *names)), encoding="utf-8")


def write_report(
    records: Sequence[Record], markdown: Path, html: Path, pictures: Path, *, quick: bool = False
) -> None:
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
    sections.insert(
        0, introduction(ordered, quick=quick)
    )  # made last: by now all records are known to be whole
    sections.append(_machines(records))
    write_markdown(TITLE, sections, markdown, pictures)
    write_html(TITLE, sections, html)


def _section(experiment: Experiment, records: Sequence[Record]) -> Section:
    try:
        section = experiment.section(records)
    except (KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"the records of {experiment.name} are not as this version writes them "
            f"({type(error).__name__}: {error}): remove them, and they are measured again"
        ) from None
    notes = [note for note in (_several_machines(records), _sources(records)) if note]
    return replace(section, blocks=(*section.blocks, *map(Text, notes)))


def _sources(records: Sequence[Record]) -> str:
    """Say with which sources a section was measured."""
    found: dict[str, list[str]] = {}
    for record in records:
        found.setdefault(str(record.machine.get("commit")), []).append(record.part)
    if len(found) == 1:
        return f"Measured with the sources of {next(iter(found))}."
    each = (f"{commit}: {', '.join(parts)}" for commit, parts in found.items())
    return f"Measured with the sources of {'; '.join(each)}."


def _several_machines(records: Sequence[Record]) -> str:
    """Say which parts were measured on which machine, if these are several."""
    found: dict[str, list[str]] = {}
    for record in records:
        here = record.machine
        name = f"{here.get('cpu')} ({here.get('cores')} cores, {here.get('memory_gigabytes')} GB)"
        found.setdefault(name, []).append(record.part)
    if len(found) < 2:
        return ""
    each = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in found.items())
    return f"**Measured on more than one machine**: times compare within one only. {each}."


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


def _recorded(records: Path, experiment: Experiment, part: ExperimentPart) -> Record | None:
    """Return the record of a part, if there is one with the same settings."""
    path = records / _file_name(experiment, part)
    if not path.exists():
        return None
    record = load_record(path)
    return record if record.settings == part.settings else None


def _file_name(experiment: Experiment, part: ExperimentPart) -> str:
    return f"{experiment.name}.{part.name}.json"
