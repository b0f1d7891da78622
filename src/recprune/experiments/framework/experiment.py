"""What an experiment is: parts that are run one by one, and a section made from their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from recprune.data.formats import LogFormat
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.workload import GIVEN, Workload
from recprune.experiments.report.document import Block, Section, Text
from recprune.types import Json, Progress

# What an experiment works on: prepared logs, the paper's three models, SASRec with a full table,
# test users encoded by the three, models trained to be pruned, and models that differ in their
# codes. Only what is needed is made.
Need: TypeAlias = Literal["log", "models", "full", "workloads", "variants", "codes"]

MODEL_NAMES = {
    "sasrecjpq": "SASRecJPQ",
    "gsasrecjpq": "gSASRecJPQ",
    "gbert4recjpq": "gBERT4RecJPQ",
    "sasrec": "SASRec",
    GIVEN: "given model",
}


@dataclass(frozen=True)
class LogFolder:
    """A log with everything that was made from it."""

    name: str  # gitlog
    source: Path | None  # the log itself, where it is at hand
    log_format: LogFormat  # of the source
    prepared: Path
    models: dict[str, Path]  # the paper's models, by the names above
    variants: dict[str, Path]  # models trained in some other way, to be compared with gsasrecjpq
    codes: dict[str, Path] = field(default_factory=dict)  # models that differ in their codes


@dataclass(frozen=True)
class Setup:
    """What all experiments are run on, and how thoroughly."""

    logs: tuple[LogFolder, ...]
    workloads: tuple[Workload, ...]  # of the models
    variants: tuple[Workload, ...]
    quick: bool
    memory_bytes: int
    seed: int = 0
    codes: tuple[Workload, ...] = ()  # of models that differ in their codes

    def sized(self, full: int, quick: int) -> int:
        """Return a count: `quick` in a quick run, else `full`."""
        return quick if self.quick else full


@dataclass(frozen=True)
class ExperimentPart:
    """A piece of an experiment that is run whole or not at all, and becomes one record."""

    name: str
    settings: Json  # all that its figures depend on, but for the machine
    run: Callable[[Progress], Json]
    minutes: float = 1.0  # about how long it takes in full, for the estimate of what is left


class Experiment(Protocol):
    """One table or figure."""

    @property
    def name(self) -> str:
        """What it is called on the command line: `rq1`."""

    @property
    def title(self) -> str:
        """What it is called in the report."""

    @property
    def needs(self) -> frozenset[Need]:
        """What has to be made before it can run; nothing: it draws random numbers."""

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """Return the work to do."""

    def section(self, records: Sequence[Record]) -> Section:
        """Make its section of the report, from its own records alone; there is at least one."""


def section_of(experiment: Experiment, opening: str, *blocks: Iterable[Block]) -> Section:
    """Return the section of an experiment: an opening paragraph, then all blocks."""
    every = (Text(opening), *chain.from_iterable(blocks))
    return Section(experiment.title, experiment.name, every)


def in_paper_order(records: Sequence[Record]) -> list[Record]:
    """Return records with the models in the order of the paper's tables."""
    order = list(MODEL_NAMES)

    def place(record: Record) -> int:
        model = record.figures.get("model")
        return order.index(model) if model in order else len(order)

    return sorted(records, key=place)


def where_measured(record: Record) -> str:
    """Say of which model, over how many items and on what machine searches were measured."""
    figures = record.figures
    return (
        f"**{figures['log']}, {model_name(figures['model'])}**: {figures['items']:,} items; "
        f"{record.machine['cpu']}, {figures['instruction_set']}."
    )


def model_name(model: str) -> str:
    return MODEL_NAMES.get(model, model)
