"""Can a model be trained to be pruned? The question with which the paper's section 7 ends.

Variants of gSASRecJPQ that were trained with an additional loss (`losses.agreement`,
`losses.concentration`) are compared with one trained as long without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recprune.evaluation.comparison import compare
from recprune.evaluation.metrics import RankedUsers, user_values
from recprune.evaluation.resampling import bootstrap_mean
from recprune.experiments.framework.experiment import ExperimentPart, Need, Setup, section_of
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import (
    Search,
    Timed,
    index_search,
    side_by_side,
    unsuited,
)
from recprune.experiments.framework.workload import Workload
from recprune.experiments.report.charts import scatter
from recprune.experiments.report.document import Block, Picture, Section, Table, Text
from recprune.types import InputError, Json, Progress

_BASE = "base"
_BASE_MODEL = "gsasrecjpq"
_METHODS = ("auto", "cells", "recjpqprune")  # those that prune
# What pruning is meant to save, by method, and what that is called.
_WORK = {"recjpqprune": "items_scored", "cells": "items_touched"}
_WORDS = {"recjpqprune": "scores", "cells": "looks at"}
_METRIC = "NDCG@10"
_PRUNING = {"training.pruning_loss", "training.pruning_weight"}
_CHANCE = 0.025  # that a 95 % interval lies below zero where nothing differs


class Prunable:
    """NDCG@10 against what pruning costs, for models trained to be pruned."""

    name = "prunable"
    title = "Beyond the paper: models trained to be pruned"
    needs: frozenset[Need] = frozenset({"workloads", "variants"})

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each log with such models and one to compare them with."""
        found = []
        for log in dict.fromkeys(workload.log for workload in setup.variants):
            variants = [workload for workload in setup.variants if workload.log == log]
            bases = [
                workload
                for name, workloads in ((_BASE, variants), (_BASE_MODEL, setup.workloads))
                for workload in workloads
                if workload.log == log and workload.model == name
            ]
            trained = [workload for workload in variants if pruning_weight(workload) > 0.0]
            if bases and trained:
                found.append(self._part(setup, bases[0], trained))
        return found

    def _part(self, setup: Setup, base: Workload, variants: Sequence[Workload]) -> ExperimentPart:
        queries = setup.sized(300, 20)
        settings = {
            "workloads": {workload.model: workload.checksum() for workload in (base, *variants)},
            "other_settings": {workload.model: differing(base, workload) for workload in variants},
            "queries": queries,
            "k": 10,
            "seed": setup.seed,
        }
        return ExperimentPart(
            base.log,
            settings,
            lambda progress: measure(base, variants, queries, setup.seed, progress),
            minutes=0.5 * (1 + len(variants)),
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A table and a picture for each log."""
        return section_of(
            self,
            "The paper ends with a question: can a model be **trained** to make pruning more "
            "efficient? Tried here: an additional loss, whose weight stands behind its name. "
            "`agreement` punishes a target whose sub-items are not the best of their splits; "
            "`concentration` punishes sub-item scores that crowd below the best of their "
            "split. Slack ÷ reach, the same as under pruning difficulty, is how far the score "
            "of the 10th best item is below the sum of the best sub-item scores of all splits, "
            "as a share of what an average item is below it. Every model was trained once: "
            "intervals are over users, and do not cover what another seed of the training "
            "would change.",
            *(_blocks(record.figures) for record in records),
        )


def pruning_weight(workload: Workload) -> float:
    """Return the weight of the additional loss with which the model was trained; 0: none."""
    return float(workload.settings.get("training", {}).get("pruning_weight", 0.0))


def differing(base: Workload, variant: Workload) -> Json:
    """Return all settings but those of pruning that differ: by name, the base's and its own."""
    own, others = _flat(base.settings), _flat(variant.settings)
    return {
        name: [own.get(name), others.get(name)]
        for name in sorted({*own, *others} - _PRUNING)
        if own.get(name) != others.get(name)
    }


def _flat(settings: Json, prefix: str = "") -> Json:
    """Return nested settings by dotted names."""
    flat: Json = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def measure(
    base: Workload, variants: Sequence[Workload], queries: int, seed: int, progress: Progress
) -> Json:
    """Return the figures of a base and its variants, all timed in one interleaved run."""
    workloads = (base, *variants)
    for workload in variants:
        if not np.array_equal(workload.targets, base.targets):
            raise InputError(f"{workload.name}: its test users are not those of {base.name}")
    ranked = []
    for workload in workloads:
        progress(f"NDCG@10 of {workload.model}")
        found = workload.index.search(workload.sequence_embeddings, 10, threads=2)
        ranked.append(RankedUsers.of_targets(found.ids, workload.targets))
    timed = _timed(workloads, queries, seed, progress)
    models = []
    for workload, ranking, methods in zip(workloads, ranked, timed, strict=True):
        ndcg = bootstrap_mean(user_values(ranking, [_METRIC])[_METRIC])
        entry: Json = {
            "model": workload.model,
            "pruning_loss": None,
            "pruning_weight": pruning_weight(workload),
            "ndcg": ndcg.mean,
            "ndcg_low": ndcg.low,
            "ndcg_high": ndcg.high,
            "relative_slack": relative_slack(workload, queries),
            "methods": {method: found.summary() for method, found in methods.items()},
            "work": {
                method: _work(methods[method], timed[0][method], name, base.index.num_items)
                for method, name in _WORK.items()
                if method in methods
            },
        }
        if workload is not base:
            compared = compare(ranking, ranked[0], _METRIC)
            entry |= {
                "pruning_loss": workload.settings["training"]["pruning_loss"],
                "other_settings": differing(base, workload),
                "difference": compared.difference.mean,
                "difference_low": compared.difference.low,
                "difference_high": compared.difference.high,
                "p_value": compared.p_value,
            }
        models.append(entry)
    return {
        "log": base.log,
        "items": base.index.num_items,
        "users": len(base.targets),
        "models": models,
    }


def _timed(
    workloads: Sequence[Workload], queries: int, seed: int, progress: Progress
) -> list[dict[str, Timed]]:
    """Time all methods of all models in turns; return them by model, then by method."""
    return side_by_side(
        [_searches(workload) for workload in workloads],
        [workload.sequence_embeddings[:queries] for workload in workloads],
        10,
        seed=seed,
        progress=progress,
    )


def relative_slack(workload: Workload, queries: int) -> float:
    """Return (σ₀ − θ) / (σ₀ − mean score), the mean over users.

    σ₀ is the sum of the best sub-item scores, θ the score of the 10th best item, and the mean is
    that of an item of random sub-items. 0: the best items are made of the best sub-items.
    """
    embeddings = workload.sequence_embeddings[:queries]
    scores = workload.index.sub_item_scores(embeddings).astype(np.float64)  # [users, M, B]
    found = workload.index.search(embeddings, min(10, workload.index.num_items), threads=2)
    best = scores.max(2).sum(1)
    return float(((best - found.scores[:, -1]) / (best - scores.mean(2).sum(1))).mean())


def _work(own: Timed, base: Timed, name: str, num_items: int) -> Json:
    """Return the mean share of items, and how it differs from the base's, user by user.

    A median would not do: Algorithm 1 goes by whole steps, and nearly all medians are the same.
    """
    if own.records is None or base.records is None:
        raise AssertionError("searches of an index have records")
    shares, base_shares = own.records[name] / num_items, base.records[name] / num_items
    difference = bootstrap_mean(shares - base_shares)
    return {
        "mean_share": float(shares.mean()),
        "difference": difference.mean,
        "difference_low": difference.low,
        "difference_high": difference.high,
    }


def _searches(workload: Workload) -> dict[str, Search]:
    """Return the methods that the index of a workload has."""
    return {
        method: index_search(workload.index, method)
        for method in _METHODS
        if unsuited(workload.index, method) is None  # cells need 4 to 16 splits
    }


def _blocks(figures: Json) -> list[Block]:
    log, items, models = figures["log"], figures["items"], figures["models"]
    groups: dict[str, tuple[list[float], list[float]]] = {}
    labels: dict[str, list[str]] = {}
    for entry in models:
        xs, ys = groups.setdefault(entry["pruning_loss"] or _BASE, ([], []))
        xs.append(100 * entry["work"]["recjpqprune"]["mean_share"])
        ys.append(entry["ndcg"])
        if entry["pruning_loss"] is not None:
            labels.setdefault(entry["pruning_loss"], []).append(f"{entry['pruning_weight']:g}")
    return [
        Text(f"**{log}**: {_other_settings(figures)} {_verdict(figures)}"),
        Table(
            ("model", "NDCG@10", "to the base", "p"),
            tuple(_quality_row(entry) for entry in models),
            f"{items:,} items, {figures['users']:,} users, with 95 % bootstrap intervals; "
            "differences are paired, user by user, p by flipping their signs.",
        ),
        Table(
            (
                "model",
                *(
                    name
                    for method in models[0]["work"]
                    for name in (f"{method} {_WORDS[method]}", "to base, points")
                ),
            ),
            tuple(_work_row(entry) for entry in models),
            "Share of the catalogue, the mean over "
            f"{models[0]['methods']['auto']['queries']:,} queries, with 95 % bootstrap intervals "
            "of the paired differences. `recjpqprune` takes 8 sub-item ids a step, and all serve "
            "about the same number of items: a median could only be a whole number of steps.",
        ),
        Table(
            ("model", "slack ÷ reach", *(f"`{method}`, ms" for method in models[0]["methods"])),
            tuple(_time_row(entry) for entry in models),
            "Medians over the same queries, all models and methods in one interleaved run, one "
            f"thread, K = 10. {_slack_in_words(models)}",
        ),
        Picture(
            f"prunable-{log}",
            scatter(
                groups,
                labels=labels,
                highlight=_BASE,
                joined=False,
                x_label="items scored by recjpqprune, mean, % of the catalogue",
                y_label="NDCG@10",
            ),
            f"NDCG@10 against the share of items that recjpqprune scores, for models of {log} "
            "trained with and without an additional loss.",
            "Up and to the left is better. The numbers are the weights of the additional loss.",
        ),
    ]


def _slack_in_words(models: Sequence[Json]) -> str:
    """Say whether the model with the most slack is the one with the most work."""

    def share(entry: Json) -> float:
        return float(entry["work"]["recjpqprune"]["mean_share"])

    widest = max(models, key=lambda entry: float(entry["relative_slack"]))
    if share(widest) < share(models[0]):
        return (
            f"Slack ÷ reach does not tell the work of one model from that of another: "
            f"{_model(widest)} has the largest, and `recjpqprune` scores less with it than with "
            "the base."
        )
    return ""


def _quality_row(entry: Json) -> tuple[str, ...]:
    low, high = entry["ndcg_low"], entry["ndcg_high"]
    return (_model(entry), f"{entry['ndcg']:.4f} [{low:.4f}, {high:.4f}]", *_ndcg_difference(entry))


def _time_row(entry: Json) -> tuple[str, ...]:
    times = (f"{found['p50_us'] / 1000:,.3f}" for found in entry["methods"].values())
    return (_model(entry), f"{entry['relative_slack']:.3f}", *times)


def _work_row(entry: Json) -> tuple[str, ...]:
    cells = []
    for work in entry["work"].values():
        low, mean, high = (
            100 * work[name] for name in ("difference_low", "difference", "difference_high")
        )
        paired = f"{mean:+.2f} [{low:.2f}, {high:.2f}]" if entry["pruning_loss"] else ""
        cells += [f"{work['mean_share']:.2%}", paired]
    return (_model(entry), *cells)


def _model(entry: Json) -> str:
    if entry["pruning_loss"] is None:
        return _BASE
    return f"{entry['pruning_loss']} {entry['pruning_weight']:g}"


def _ndcg_difference(entry: Json) -> tuple[str, str]:
    if "difference" not in entry:
        return "", ""
    low, high = entry["difference_low"], entry["difference_high"]
    return f"{entry['difference']:+.4f} [{low:+.4f}, {high:+.4f}]", f"{entry['p_value']:.2g}"


def _other_settings(figures: Json) -> str:
    """Say in what else the variants differ from the base."""
    different = [
        f"{_model(entry)}: "
        + ", ".join(
            f"`{name}` {own} in place of {other}"
            for name, (other, own) in entry["other_settings"].items()
        )
        for entry in figures["models"][1:]
        if entry["other_settings"]
    ]
    if not different:
        return "All other settings are those of the base."
    return (
        "**Not only the additional loss differs from the base, so differences cannot be put down "
        f"to it alone.** {'; '.join(different)}."
    )


def _verdict(figures: Json) -> str:
    """Answer the question: less work, by each method, and at what price."""
    base, *variants = figures["models"]
    comparisons = len(variants) * len(base["work"])
    chance = (
        f"These are {comparisons} comparisons at 95 % each, not corrected for their number: about "
        f"{_CHANCE * comparisons:.1f} of them would show less work if nothing differed."
    )
    return " ".join((*(answer(figures, method) for method in base["work"]), chance))


def answer(figures: Json, method: str) -> str:
    """Say for how many variants a method has less work, and whether these are as good."""
    base, *variants = figures["models"]

    def share(entry: Json) -> float:
        return float(entry["work"][method]["mean_share"])

    words, luck = f"`{method}` {_WORDS[method]} fewer items", "beyond the chance of users"
    cheaper = [entry for entry in variants if entry["work"][method]["difference_high"] < 0.0]
    if not cheaper:
        return f"For none of {len(variants)} variants {words}, {luck} (one training run each)."
    as_good = [entry for entry in cheaper if entry["difference_high"] >= 0.0]
    answer = (
        f"For {len(cheaper)} of {len(variants)} variants {words}, {luck} (one training run each); "
        f"{len(as_good) or 'none'} of them without a measurable loss of NDCG@10."
    )
    if not as_good:
        return answer
    best = min(as_good, key=share)
    return (
        f"{answer} The best of those is {_model(best)}: {share(best):.2%} of the catalogue in "
        f"place of {share(base):.2%}, NDCG@10 {best['ndcg']:.4f} in place of {base['ndcg']:.4f}."
    )
