"""`recprune evaluate`: a trained model on its test users, beside baselines."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from recprune.commands.answer_options import check_k
from recprune.commands.console import output, say, showing_progress
from recprune.commands.tables import print_cold, print_metrics, print_repeats, print_runs
from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.baseline import Baseline
from recprune.evaluation.baselines.every_baseline import every_baseline, left_out_baselines
from recprune.evaluation.comparison import compare, verdict
from recprune.evaluation.evaluation import evaluate, evaluation_rows
from recprune.evaluation.metrics import METRICS, RankedUsers
from recprune.evaluation.rankings import read_ranking, write_rankings
from recprune.models.ranking import encode_histories, model_boosts, top_items
from recprune.preparation.prepared import Prepared
from recprune.recommender.recommender import Recommender
from recprune.search.checks import checked_k
from recprune.storage import writing_file
from recprune.training.checkpoint import load_model
from recprune.types import MAX_SUB_ITEMS, InputError, Int64Array, Json, random_generator

_COLUMNS = ("NDCG", "Recall", "Coverage", "Bias")
_METRICS = (*METRICS, "Coverage", "Bias")
_FAR = 100  # cutoff at which cold targets are looked for beside -k: they are seldom among the first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prepared", metavar="PREPARED", help="made by recprune prepare")
    parser.add_argument("models", metavar="MODEL", nargs="*", help="made by recprune train")
    parser.add_argument("-k", type=int, default=10, help="cutoff; default %(default)s")
    parser.add_argument(
        "--metrics",
        type=_parse_metrics,
        metavar="NAME,...",
        help=f"show the means of these as well: {', '.join(_METRICS)}, in any case",
    )
    parser.add_argument(
        "--all-metrics",
        dest="metrics",
        action="store_const",
        const=_METRICS,
        help="show the means of all of these",
    )
    parser.add_argument(
        "--cutoffs",
        type=_parse_cutoffs,
        metavar="K,...",
        help="the cutoffs at which they are shown; default -k. Without --metrics: NDCG and Recall",
    )
    parser.add_argument(
        "--ranking",
        dest="rankings",
        action="append",
        default=[],
        type=_parse_ranking,
        metavar="NAME=FILE",
        help="judge what another program recommends beside the models: Parquet, CSV or JSON lines "
        "with user_id, item_id and rank or score; may be repeated",
    )
    parser.add_argument(
        "--write-rankings",
        metavar="FILE",
        help="write what all runs recommend as Parquet, which --ranking RUN=FILE reads",
    )
    parser.add_argument(
        "--users", type=int, metavar="N", help="only so many test users, drawn by --seed"
    )
    parser.add_argument(
        "--exclude-seen",
        action="store_true",
        help="items of the history are not recommended; by default they may be, where `recprune "
        "recommend` leaves them out unless the model has learnt what is taken again",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--no-baselines", action="store_true", help="the models alone")
    which.add_argument(
        "--slow-baselines",
        action="store_true",
        help="also those that take minutes: EASE, from 4,000 to 15,000 items",
    )
    parser.add_argument("--threads", type=int, default=1, help="of the search; default 1")
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file as well")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")


def run(parsed: argparse.Namespace) -> None:
    check_k(parsed.k)
    if parsed.no_baselines and not parsed.models and not parsed.rankings:
        raise InputError("--no-baselines without a model leaves nothing to evaluate")
    for file in filter(None, (parsed.json, parsed.write_rankings)):
        if not os.access(Path(file).absolute().parent, os.W_OK):
            raise InputError(f"{file}: cannot be written")  # said before the work, not after
    prepared = Prepared.load(parsed.prepared)
    checked_k(parsed.k, prepared.num_items)
    if parsed.users is not None and parsed.users < 1:
        raise InputError(f"--users is {parsed.users}, expected at least 1")
    order = random_generator(parsed.seed).permutation(len(prepared.test))
    chosen = np.sort(order[: parsed.users]) if parsed.users else np.arange(len(prepared.test))
    if not len(chosen):
        none = prepared.settings.get("holdout") == "none"
        why = "it was prepared with --holdout none" if none else "nobody has a test target"
        raise InputError(f"{parsed.prepared}: there is nobody to evaluate on: {why}")
    targets = prepared.test.items[chosen]
    some_cold = bool((prepared.training_counts()[targets] == 0).any())
    shown_at = parsed.cutoffs or (parsed.k,)
    for_cold = sorted({parsed.k, _FAR} if some_cold else {parsed.k})
    cutoffs = sorted({*for_cold, *shown_at})
    train = prepared.train_log()
    histories = [prepared.history(prepared.test, int(target)) for target in chosen]
    given = _read_rankings(prepared, chosen, cutoffs[-1], parsed)  # its faults come first
    baselines = () if parsed.no_baselines else _baselines(prepared, train, parsed)
    names = _names(parsed.models, {baseline.name for baseline in baselines} | set(given))
    _refuse_same_names(given, {baseline.name for baseline in baselines})
    ranked: dict[str, RankedUsers] = {}
    seconds: dict[str, float] = {}
    otherwise: list[str] = []  # asked, these treat what was seen in the other way
    with showing_progress("evaluating") as progress:
        for folder in parsed.models:
            progress(folder)
            begun = time.monotonic()
            ids, repeats = _rank(prepared, folder, chosen, cutoffs[-1], parsed)
            name = names[folder]
            if repeats == parsed.exclude_seen:
                otherwise.append(name)
            ranked[name] = RankedUsers.of_targets(ids, targets)
            seconds[name] = time.monotonic() - begun
        ranked |= {name: RankedUsers.of_targets(ids, targets) for name, ids in given.items()}
        models = list(ranked)
        for baseline in baselines:
            progress(baseline.name)
            begun = time.monotonic()
            ids = baseline.recommend(histories, cutoffs[-1], exclude_seen=parsed.exclude_seen)
            ranked[baseline.name] = RankedUsers.of_targets(ids, targets)
            seconds[baseline.name] = time.monotonic() - begun
        progress("confidence intervals")
        evaluations = [
            evaluate(
                users,
                train,
                name=name,
                histories=histories,
                cutoffs=cutoffs,
                seed=parsed.seed,
            )
            for name, users in ranked.items()
        ]
    columns = [f"{column}@{parsed.k}" for column in _COLUMNS]
    took = {name: f"{seconds[name]:.1f}" if name in seconds else "–" for name in ranked}
    rows = [(*row, took[row[0]]) for row in evaluation_rows(evaluations, columns)]
    print_runs(
        f"{len(chosen):,} test users, {prepared.num_items:,} items, full catalogue",
        ("", *columns, "seconds"),
        rows,
    )
    if parsed.metrics or parsed.cutoffs:
        print_metrics(evaluations, parsed.metrics or _COLUMNS[:2], shown_at)
        if not parsed.json:
            say("intervals, of the metrics that have them: --json FILE")
    if parsed.models or baselines:  # rankings from elsewhere are judged as they are
        output.print(_about_seen(parsed.exclude_seen, otherwise), markup=False, soft_wrap=True)
    print_repeats(evaluations, columns[:2])
    print_cold(evaluations, [f"{name}@{cutoff}" for cutoff in for_cold for name in _COLUMNS[:2]])
    others = {name: users for name, users in ranked.items() if name not in models}
    for name in models if others else ():
        sentence = verdict(name, ranked[name], others, metric=f"NDCG@{parsed.k}", seed=parsed.seed)
        output.print(sentence, markup=False, soft_wrap=True)
    for first, second in itertools.combinations(models, 2):
        between = compare(ranked[first], ranked[second], f"NDCG@{parsed.k}", seed=parsed.seed)
        output.print(
            f"{first} − {second}: {between.difference.mean:+.4f} "
            f"[{between.difference.low:+.4f}, {between.difference.high:+.4f}], "
            f"p = {between.p_value:.4f}",
            markup=False,
            soft_wrap=True,
        )
    if parsed.json:
        content = {
            "users": len(chosen),
            "items": prepared.num_items,
            "k": parsed.k,
            "exclude_seen": parsed.exclude_seen,
            "repeat_share": evaluations[0].repeat_share,
            "cold_share": evaluations[0].cold_share,
            "seconds": seconds,
            "evaluations": [entry.to_json() for entry in evaluations],
            "comparisons": _comparisons(ranked, models, {parsed.k, *shown_at}, parsed.seed),
        }
        with writing_file(parsed.json) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        say(f"figures written to {parsed.json}")
    if parsed.write_rankings:
        write_rankings(
            parsed.write_rankings,
            {name: users.ids for name, users in ranked.items()},
            prepared.test.users[chosen],
            prepared.user_ids,
            prepared.item_ids,
        )
        say(f"rankings written to {parsed.write_rankings}")


def _comparisons(
    ranked: dict[str, RankedUsers], models: list[str], cutoffs: set[int], seed: int
) -> list[Json]:
    """Return every model beside those after it and beside all baselines, on every metric."""
    places = {name: place for place, name in enumerate(ranked)}  # models come first
    pairs = [(one, two) for one in models for two in ranked if places[one] < places[two]]
    metrics = [f"{metric}@{cutoff}" for cutoff in sorted(cutoffs) for metric in METRICS]
    return [
        {"runs": [one, two], **asdict(compare(ranked[one], ranked[two], metric, seed=seed))}
        for one, two in pairs
        for metric in metrics
    ]


def _parse_metrics(text: str) -> tuple[str, ...]:
    known = {name.lower(): name for name in _METRICS}
    given = [name.strip().lower() for name in text.split(",")]
    for name in given:
        if name not in known:
            known_ones = ", ".join(_METRICS)
            raise argparse.ArgumentTypeError(f"{name!r} is none of {known_ones}")
    return tuple(dict.fromkeys(known[name] for name in given))


def _parse_cutoffs(text: str) -> tuple[int, ...]:
    given = text.split(",")
    for cutoff in given:
        if not cutoff.strip().isdecimal() or int(cutoff) < 1:
            raise argparse.ArgumentTypeError(f"{cutoff!r} is no cutoff: expected 1,5,10 or such")
    return tuple(sorted({int(cutoff) for cutoff in given}))


def _parse_ranking(text: str) -> tuple[str, str]:
    name, equals, file = text.rpartition("=")  # names of baselines have one: τ = 30
    if not (name and equals and file):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name, = and a file")
    return name, file


def _read_rankings(
    prepared: Prepared, chosen: Int64Array, k: int, parsed: argparse.Namespace
) -> dict[str, Int64Array]:
    """Return what the given files recommend to the test users; say what they do not have."""
    users = prepared.test.users[chosen]
    found: dict[str, Int64Array] = {}
    for name, file in parsed.rankings:
        if name in found:
            raise InputError(f"--ranking: two are called {name!r}")
        ranking = read_ranking(file, k, users, prepared.user_ids, prepared.item_ids, run=name)
        found[name] = ranking.ids
        if len(ranking.missing):
            first = prepared.user_ids[int(users[ranking.missing[0]])]
            say(
                f"{name}: nothing for {len(ranking.missing):,} of {len(users):,} test users, "
                f"such as {first!r}: they count as misses"
            )
        if ranking.shorter:
            say(f"{name}: fewer than {k} items for {ranking.shorter:,} test users")
        if ranking.others:
            say(f"{name}: {ranking.others:,} rows of users who are not judged are passed over")
    return found


def _refuse_same_names(rankings: Iterable[str], baselines: set[str]) -> None:
    for name in rankings:
        if name in baselines:
            raise InputError(
                f"--ranking: {name!r} is the name of a baseline: call it otherwise, or say "
                "--no-baselines"
            )


def _baselines(
    prepared: Prepared, train: Interactions, parsed: argparse.Namespace
) -> tuple[Baseline, ...]:
    """Return all baselines, fitted on users of the training log; say which one is left out."""
    with showing_progress("baselines") as progress:
        progress("fitting")
        baselines = every_baseline(
            train,
            temporal=prepared.is_temporal(),
            exclude_seen=parsed.exclude_seen,
            slow=parsed.slow_baselines,
        )
    for name, why in left_out_baselines(train, slow=parsed.slow_baselines).items():
        say(f"{name} is left out: {why}")
    return baselines


def _about_seen(exclude_seen: bool, otherwise: list[str]) -> str:
    """Say how items of histories are treated, and which models are asked otherwise by default."""
    said = f"Items of a user's history are {'left out' if exclude_seen else 'not left out'}"
    if not otherwise:
        return f"{said}."
    default = "has them come again" if exclude_seen else "leaves them out"
    option = "without --exclude-seen" if exclude_seen else "with --exclude-seen"
    return (
        f"{said}; `recprune recommend` {default} by default for {', '.join(otherwise)}: judged so "
        f"{option}."
    )


def _rank(
    prepared: Prepared, folder: str, chosen: Int64Array, k: int, parsed: argparse.Namespace
) -> tuple[Int64Array, bool]:
    """Return the best k items of a model for each target: by exact search, where it has an index.

    And whether it has learnt what is taken again. A model that knows time is asked at the time of
    the target.
    """
    histories = [prepared.history(prepared.test, int(target)) for target in chosen]
    timelines = [prepared.timeline(prepared.test, int(target)) for target in chosen]
    exclude = histories if parsed.exclude_seen else None
    model, settings = load_model(folder, prepared)
    repeats = settings.model.repeats > 0
    if settings.model.embedding == "full" and prepared.num_items > MAX_SUB_ITEMS:
        length = settings.model.length
        embeddings = encode_histories(model, length, histories, timelines=timelines)
        boosts = model_boosts(model, settings.model, embeddings, histories, timelines)
        return top_items(model, embeddings, k, exclude, boosts=boosts), repeats
    recommender = Recommender.from_model(prepared, model, settings)
    top = recommender.rank(
        histories, k, timelines=timelines, exclude=exclude, threads=parsed.threads
    )
    return top.ids, repeats


def _names(folders: list[str], taken: set[str]) -> dict[str, str]:
    """Return what to call each model: the last part of its path, if that tells it from others."""
    short = [Path(folder).resolve().name for folder in folders]
    return {
        folder: folder if short.count(name) > 1 or name in taken else name
        for folder, name in zip(folders, short, strict=True)
    }
