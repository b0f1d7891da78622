"""What is trained to compare item tables, codes and encoders: logs, and models of each.

Within a log, all models but `others` have the same encoder, loss, batches and minutes, and differ
in what an item is: a vector of its own, SVD codes, or learnt codes. Settings were chosen on
validation users.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TABLES: dict[str, dict[str, Any]] = {
    "full table": {"embedding": "full"},
    "SVD codes": {"embedding": "recjpq", "codes": "svd"},
    "learnt, M = 8": {"embedding": "recjpq", "codes": "learnt", "num_splits": 8},
    "learnt, M = 16": {"embedding": "recjpq", "codes": "learnt", "num_splits": 16},
    "learnt, M = 32": {"embedding": "recjpq", "codes": "learnt", "num_splits": 32},
}


@dataclass(frozen=True)
class Log:
    """A log: how it is prepared, judged and modelled."""

    title: str
    prepare: tuple[str, ...]  # options
    preset: str
    settings: dict[str, Any]  # over those of the preset
    exclude_seen: bool = False  # in the test, as in published tables
    others: dict[str, dict[str, Any]] = field(default_factory=dict)  # further models
    test_users: int | None = None  # drawn by seed; None: all
    content: bool = False  # whether names of items lie beside the log

    def models(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return the preset and the settings of every model, by name."""
        found = {name: (self.preset, self.settings | TABLES[name]) for name in TABLES}
        for name, values in self.others.items():
            own = dict(values)
            preset = own.pop("preset", self.preset)
            found[name] = (preset, self.settings | own)
        return found


_WHOLE = {"loss": "cross_entropy", "negatives": "shared", "num_in_batch": 0, "logq": False}
_LONG = {"max_epochs": 100_000, "patience": 100_000}
# Where they changed nothing on validation users, they only take time.
_NO_TRANSITIONS = {"transitions": 0}
_REVIEWS = {
    **_WHOLE, **_LONG, "num_blocks": 1, "num_heads": 2, "width": 64, "length": 50, "dropout": 0.5,
    "exclude_seen": True, "batches_per_epoch": 2000, "validation_users": 8192,
    "full_epochs": 40, "code_epochs": 40,
}  # fmt: skip
_LEAVE_ONE_OUT = ("--holdout", "leave-one-out", "--validation-users")
_SITTING = ("--validation", "sitting", "--validation-users", "2048")
_TEMPORAL = ("--min-history", "5", "--validation", "temporal", "--validation-users")

LOGS = {
    "amazon-beauty": Log(
        "amazon-beauty",
        (*_LEAVE_ONE_OUT, "4096"),
        "gsasrec",
        {**_REVIEWS, "dropout": 0.4},
        True,
    ),
    "yelp": Log("yelp", (*_LEAVE_ONE_OUT, "8192"), "gsasrec", _REVIEWS, True),
    "ml-1m": Log(
        "MovieLens-1M",
        (*_LEAVE_ONE_OUT, "6040"),
        "esasrec",
        {
            **_WHOLE, **_LONG, "width": 256, "num_heads": 2, "length": 200, "dropout": 0.3,
            "windows": "random", "exclude_seen": True, "validation_users": 6040,
            "full_epochs": 40, "code_epochs": 40, "inner_share": 1.0,
        },
        True,
        others={
            "narrow networks, full table": {"embedding": "full", "inner_share": 0.25},
            "timed, full table": {"preset": "timed", "architecture": "timed", "embedding": "full"},
        },
    ),
    "complete-journey": Log(
        "Complete Journey",
        _SITTING,
        "recommended",
        {**_LONG, **_NO_TRANSITIONS, "length": 128, "repeats": 1000, "full_epochs": 15,
         "validation_users": 2048},
    ),
    "gitlog": Log(
        "gitlog",
        (*_TEMPORAL, "4096"),
        "recommended",
        {**_LONG, **_NO_TRANSITIONS, "own_scores": 0.0, "dropout": 0.5, "full_epochs": 4,
         "code_epochs": 10, "batches_per_epoch": 150, "validation_users": 4096},
        content=True,
    ),
    "tmall-like": Log(
        "tmall-like",
        (*_TEMPORAL, "2048"),
        "recommended",
        {**_LONG, "width": 64, "length": 50, "repeats": 100, "activity": False, "full_epochs": 4,
         "code_epochs": 8, "batches_per_epoch": 300, "validation_users": 2048},
        test_users=10_000,
    ),
}  # fmt: skip
