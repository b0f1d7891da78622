"""The paper's table of data sets, for the logs at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from recprune.data.interactions import DEFAULT_MIN_INTERACTIONS, Interactions, read_interactions
from recprune.data.statistics import log_statistics
from recprune.experiments.framework.experiment import ExperimentPart, LogFolder, Need, Setup
from recprune.experiments.framework.record import Record
from recprune.experiments.report.document import Block, Section, Table, Text
from recprune.preparation.prepared import Prepared
from recprune.storage import manifest_file_checksum
from recprune.types import Json, Progress

# Users, items, interactions and average length as the paper prints them.
_PUBLISHED = {
    "Gowalla": ("86,168", "1,271,638", "6,397,903", "74.24"),
    "Tmall": ("473,376", "2,194,464", "34,850,828", "73.62"),
}
# Not known of a prepared log, which has neither times nor what was left out.
_OF_THE_LOG_ONLY = (
    "first_time",
    "last_time",
    "left_out_users",
    "left_out_interactions",
    "bad_rows",
)
_HEADER = (
    "log",
    "users",
    "items",
    "interactions",
    "average length",
    "median",
    "p99",
    "longest",
    "repeats",
    "on the top 1 % of items",
    "items seen once",
    "from",
    "to",
)


class DatasetTable:
    """How large each log is and how its items are spread, beside the paper's two."""

    name = "datasets"
    title = "Data sets"
    needs: frozenset[Need] = frozenset({"log"})

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each log."""
        return [self._part(log) for log in setup.logs]

    def _part(self, log: LogFolder) -> ExperimentPart:
        checksum = manifest_file_checksum(log.prepared)  # covers those of all arrays
        settings: Json = {"prepared": checksum[:16], "source": None}
        if log.source is not None:
            settings["source"] = {"name": log.source.name, "bytes": _size(log.source)}
        return ExperimentPart(
            log.name, settings, lambda progress: measure_log(log, progress), minutes=0.3
        )

    def section(self, records: Sequence[Record]) -> Section:
        """One table, and how the logs were held out."""
        rows = [_row(record.figures) for record in records]
        published = [
            (f"{name} (published)", *figures, *[""] * (len(_HEADER) - 5))
            for name, figures in _PUBLISHED.items()
        ]
        blocks: list[Block] = [
            Table(
                _HEADER,
                (*rows, *published),
                " ".join(
                    (
                        "Published: Table 1 of Petrov, Macdonald and Tonellotto, SIGIR 2025.",
                        *(
                            _left_out(record.figures)
                            for record in records
                            if record.figures["source"]
                        ),
                    )
                ),
            ),
            *(Text(text) for record in records if (text := _beside_published(record.figures))),
            Table(
                (
                    "log",
                    "training interactions",
                    "training users",
                    "validation users",
                    "test users",
                    "test items never trained on",
                ),
                tuple(_holdout_row(record.figures) for record in records),
                _how_held_out(records),
            ),
        ]
        return Section(self.title, self.name, tuple(blocks))


def measure_log(log: LogFolder, progress: Progress) -> Json:
    prepared = Prepared.load(log.prepared)
    if log.source is not None:
        progress(f"reading {log.source.name}")
        statistics = asdict(
            log_statistics(
                read_interactions(log.source, log_format=log.log_format, progress=progress)
            )
        )
    else:
        progress(f"reading {log.prepared.name}")
        statistics = asdict(log_statistics(_whole_log(prepared)))
        for name in _OF_THE_LOG_ONLY:
            del statistics[name]
    trained = prepared.train_ends > prepared.offsets[:-1]
    untrained_targets = prepared.training_counts()[prepared.test.items] == 0
    return {
        "log": log.name,
        "source": None if log.source is None else log.source.name,
        "statistics": statistics,
        "holdout": {
            "kind": prepared.settings.get("holdout", ""),
            "training_interactions": int((prepared.train_ends - prepared.offsets[:-1]).sum()),
            "training_users": int(trained.sum()),
            "validation_users": len(prepared.validation),
            "test_users": len(prepared.test),
            "untrained_targets": int(untrained_targets.sum()),
        },
    }


def _size(source: Path) -> int:
    files = source.rglob("*") if source.is_dir() else [source]
    return sum(path.stat().st_size for path in files if path.is_file())


def _whole_log(prepared: Prepared) -> Interactions:
    """Return the log that was prepared; its times are not kept, and all zero here."""
    times = np.zeros(len(prepared.items), np.int64)
    return Interactions(
        prepared.offsets, prepared.items, times, prepared.user_ids, prepared.item_ids
    )


def _row(figures: Json) -> tuple[str, ...]:
    found = figures["statistics"]
    return (
        figures["log"],
        *(f"{found[name]:,}" for name in ("users", "items", "interactions")),
        f"{found['average_length']:.2f}",
        *(f"{found[name]:,.0f}" for name in ("median_length", "p99_length", "longest")),
        *(
            f"{found[name]:.1%}"
            for name in ("repeat_share", "top_1_percent_share", "single_items_share")
        ),
        *(found[name][:10] if name in found else "" for name in ("first_time", "last_time")),
    )


def _holdout_row(figures: Json) -> tuple[str, ...]:
    held = figures["holdout"]
    counts = ("training_interactions", "training_users", "validation_users", "test_users")
    share = held["untrained_targets"] / max(1, held["test_users"])
    return (figures["log"], *(f"{held[name]:,}" for name in counts), f"{share:.1%}")


def _left_out(figures: Json) -> str:
    return (
        f"{figures['log']}: left out for fewer than {DEFAULT_MIN_INTERACTIONS} interactions: "
        f"{figures['statistics']['left_out_users']:,} of its users."
    )


def _how_held_out(records: Sequence[Record]) -> str:
    if any(record.figures["holdout"]["kind"] != "temporal" for record in records):
        return ""
    return (
        "Training is everything up to one moment, as in the paper; the test target is the first "
        "interaction of a user after it."
    )


def _beside_published(figures: Json) -> str:
    """Say whether a log of the paper has the paper's figures; nothing about any other log."""
    for name, (*published, _) in _PUBLISHED.items():
        if figures["log"].lower() != name.lower():
            continue
        found = figures["statistics"]
        own = [f"{found[column]:,}" for column in ("users", "items", "interactions")]
        if own == published:
            return f"{figures['log']} has exactly the paper's users, items and interactions."
        return f"{figures['log']} is not the paper's {name}: its figures differ from the published."
    return ""
