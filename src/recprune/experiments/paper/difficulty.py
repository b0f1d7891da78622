"""Pruning difficulty, section 7 of the paper as numbers: which users are slow, and why.

The paper compares the heat maps of a fast, an average and a slow user by eye. Here statistics of S
are correlated with what the searches of many users cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.experiments.framework.experiment import (
    ExperimentPart,
    Need,
    Setup,
    model_name,
    section_of,
)
from recprune.experiments.framework.record import Record, by_log
from recprune.experiments.framework.timing import Search, index_search, interleaved, unsuited
from recprune.experiments.framework.workload import Workload
from recprune.experiments.paper.heat_map import (
    one_of_each_log,
    places,
    ranks_within_splits,
    sorted_scores,
)
from recprune.experiments.paper.score_shape import STATISTICS, spearman, statistics_of
from recprune.experiments.report.charts import heat_map, scatter
from recprune.experiments.report.document import Block, Picture, Section, Table, Text
from recprune.search.methods import RecJPQPrune
from recprune.types import Float32Array, Json, Progress, random_generator

_PASSES = 3  # a user's time is the least of so many
_POINTS = 300  # users in a scatter, at most
_USERS_SHOWN = {"fast": 0.01, "average": 0.5, "slow": 0.99}  # by their share of cheaper users
_METHOD = RecJPQPrune()
_COSTS = {
    "scored": "scored, `recjpqprune`",
    "touched": "looked at, `cells`",
    "recjpqprune_us": "time, `recjpqprune`",
    "auto_us": "time, `auto`",
}
_WEAK = 0.5  # a correlation below this predicts little


class Difficulty:
    """Users that are fast, average and slow to search for, and a predictor of which they are."""

    name = "difficulty"
    title = "Pruning difficulty"
    needs: frozenset[Need] = frozenset({"workloads"})

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each model; heat maps for one model of each log."""
        mapped = one_of_each_log(setup.workloads)
        return [
            self._part(setup, workload, any(workload is chosen for chosen in mapped))
            for workload in setup.workloads
        ]

    def _part(self, setup: Setup, workload: Workload, heat_maps: bool) -> ExperimentPart:
        users = setup.sized(1000, 40)
        settings = {
            "workload": workload.checksum(),
            "users": users,
            "heat_maps": heat_maps,
            "seed": setup.seed,
        }
        return ExperimentPart(
            workload.name,
            settings,
            lambda progress: measure(workload, users, heat_maps, setup.seed, progress),
            minutes=0.7,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """For each log: users, correlations, and a scatter of the best predictor."""
        shares = ", ".join(f"{name}: {share:.0%}" for name, share in _USERS_SHOWN.items())
        return section_of(
            self,
            "K = 10. Users in the order of the items that `recjpqprune` scores for them, 8 "
            f"sub-item ids a step, and by the share of users that come before ({shares}). "
            "Times are of one thread, S included. Correlations are Spearman's ρ over users. "
            "The statistics of S: "
            + "; ".join(f"**{entry.name}**, {entry.words}" for entry in STATISTICS.values())
            + ". An item's score has the standard deviation that independent splits would give "
            "it. What needs θ, the score of the 10th best item, foresees nothing.",
            *(_blocks(log, own) for log, own in by_log(records).items()),
        )


def measure(
    workload: Workload, num_users: int, heat_maps: bool, seed: int, progress: Progress
) -> Json:
    """Search for many users, and correlate what that costs with the shape of their S."""
    index, users = workload.index, workload.sequence_embeddings[:num_users]
    searches: dict[str, Search] = {
        "recjpqprune": index_search(index, _METHOD),
        "auto": index_search(index, "auto"),
    }
    if unsuited(index, "cells") is None:
        searches["cells"] = index_search(index, "cells")
    else:
        progress("cells cannot be had for this index")
    blocks = -(-len(users) // 50)
    block = -(-len(users) // blocks)  # all of one size, so that no user is left out
    passes = [
        interleaved(searches, users, 10, seed=seed + number, block=block, progress=progress)
        for number in range(_PASSES)
    ]
    microseconds = {
        name: np.min([timed[name].microseconds for timed in passes], axis=0) for name in searches
    }
    records = {
        name: found.records for name, found in passes[0].items() if found.records is not None
    }
    pruned = records["recjpqprune"]
    costs: dict[str, NDArray[Any]] = {"scored": pruned["items_scored"]}
    if "cells" in records:
        costs["touched"] = records["cells"]["items_touched"]
    costs |= {"recjpqprune_us": microseconds["recjpqprune"], "auto_us": microseconds["auto"]}
    progress("statistics of S")
    scores = index.sub_item_scores(users)
    values = statistics_of(scores, pruned["threshold"])
    sample = random_generator(seed).permutation(len(users))[:_POINTS]
    by_cost = np.argsort(pruned["items_scored"], kind="stable")
    shown: Json = {}
    for name, share in _USERS_SHOWN.items():
        user = int(by_cost[round(share * (len(users) - 1))])
        steps = int(pruned["steps"][user])
        shown[name] = {
            "user": user,
            "steps": steps,
            "scored": int(pruned["items_scored"][user]),
            **{f"{method}_us": float(times[user]) for method, times in microseconds.items()},
        }
        if "cells" in records:
            shown[name]["touched"] = int(records["cells"]["items_touched"][user])
        if heat_maps:
            best_item = int(passes[0]["recjpqprune"].ids[user, 0])
            code = workload.codes[best_item]
            shown[name]["scores"] = sorted_scores(scores[user])
            shown[name]["best"] = places(ranks_within_splits(scores[user]), code)
            shown[name]["last"] = [
                [split, taken - 1]
                for split, taken in enumerate(taken_sub_items(scores[user], steps))
                if taken
            ]
    return {
        "log": workload.log,
        "model": workload.model,
        "items": index.num_items,
        "users": len(users),
        "range": {
            name: [float(np.percentile(cost, at)) for at in (5, 50, 95)]
            for name, cost in costs.items()
        },
        "correlations": {
            statistic: {name: spearman(value, cost) for name, cost in costs.items()}
            for statistic, value in values.items()
        },
        "points": {
            "scored": pruned["items_scored"][sample].tolist(),
            **{
                name: [float(f"{number:.4g}") for number in value[sample]]
                for name, value in values.items()
                if not STATISTICS[name].needs_threshold
            },
        },
        "shown": shown,
    }


def taken_sub_items(scores: Float32Array, steps: int) -> list[int]:
    """Return how many sub-items of each split Algorithm 1 takes in so many steps."""
    num_splits, num_sub_items = scores.shape
    # After its last sub-item a split has nothing to offer, and is never chosen again.
    queue = np.pad(-np.sort(-scores, axis=1), ((0, 0), (0, 1)), constant_values=-np.inf)
    taken = np.zeros(num_splits, np.int64)
    for _ in range(steps):
        split = int(np.argmax(queue[np.arange(num_splits), taken]))
        taken[split] = min(taken[split] + _METHOD.sub_items_per_step, num_sub_items)
    return [int(count) for count in taken]


def _blocks(log: str, records: Sequence[Record]) -> list[Block]:
    figures = [record.figures for record in records]
    best = best_predictor(figures)
    blocks: list[Block] = [Text(f"**{log}**: {figures[0]['items']:,} items. {_ranges(figures)}")]
    blocks.append(_users_table(figures))
    for entry in figures:
        blocks += [
            _heat_map(entry, name, user)
            for name, user in entry["shown"].items()
            if "scores" in user
        ]
    blocks += [_correlations(entry) for entry in figures]
    if best is None:
        blocks.append(Text("No statistic of S varies with the cost of these users."))
        return blocks
    blocks.append(Text(_in_words(best, figures)))
    picture = scatter(
        {
            model_name(entry["model"]): (
                entry["points"][best],
                [100 * scored / entry["items"] for scored in entry["points"]["scored"]],
            )
            for entry in figures
        },
        x_label=STATISTICS[best].words,
        y_label="items scored by recjpqprune, %",
        joined=False,
    )
    blocks.append(
        Picture(
            f"difficulty-{log}",
            picture,
            f"Items scored against the best predictor from S alone, users of {log}.",
            f"What S alone tells: {log}, up to {_POINTS} users of each model.",
        )
    )
    return blocks


def best_predictor(figures: Sequence[Json]) -> str | None:
    """Return the statistic of S alone that goes best with the items scored, over all models."""
    means: dict[str, float] = {}
    for name, statistic in STATISTICS.items():
        found = [entry["correlations"][name]["scored"] for entry in figures]
        if not statistic.needs_threshold and all(value is not None for value in found):
            means[name] = float(np.mean(np.abs(found)))
    return max(means, key=lambda name: means[name]) if means else None


def _in_words(best: str, figures: Sequence[Json]) -> str:
    def found(cost: str) -> str:
        return ", ".join(
            f"{_rho(entry['correlations'][best].get(cost))} ({model_name(entry['model'])})"
            for entry in figures
        )

    values = [float(entry["correlations"][best]["scored"]) for entry in figures]
    sentence = (
        "Of what S alone can tell, the items that `recjpqprune` scores go best with "
        f"**{STATISTICS[best].name}**, on average over models: {STATISTICS[best].words}. Its ρ "
        f"is {found('scored')} with them, and {found('auto_us')} with the time of `auto`. "
        f"{_best_of_each(figures)}"
    )
    if min(map(abs, values)) < _WEAK:
        return f"{sentence} That is too little to foresee the cost of a single user."
    if min(values) < 0 < max(values):
        return f"{sentence} Its sign changes from model to model."
    sentence += (
        f" The {'larger' if values[0] > 0 else 'smaller'} it is, the more `recjpqprune` has to "
        "score."
    )
    if best.startswith("high") and values[0] > 0:
        sentence += (
            " The paper's impression from three users holds for Algorithm 1: it is fast where few "
            "sub-items score high."
        )
    return sentence


def _best_of_each(figures: Sequence[Json]) -> str:
    """Name the best statistic of each model."""
    each = []
    for entry in figures:
        best = best_predictor([entry])
        if best is not None:
            rho = _rho(entry["correlations"][best]["scored"])
            each.append(f"{STATISTICS[best].name} for {model_name(entry['model'])} ({rho})")
    return f"Model by model the best is {', '.join(each)}."


def _ranges(figures: Sequence[Json]) -> str:
    """Say how far apart users are."""
    sentences = []
    for entry in figures:
        shares = {
            name: [value / entry["items"] for value in entry["range"][name]]
            for name in ("scored", "touched")
            if name in entry["range"]
        }
        words = " and ".join(
            f"{low:.1%} to {high:.1%} ({'scored' if name == 'scored' else 'looked at'} by "
            f"`{'recjpqprune' if name == 'scored' else 'cells'}`)"
            for name, (low, _, high) in shares.items()
        )
        sentences.append(
            f"{model_name(entry['model'])}: from the 5th to the 95th percentile of "
            f"{entry['users']:,} users, {words} of the items."
        )
    return " ".join(sentences)


def _users_table(figures: Sequence[Json]) -> Table:
    rows = [
        (
            model_name(entry["model"]),
            name,
            f"{user['scored'] / entry['items']:.1%}",
            f"{user['steps']:,}",
            f"{user['recjpqprune_us'] / 1e3:,.3f}",
            f"{user['touched'] / entry['items']:.1%}" if "touched" in user else "",
            f"{user['auto_us'] / 1e3:,.3f}",
        )
        for entry in figures
        for name, user in entry["shown"].items()
    ]
    header = (
        "model",
        "user",
        "scored, `recjpqprune`",
        "steps",
        "its ms",
        "looked at, `cells`",
        "`auto` ms",
    )
    return Table(header, tuple(rows), f"Times are the least of {_PASSES}.")


def _heat_map(figures: Json, name: str, user: Mapping[str, Any]) -> Picture:
    marks = {
        "best item": [(split, rank) for split, rank in user["best"]],
        "last sub-item taken": [(split, rank) for split, rank in user["last"]],
    }
    model, log = model_name(figures["model"]), figures["log"]
    picture = heat_map(
        np.array(user["scores"]),
        marks,
        x_label="rank within its split",
        y_label="split",
        score_label="sub-item score",
    )
    return Picture(
        f"difficulty-{log}-{name}",
        picture,
        f"Heat map of the sub-item scores of a user who is {name} to search for.",
        f"{name.capitalize()} ({user['recjpqprune_us'] / 1e3:,.2f} ms, "
        f"{user['scored'] / figures['items']:.1%} of the items scored, steps: {user['steps']:,}; "
        f"`auto` {user['auto_us'] / 1e3:,.3f} ms): user {user['user']} of {log}, {model}, with the "
        "best item, and how far `recjpqprune` went in the splits that it took sub-items of.",
    )


def _correlations(figures: Json) -> Table:
    costs = [name for name in _COSTS if name in figures["range"]]
    rows = [
        (
            statistic.name,
            "S and θ" if statistic.needs_threshold else "S",
            *(_rho(figures["correlations"][name][cost]) for cost in costs),
        )
        for name, statistic in STATISTICS.items()
    ]
    return Table(
        ("statistic", "needs", *(_COSTS[cost] for cost in costs)),
        tuple(rows),
        f"Spearman's ρ over {figures['users']:,} users, {figures['log']}, "
        f"{model_name(figures['model'])}.",
    )


def _rho(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}".replace("-", "−")
