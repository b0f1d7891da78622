"""The paper's appendix: how good each model is, how long φ takes, how large a checkpoint is."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from recprune.evaluation.baselines.every_baseline import every_baseline
from recprune.evaluation.metrics import RankedUsers, user_values
from recprune.evaluation.resampling import bootstrap_mean
from recprune.experiments.framework.experiment import (
    ExperimentPart,
    LogFolder,
    Need,
    Setup,
    model_name,
    section_of,
)
from recprune.experiments.framework.record import Record, by_log
from recprune.experiments.framework.workload import test_users
from recprune.experiments.paper import published
from recprune.experiments.peers.families import one_thread
from recprune.experiments.report.document import Block, Section, Table, Text
from recprune.models.inference import Encoder, TorchEncoder
from recprune.models.ranking import model_boosts, top_items
from recprune.preparation.prepared import Prepared
from recprune.recommender.recommender import Recommender
from recprune.training.checkpoint import EPOCHS, MODEL, load_model
from recprune.types import (
    MAX_SUB_ITEMS,
    Int32Array,
    Int64Array,
    Json,
    Progress,
    Timeline,
)

_BASELINES = "baselines"
_BASELINE_LIST = 2  # raised with the list of baselines: records of the one before are made anew
_USERS = 2048  # test users that are ranked
_TIMED = 512  # histories that are encoded one by one


class Appendix:
    """NDCG@10, time to φ and size of the checkpoint; beside them the plainest baselines."""

    name = "appendix"
    title = "Appendix: the models"
    needs: frozenset[Need] = frozenset({"log", "models", "full"})

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each model, and one for the baselines of each log."""
        return [
            part
            for log in setup.logs
            for part in (
                *(
                    self._model_part(setup, log, model, folder)
                    for model, folder in log.models.items()
                ),
                self._baseline_part(setup, log),
            )
        ]

    def _model_part(self, setup: Setup, log: LogFolder, model: str, folder: Path) -> ExperimentPart:
        users = setup.sized(_USERS, 100)
        with (folder / MODEL).open("rb") as weights:
            checksum = hashlib.file_digest(weights, "sha256").hexdigest()[:16]
        settings = {"users": users, "weights": checksum}
        return ExperimentPart(
            f"{log.name}-{model}",
            settings,
            lambda progress: measure_model(log, model, folder, users, progress),
            minutes=2.0,
        )

    def _baseline_part(self, setup: Setup, log: LogFolder) -> ExperimentPart:
        users = setup.sized(_USERS, 100)
        checksum = Prepared.load(log.prepared).checksum()[:16]
        return ExperimentPart(
            f"{log.name}-{_BASELINES}",
            {"users": users, "prepared": checksum, "list": _BASELINE_LIST},
            lambda progress: _measure_baselines(log, users, progress),
            minutes=0.5,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A table for each log."""
        return section_of(
            self,
            "NDCG@10 over the full catalogue with 95 % bootstrap intervals; time to φ of one "
            "history on one thread, by ONNX Runtime and by torch, over test histories as they "
            "are; size of the checkpoint, and what it would be with a vector for every item.",
            *(_blocks(log, own) for log, own in by_log(records).items()),
            [_published()],
        )


def measure_model(log: LogFolder, model: str, folder: Path, users: int, progress: Progress) -> Json:
    prepared = Prepared.load(log.prepared)
    chosen = test_users(prepared, users)
    histories = [prepared.history(prepared.test, int(target)) for target in chosen]
    timelines = [prepared.timeline(prepared.test, int(target)) for target in chosen]
    targets = prepared.test.items[chosen]
    trained, settings = load_model(folder, prepared)
    size = (folder / MODEL).stat().st_size / 1e6
    figures: Json = {
        "log": log.name,
        "model": model,
        "items": prepared.num_items,
        "users": len(chosen),
        "settings": settings.to_json(),
        "megabytes": size,
        "full_megabytes": size,
        **_epochs(folder),
        "median_history": float(np.median([len(history) for history in histories])),
    }
    encoder = TorchEncoder(trained, settings.model.length)
    progress(f"encoding with {model}")
    with one_thread():
        figures |= _time_to_phi(encoder, histories, timelines, "torch")
    if settings.model.embedding == "full" and prepared.num_items > MAX_SUB_ITEMS:
        import torch

        embeddings = torch.from_numpy(encoder.encode(histories, timelines))
        boosts = model_boosts(trained, settings.model, embeddings, histories, timelines)
        ids = top_items(trained, embeddings.to(trained.norm.weight.device), 10, boosts=boosts)
        return figures | _quality(ids, targets)
    recommender = Recommender.from_model(prepared, trained, settings)
    if settings.model.embedding == "recjpq":
        own = recommender.index.sub_item_embeddings().nbytes / 1e6
        whole = 4 * prepared.num_items * settings.model.width / 1e6
        figures["full_megabytes"] = size - own + whole
    with TemporaryDirectory() as scratch:
        recommender.save(f"{scratch}/recommender")
        served = Recommender.load(f"{scratch}/recommender", encoder="onnx")
        figures |= _time_to_phi(served.encoder, histories, timelines, "onnx")
        by_onnx = served.encoder.encode(histories, timelines)
    by_torch = recommender.encoder.encode(histories, timelines)
    threads = os.cpu_count() or 1
    ids, served_ids = (
        recommender.index.search(
            embeddings,
            10,
            boosts=recommender.heads(embeddings, histories, timelines).total(),
            threads=threads,
        ).ids
        for embeddings in (by_torch, by_onnx)
    )
    figures["same_top_10"] = float((ids == served_ids).all(1).mean())
    figures["largest_difference"] = float(np.abs(by_torch - by_onnx).max())
    return figures | _quality(ids, targets)


def _epochs(folder: Path) -> Json:
    """Return how long a model was trained, and up to which epoch it grew better, where known."""
    path = folder / EPOCHS
    if not path.exists():
        return {"epochs": None}
    epochs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    best = [entry["epoch"] for entry in epochs if entry["best"]]
    return {"epochs": len(epochs), "best_epoch": best[-1] if best else 0}


def _measure_baselines(log: LogFolder, users: int, progress: Progress) -> Json:
    prepared = Prepared.load(log.prepared)
    chosen = test_users(prepared, users)
    histories = [prepared.history(prepared.test, int(target)) for target in chosen]
    found: Json = {}
    for baseline in every_baseline(prepared.train_log(), temporal=prepared.is_temporal()):
        progress(baseline.name)
        ids = baseline.recommend(histories, 10, exclude_seen=False)
        found[baseline.name] = _quality(ids, prepared.test.items[chosen])
    return {"log": log.name, "model": _BASELINES, "baselines": found}


def _quality(ids: Int64Array | Int32Array, targets: Int32Array) -> Json:
    values = user_values(RankedUsers.of_targets(ids, targets), ["NDCG@10", "Recall@10"])
    ndcg = bootstrap_mean(values["NDCG@10"])
    return {
        "ndcg": ndcg.mean,
        "ndcg_low": ndcg.low,
        "ndcg_high": ndcg.high,
        "recall": float(values["Recall@10"].mean()),
    }


def _time_to_phi(
    encoder: Encoder,
    histories: Sequence[Int32Array],
    timelines: Sequence[Timeline | None],
    name: str,
) -> Json:
    encoder.encode(histories[:1], timelines[:1])
    milliseconds = []
    for history, timeline in list(zip(histories, timelines, strict=True))[:_TIMED]:
        begun = time.perf_counter()
        encoder.encode([history], [timeline])
        milliseconds.append(1000 * (time.perf_counter() - begun))
    p50, p95 = (float(np.percentile(milliseconds, at)) for at in (50, 95))
    return {f"{name}_ms": p50, f"{name}_p95_ms": p95}


def _blocks(log: str, records: Sequence[Record]) -> list[Block]:
    rows, baselines = [], []
    for record in records:
        figures = record.figures
        if figures["model"] == _BASELINES:
            baselines = [
                (name, _interval(entry), f"{entry['recall']:.4f}", "", "", "", "")
                for name, entry in figures["baselines"].items()
            ]
            continue
        onnx = "onnx_ms" in figures
        rows.append(
            (
                model_name(figures["model"]),
                _interval(figures),
                f"{figures['recall']:.4f}",
                f"{figures['onnx_ms']:.1f} / {figures['onnx_p95_ms']:.1f}" if onnx else "",
                f"{figures['torch_ms']:.1f} / {figures['torch_p95_ms']:.1f}",
                f"{figures['megabytes']:,.1f}",
                f"{figures['full_megabytes']:,.1f}",
            )
        )
    models = [record.figures for record in records if record.figures["model"] != _BASELINES]
    note = ""
    if models:
        note = (
            f"{models[0]['users']:,} test users, {models[0]['items']:,} items, histories of "
            f"{models[0]['median_history']:.0f} items in the median; times to φ over "
            f"{min(_TIMED, models[0]['users']):,} of them."
        )
        same = [figures["same_top_10"] for figures in models if "same_top_10" in figures]
        if same:
            note += " The exported encoder gives the same top 10 as the trained one for " + (
                "all users." if min(same) == 1.0 else f"{min(same):.2%} of users or more."
            )
    if baselines and models:
        note += " " + _verdict(records)
    trained = " ".join(
        f"{model_name(figures['model'])}: {_training(figures)}." for figures in models
    )
    header = (
        "model",
        "NDCG@10",
        "Recall@10",
        "φ ms, median / p95",
        "by torch",
        "checkpoint MB",
        "with a full table",
    )
    blocks: list[Block] = [Text(f"**{log}**"), Table(header, (*rows, *baselines), note)]
    return [*blocks, Text(f"Trained with: {trained}")] if trained else blocks


def _verdict(records: Sequence[Record]) -> str:
    """Say whether the models beat the baselines."""
    scores = {}
    for record in records:
        if record.figures["model"] == _BASELINES:
            baselines = {name: entry["ndcg"] for name, entry in record.figures["baselines"].items()}
        else:
            scores[model_name(record.figures["model"])] = record.figures["ndcg"]
    best = max(baselines, key=lambda name: float(baselines[name]))
    better = [name for name, score in scores.items() if score > baselines[best]]
    if not better:
        return f"No model beats the best baseline here, {best} ({baselines[best]:.4f})."
    return f"Better than the best baseline, {best} ({baselines[best]:.4f}): {', '.join(better)}."


def _training(figures: Json) -> str:
    model, training = figures["settings"]["model"], figures["settings"]["training"]
    epochs = figures.get("epochs")
    return (
        f"{training['loss']} with {training['num_negatives']} negatives, d = {model['width']}, "
        f"dropout {model['dropout']}, {training['windows']} windows"
        + (f", {epochs} epochs{_how_it_ended(figures)}" if epochs else "")
    )


def _how_it_ended(figures: Json) -> str:
    """Say of a training that it ended before its settings would have ended it."""
    training, epochs = figures["settings"]["training"], figures["epochs"]
    # Older records lack the best epoch: patience cannot have run out in fewer epochs.
    without_best = epochs - figures.get("best_epoch", 0)
    if epochs >= training["max_epochs"] or without_best >= training["patience"]:
        return ""
    return " (ended by a time limit, before early stopping could act)"


def _published() -> Table:
    return Table(
        ("published", "model", "NDCG@10", "φ ms", "checkpoint MB"),
        tuple(
            (
                entry.log,
                model_name(entry.model),
                f"{entry.ndcg:.4f}",
                f"{entry.phi_ms:.2f}",
                f"{entry.megabytes:,}",
            )
            for entry in published.MODELS
        ),
        f"Published: Table 3 of {published.SOURCE}; {published.MACHINE}, other logs and another "
        "machine than ours. SASRec: as quoted there from earlier work.",
    )


def _interval(figures: Json) -> str:
    return f"{figures['ndcg']:.4f} [{figures['ndcg_low']:.4f}, {figures['ndcg_high']:.4f}]"
