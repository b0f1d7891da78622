"""Refreshing a recommender beside training it anew, and beside leaving it as it is.

A log is cut in time. One model knows what lies before. From there it is refreshed with what came
later, with several shares of users who did nothing new; and a model with the same settings is
trained from nothing on all that a refresh may learn from. All are judged by the same users: what
they had first after the newest cut.

    python -m benchmarks.freshness                # groceries of a year, of the demo
    python -m benchmarks.freshness LOG --epochs 9 --set width=128
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.measure import write_result
from recprune import (
    Interactions,
    Prepared,
    RankedUsers,
    Recommender,
    assign_svd,
    compare,
    no_holdout,
    prepare,
    read_interactions,
    refresh,
    temporal_holdout,
    train,
)
from recprune.commands.console import print_table, say
from recprune.commands.settings_options import single_values
from recprune.evaluation.metrics import user_values
from recprune.models.settings import Settings, find_preset
from recprune.types import Json

# Smaller than those of the demo, with codes from the start and without heads: minutes on a processor.
_SETTINGS = {
    "embedding": "recjpq",
    "codes": "svd",
    "width": 32,
    "length": 32,
    "num_negatives": 128,
    "batch_size": 64,
    "learning_rate": 0.002,
    "transitions": 0,
    "repeats": 0,
    "own_scores": 1.0,
    "activity": False,
    "validation_users": 512,
}
_K = 10
_METRIC = "NDCG@10"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("log", nargs="?", help="default: the groceries of the demo")
    parser.add_argument("--known", type=float, default=0.8, help="share of the log before the cut")
    parser.add_argument("--held-out", type=float, default=0.2, help="share of the rest that judges")
    parser.add_argument("--epochs", type=int, default=20, help="of a training from nothing")
    parser.add_argument("--refreshed", type=int, default=6, help="epochs of a refresh, at most")
    parser.add_argument("--replay", type=float, nargs="+", default=[1.0])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, default=Path("out/bench-freshness.json"))
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    log = read_interactions(parsed.log or _groceries())
    values = {**_SETTINGS, "max_epochs": parsed.epochs, "patience": parsed.epochs}
    settings = find_preset("recommended").with_values({**values, **single_values(parsed.set)})
    with TemporaryDirectory() as scratch:
        runs = _measured(log, settings, Path(scratch), parsed)
    print_table(
        f"{log!r}, {runs[0]['users']:,} users",
        (
            "",
            "processor minutes",
            "epochs",
            _METRIC,
            "targets known before",
            "new ones",
            "− as it was",
        ),
        [
            (
                run["name"],
                f"{run['minutes']:.2f}",
                str(run["epochs"]),
                *(f"{run[part]:.4f}" for part in ("ndcg", "known", "new")),
                run["difference"],
            )
            for run in runs
        ],
    )
    write_result(parsed.out, {"log": repr(log), "settings": settings.to_json(), "runs": runs})


def _groceries() -> Path:
    from examples.grocery import data_folder

    return data_folder() / "transactions.parquet"


def _measured(
    log: Interactions, settings: Settings, place: Path, parsed: argparse.Namespace
) -> list[Json]:
    cut = np.sort(log.times)[math.ceil(parsed.known * log.num_interactions) - 1]
    old = place / "old"
    whole, earlier = no_holdout(log), no_holdout(log.select(log.times <= cut))
    prepared = prepare(earlier, assign_svd(earlier.train), {"holdout": "none"})
    minutes, epochs = _trained(prepared, settings, place / "model")
    Recommender.from_training(prepared, place / "model").save(old)
    runs: list[Json] = [{"name": "as it was", "minutes": minutes, "epochs": epochs}]
    judged: list[RankedUsers] = []
    later: Prepared | None = None
    for replay in parsed.replay:
        folder = place / f"refreshed-{replay:g}"
        shutil.copytree(old, folder)
        begun = time.process_time()
        # In place whatever comes of it: that is what is compared here.
        found = refresh(
            folder,
            log,
            held_out=parsed.held_out,
            margin=0.999,
            epochs=parsed.refreshed,
            replay=replay,
            device="cpu",
        )
        say(f"replay {replay:g}: {found.begin_ndcg:.4f} → {found.best_ndcg:.4f}")
        name = f"refreshed, {replay:g} others for each user"
        spent = (time.process_time() - begun) / 60
        runs.append({"name": name, "minutes": spent, "epochs": found.epochs})
        new = Recommender.load(folder)
        later = later or _until(log, new)
        if not judged:
            judged.append(_ranked(Recommender.load(old), log, later))
        judged.append(_ranked(new, log, later))
    assert later is not None
    minutes, epochs = _trained(later, settings, place / "anew")
    runs.append({"name": "trained anew", "minutes": minutes, "epochs": epochs})
    judged.append(_ranked(Recommender.from_training(later, place / "anew"), log, later))
    is_new = np.isin(whole.log.items[later.test.ends], earlier.train.items, invert=True)
    for run, ranked in zip(runs, judged, strict=True):
        values = user_values(ranked, [_METRIC])[_METRIC]
        run |= {"users": len(values), "ndcg": float(values.mean())}
        run |= {"known": float(values[~is_new].mean()), "new": float(values[is_new].mean())}
        if ranked is not judged[0]:
            difference = compare(ranked, judged[0], _METRIC).difference
            run["difference"] = (
                f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
            )
        else:
            run["difference"] = ""
    return runs


def _trained(prepared: Prepared, settings: Settings, folder: Path) -> tuple[float, int]:
    begun = time.process_time()
    state = train(prepared, settings, folder, device="cpu")
    return (time.process_time() - begun) / 60, state.epoch


def _until(log: Interactions, refreshed: Recommender) -> Prepared:
    """Return what a refresh had to learn from and be judged by, with codes of its own."""
    text = refreshed.settings["preparation"]["trained_until"]
    until = np.datetime64(text.removesuffix("+00:00"), "us").astype(np.int64)

    # A little less than the share up to that moment: the cut is at the same event.
    share = (int((log.times <= until).sum()) - 0.5) / log.num_interactions
    holdout = temporal_holdout(
        log, train_fraction=share, validation_users=512, validation="temporal"
    )
    assert holdout.cut_time == until
    return prepare(holdout, assign_svd(holdout.train), {"holdout": "temporal"})


def _ranked(recommender: Recommender, log: Interactions, later: Prepared) -> RankedUsers:
    """Return what is recommended at the time of the targets; an unknown item has no score."""
    ids, targets = recommender.item_ids, later.test
    places = ids.find_all(log.item_ids.take(range(log.num_items)))
    back = log.item_ids.find_all(ids.take(range(len(ids))))
    histories, timelines = [], []
    for target in range(len(targets)):
        history = places[later.history(targets, target)]
        timeline: Any = later.timeline(targets, target)
        histories.append(history[history >= 0].astype(np.int32))
        timelines.append(timeline._replace(times=timeline.times[history >= 0]))
    found = recommender.rank(histories, _K, timelines=timelines).ids
    return RankedUsers.of_targets(np.where(found >= 0, back[found], -1), targets.items)


if __name__ == "__main__":
    main()
