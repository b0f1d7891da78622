"""Experiments in small: run, read back, and what their sections say."""

from __future__ import annotations

from pathlib import Path

from recprune.experiments.framework.experiment import Experiment, Setup
from recprune.experiments.framework.record import Record, load_record, save_record
from recprune.experiments.report.document import Section, Text
from recprune.types import no_progress

MACHINE = {"cpu": "a CPU", "cores": 2, "memory_gigabytes": 8.0}


def recorded(experiment: Experiment, setup: Setup, folder: Path) -> list[Record]:
    """Run all parts and read their figures back from disk."""
    for part in experiment.parts(setup):
        figures = part.run(no_progress)
        save_record(folder, Record(experiment.name, part.name, part.settings, MACHINE, figures))
    return [load_record(path) for path in sorted(folder.glob(f"{experiment.name}.*.json"))]


def words_of(section: Section) -> str:
    return "\n".join(block.markdown for block in section.blocks if isinstance(block, Text))
