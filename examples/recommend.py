"""The middle of the guided tour: a model trained on the grocery log, and what it recommends.

Runs after `grocery.py`, on the same log: two minutes on two cores.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
from rich.text import Text

import recprune
from examples.grocery import data_folder, product_names
from recprune.commands.console import output, print_table, showing_progress
from recprune.commands.tables import print_repeats
from recprune.evaluation.comparison import verdict
from recprune.evaluation.evaluation import evaluate, evaluation_rows
from recprune.models.settings import find_preset
from recprune.training.curves import draw_training
from recprune.training.loop import EpochReport

EPOCHS = 9
NAME = "timed, with learnt codes and repeats"
HOUSEHOLDS = 3
SHOWN = 10
# Small enough for a processor: a GPU would take the preset as it is.
SETTINGS = {
    "width": 64,
    "length": 64,
    "num_negatives": 512,
    "batch_size": 64,
    "learning_rate": 0.002,
    "transitions": 0,  # of little use here: who buys milk buys anything next
    "validation_users": 512,
}


def main() -> None:
    """Train, evaluate, recommend, and compare the search with exhaustive scoring."""
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else EPOCHS
    out = Path(sys.argv[2] if len(sys.argv) > 2 else "out/grocery-model")
    data = data_folder()
    log = recprune.read_interactions(data / "transactions.parquet")
    # Asked for the beginning of a basket, as the test asks; in the middle of one is easier.
    holdout = recprune.temporal_holdout(log, validation_users=512, validation="sitting")
    prepared = recprune.prepare(holdout, recprune.assign_svd(holdout.train), {"log": "grocery"})

    output.rule("5. A model learns what comes next")
    # Codes are cut before the last epoch, which learns with them.
    length = {"max_epochs": epochs, "full_epochs": epochs - 1}
    settings = find_preset("recommended").with_values({**SETTINGS, **length})
    recommender = _train(prepared, settings, out)

    output.rule("6. Does it beat what needs no model?")
    _evaluate(prepared, holdout.train, recommender)

    output.rule("7. What it recommends")
    names = product_names(pl.read_parquet(data / "products.parquet"))
    table = pl.DataFrame({"item_id": list(names), "name": list(names.values())})
    table.write_csv(out / "names.csv")
    _recommend(prepared, recommender, names)

    output.rule("8. The exact search against exhaustive scoring, for these users")
    _search(prepared, recommender)

    output.rule("9. A product arrives, is recommended, filtered, and leaves")
    _change(prepared, recommender, names, out / "catalogue")


def _train(
    prepared: recprune.Prepared, settings: recprune.Settings, out: Path
) -> recprune.Recommender:
    begun = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    with showing_progress("training") as progress:

        def show(report: EpochReport) -> None:
            progress(f"epoch {report.epoch}, NDCG@10 {report.ndcg:.4f}")

        state = recprune.train(prepared, settings, out / "training", device="cpu", on_epoch=show)
    picture = out / "training.png"
    draw_training(out / "training" / "epochs.jsonl", picture)
    recommender = recprune.Recommender.from_training(prepared, out / "training")
    recommender.save(out / "recommender")
    output.print(
        f"{state.epoch} epochs, {state.steps} steps in {time.monotonic() - begun:.0f} s, best "
        f"validation NDCG@10 {state.best_ndcg:.4f}. The training as a picture: [bold]{picture}[/]"
    )
    return recprune.Recommender.load(out / "recommender")  # from here on without torch


def _evaluate(
    prepared: recprune.Prepared, train: recprune.Interactions, recommender: recprune.Recommender
) -> None:
    histories = [prepared.history(prepared.test, at) for at in range(len(prepared.test))]
    with showing_progress("evaluating"):
        timelines = [prepared.timeline(prepared.test, at) for at in range(len(prepared.test))]
        found = recommender.rank(histories, 10, timelines=timelines)
        ranked = {NAME: found.ids}
        for baseline in recprune.every_baseline(train):
            ranked[baseline.name] = baseline.recommend(histories, 10, exclude_seen=False)
        users = {
            name: recprune.RankedUsers.of_targets(ids, prepared.test.items)
            for name, ids in ranked.items()
        }
        evaluations = [
            evaluate(one, train, name=name, histories=histories) for name, one in users.items()
        ]
    columns = ("NDCG@10", "Recall@10")
    title = f"{len(histories):,} households, {prepared.num_items:,} products, all ranked"
    print_table(title, ("", *columns), evaluation_rows(evaluations, columns))
    print_repeats(evaluations, columns)
    model = users.pop(NAME)
    output.print(verdict(NAME, model, users), soft_wrap=True)


def _recommend(
    prepared: recprune.Prepared, recommender: recprune.Recommender, names: dict[object, str]
) -> None:
    ids, offsets, test = prepared.item_ids, prepared.offsets, prepared.test
    left = offsets[test.users.astype(np.int64) + 1] - test.ends
    busy = np.flatnonzero(left >= 40)  # purchases after the cut, to compare with
    chosen = busy[np.linspace(0, len(busy) - 1, HOUSEHOLDS + 2).astype(int)[1:-1]]
    for at in chosen:
        user = int(test.users[at])
        history = prepared.history(test, int(at))
        later = set(prepared.items[test.ends[at] : offsets[user + 1]].tolist())
        external = ids.take(history.tolist())
        timeline = prepared.timeline(test, int(at))
        found = recommender.recommend(
            [external],
            SHOWN,
            times=[timeline.times.tolist()] if timeline is not None else None,
            now=timeline.now if timeline is not None else None,
        )
        rows = []
        recent = list(dict.fromkeys(external[::-1]))[:SHOWN]
        for past, best, item in zip(recent, found.items[0], found.ids[0].tolist(), strict=False):
            bought = Text("bought", style="bold green") if item in later else Text("")
            again = Text("again") if item in set(history.tolist()) else Text("new")
            rows.append((_short(names, past), _short(names, best), again, bought))
        print_table(
            f"Household {prepared.user_ids[user]}: {len(history)} purchases; {len(later)} "
            "products in the weeks after",
            ("bought last", "recommended", "", "afterwards"),
            rows,
        )


def _search(prepared: recprune.Prepared, recommender: recprune.Recommender) -> None:
    histories = [prepared.history(prepared.test, at) for at in range(min(500, len(prepared.test)))]
    embeddings = recommender.encoder.encode(histories)
    expected = recommender.index.search(embeddings, 10, method="pqtopk")
    rows = []
    for method in ("pqtopk", "recjpqprune", "scan", "auto"):  # from exhaustive to our default
        top = recommender.index.search(embeddings, 10, method=method)
        same = np.array_equal(top.ids, expected.ids) and np.array_equal(top.scores, expected.scores)
        rows.append(
            (
                method,
                f"{np.median(top.stats.nanoseconds) / 1e3:.0f}",
                f"{np.median(top.stats.items_scored) / prepared.num_items:.2%}",
                "✓" if same else "NO",
            )
        )
    header = ("method", "microseconds", "products scored", "same ids and bits")
    print_table(f"Medians of {len(histories)} households", header, rows)


def _change(
    prepared: recprune.Prepared,
    recommender: recprune.Recommender,
    names: dict[object, str],
    folder: Path,
) -> None:
    history = prepared.history(prepared.test, 0)
    external = [prepared.item_ids.take(history.tolist())]
    # The code that this household would like best; a shop would take that of a similar product.
    embedding = recommender.encoder.encode([history])[0]
    code = recommender.index.sub_item_scores(embedding).argmax(axis=1)
    new = 1 + max(int(product) for product in prepared.item_ids.take(range(prepared.num_items)))
    names = {**names, new: "The new product"}
    known = prepared.item_ids.take(range(prepared.num_items))
    shelves = {"item_id": [*known], "shelf": ["groceries"] * prepared.num_items}
    recommender = recommender.with_attributes(
        recprune.Attributes.from_table(shelves, recommender.item_ids)
    )
    rows = []
    with recommender.make_live(folder) as live:
        living = recommender.with_live(live)

        def note(what: str, where: str | None = None) -> None:
            found = living.recommend(external, 2, exclude_seen=True, where=where).items[0]
            rows.append((what, *(_short(names, product) for product in found)))

        note(f"{live.num_present:,} products")
        said = {"attributes": {"shelf": "novelties"}}  # in the same change
        code = code[None].astype(recommender.index.item_codes().dtype)
        [number] = live.put([new], code, notes=[said])
        note(f"product {new} added, as number {number:,}")
        for where in ("shelf = 'novelties'", "shelf = 'groceries'"):
            note(f"where {where}", where)
        live.remove([number])
        note("removed")
    print_table("One household's best", ("", "1", "2"), [(*row, "")[:3] for row in rows])


def _short(names: dict[object, str], external_id: object) -> str:
    name = names.get(external_id, "unnamed product")
    return name if len(name) <= 25 else name[:24] + "…"


if __name__ == "__main__":
    main()
