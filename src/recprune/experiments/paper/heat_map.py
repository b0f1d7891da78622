"""The paper's Figure 1: sub-item scores of one user, and where items lie in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from recprune.experiments.framework.experiment import (
    ExperimentPart,
    Need,
    Setup,
    model_name,
    section_of,
)
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.workload import Workload
from recprune.experiments.report.charts import heat_map
from recprune.experiments.report.document import Block, Picture, Section, Text
from recprune.types import Float32Array, Int64Array, Json, Progress

_SHOWN = "gsasrecjpq"
_BEST_SHARE = 0.1  # "among the best" of a split means this share of its sub-items
_USERS = 512  # whose best items are looked at, for principle P1


class HeatMap:
    """Sub-item scores, sorted within each split, with a top, a middle and a bottom item."""

    name = "heat-map"
    title = "Figure 1: sub-item scores of a user"
    needs: frozenset[Need] = frozenset({"workloads"})

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each log."""
        return [self._part(setup, workload) for workload in one_of_each_log(setup.workloads)]

    def _part(self, setup: Setup, workload: Workload) -> ExperimentPart:
        users = setup.sized(_USERS, 50)
        return ExperimentPart(
            workload.log,
            {"workload": workload.checksum(), "users": users},
            lambda progress: measure(workload, users, progress),
            minutes=0.3,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A picture for each log."""
        return section_of(
            self,
            "S of a user, the best sub-item of each split at the left. Shown is the user whose "
            "search by `recjpqprune` scores the median number of items. Marked are the "
            "sub-items of the best item, of the one in the middle of the ranking and of the "
            "last.",
            *map(_blocks, records),
        )


def one_of_each_log(workloads: Iterable[Workload]) -> list[Workload]:
    """Return the workload of each log that pictures of single users show."""
    chosen: dict[str, Workload] = {}
    for workload in workloads:
        if workload.model == _SHOWN or workload.log not in chosen:
            chosen[workload.log] = workload
    return list(chosen.values())


def ranks_within_splits(scores: Float32Array) -> Int64Array:
    """Return how many sub-items of its split come before each one, the best first: [..., M, B]."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(scores.shape[-1]), axis=-1)
    return ranks


def sorted_scores(scores: Float32Array) -> list[list[float]]:
    """Return S with every split sorted, the best first, rounded for a picture."""
    return [[round(float(score), 4) for score in row] for row in -np.sort(-scores, axis=-1)]


def places(ranks: Int64Array, code: NDArray[np.integer]) -> list[list[int]]:
    """Return (split, rank) of each sub-item of one item."""
    return [[split, int(ranks[split, sub_item])] for split, sub_item in enumerate(code)]


def measure(workload: Workload, num_users: int, progress: Progress) -> Json:
    """Return S of the median user with three items in it, and where all users' best items lie."""
    index, users = workload.index, workload.sequence_embeddings[:num_users]
    codes = np.asarray(workload.codes)
    progress("looking for the median user")
    found = index.search(users, 10, method="recjpqprune", threads=2)
    by_cost = np.argsort(found.stats.items_scored, kind="stable")
    user = int(by_cost[(len(by_cost) - 1) // 2])
    tables = index.sub_item_scores(users)
    ranks = ranks_within_splits(tables)
    ranking = np.argsort(-index.score(users[user], np.arange(index.num_items)), kind="stable")
    marked = {"top": 0, "middle": index.num_items // 2, "bottom": index.num_items - 1}
    best_codes = codes[np.maximum(found.ids, 0)]  # [users, 10, M]
    splits = np.arange(index.num_splits)
    best_ranks = ranks[np.arange(len(users))[:, None, None], splits, best_codes]
    among_best = best_ranks[found.ids >= 0] < _BEST_SHARE * index.num_sub_items
    return {
        "log": workload.log,
        "model": workload.model,
        "items": index.num_items,
        "user": user,
        "users": len(users),
        "scored": int(found.stats.items_scored[user]),
        "scores": sorted_scores(tables[user]),
        "marks": {
            name: {"rank": at + 1, "places": places(ranks[user], codes[ranking[at]])}
            for name, at in marked.items()
        },
        "among_best": float(among_best.mean()),
    }


def _blocks(record: Record) -> list[Block]:
    figures = record.figures
    model = model_name(figures["model"])
    marks = {
        f"{name}, rank {mark['rank']:,}": [(split, rank) for split, rank in mark["places"]]
        for name, mark in figures["marks"].items()
    }
    mean_ranks = ", ".join(
        f"{name} {np.mean([rank + 1 for _, rank in mark['places']]):.0f}"
        for name, mark in figures["marks"].items()
    )
    picture = heat_map(
        np.array(figures["scores"]),
        marks,
        x_label="rank within its split",
        y_label="split",
        score_label="sub-item score",
    )
    share = figures["among_best"]
    # Twice what chance gives is the least that could be called typical.
    holds = "as principle P1 has it" if share > 2 * _BEST_SHARE else "so principle P1 fails here"
    return [
        Picture(
            f"heat-map-{record.part}",
            picture,
            f"Heat map of the sub-item scores of a user of {figures['log']}, with three items.",
            f"User {figures['user']} of {figures['log']}, {model}: "
            f"{figures['scored'] / figures['items']:.1%} of {figures['items']:,} items are scored. "
            f"Mean rank of an item's sub-items: {mean_ranks}.",
        ),
        Text(
            f"**{figures['log']}, {model}**: over {figures['users']:,} users, {share:.0%} of the "
            f"sub-items of their ten best items are among the best {_BEST_SHARE:.0%} of their "
            f"split, {holds}."
        ),
    ]
