"""What experiments are run on: logs are prepared, models trained and users encoded, once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recprune.data.formats import LogFormat
from recprune.data.interactions import read_interactions
from recprune.data.statistics import iso_time
from recprune.data.synthetic import SyntheticSettings, write_synthetic_log
from recprune.experiments.framework.experiment import LogFolder, Need
from recprune.experiments.framework.workload import Workload
from recprune.models.settings import Settings, find_preset
from recprune.preparation.codebook import assign_svd
from recprune.preparation.holdout import temporal_holdout
from recprune.preparation.prepared import Prepared, prepare
from recprune.storage import MANIFEST, writing_file
from recprune.training.checkpoint import CHECKPOINT, MODEL
from recprune.training.loop import EpochReport, train
from recprune.types import InputError, Progress, StorageError, no_progress

# The paper's three models, by the presets that train them.
PAPER_MODELS = {"sasrecjpq": "sasrec", "gsasrecjpq": "gsasrec", "gbert4recjpq": "gbert4rec"}
_FULL_MODEL = "sasrec"
# Models that are trained to be pruned: gSASRecJPQ, and one thing more.
_VARIANTS = {
    f"{loss}_{weight:g}": {"pruning_loss": loss, "pruning_weight": weight}
    for loss in ("agreement", "concentration")
    for weight in (0.0003, 0.003)
}
# Models that differ in their codes: as prepared, and learnt ones of two lengths. Named as the
# folders of benchmarks.quality, whose models can stand in for them.
_CODES: dict[str, dict[str, Any]] = {
    "svd-codes": {"embedding": "recjpq", "codes": "svd"},
    "learnt-m-8": {"embedding": "recjpq", "codes": "learnt", "num_splits": 8},
    "learnt-m-16": {"embedding": "recjpq", "codes": "learnt", "num_splits": 16},
}
# Where training differs from the presets. An epoch count as large as the patience of 200 would keep
# early stopping from ever acting.
_TRAINING = {"max_epochs": 1000}
# On logs that are not the paper's, what was better on their validation users: histories are long.
_OWN_LOGS = {"gitlog", "tmall-like"}
_OWN_TRAINING = {"windows": "random"}
_OWN_MODELS = {"gsasrecjpq": {"dropout": 0.5}}
_MIN_HISTORY = 5
_SOURCE = "source.json"  # lies beside a prepared log, and says of which file it was made
_WAY_OUT = "remove it, or give the log another name"
_UNFINISHED = "unfinished"  # lies beside a model whose training must go on


@dataclass(frozen=True)
class NamedLog:
    """A log as the command line names it."""

    name: str
    path: Path | None  # None: it has been prepared already
    log_format: LogFormat = "auto"


def log_folder(
    source: NamedLog,
    folder: Path,
    *,
    needs: Set[Need],
    may_train: bool,
    memory_bytes: int,
    changes: Mapping[str, Any],
    progress: Progress,
    announce: Progress = no_progress,
) -> LogFolder:
    """Return a log with its models; what is missing is made from the log.

    `folder` gets `prepared`, `models/NAME` for each of the paper's models (and SASRec with a full
    table, if that fits into memory), `variants/NAME` for those that are trained to be pruned and
    `codes/NAME` for those that differ in their codes.
    Models that were trained elsewhere are found there too. Only what is in `needs` is trained;
    without `may_train`, what is not there is left out, but for the paper's three. `changes` are
    settings of training in place of the usual ones.
    """
    prepared_folder = folder / "prepared"
    if not (prepared_folder / MANIFEST).exists():
        if source.path is None:
            raise InputError(f"{prepared_folder}: not there, and no log to make it from")
        _prepare(source.path, source.log_format, prepared_folder, progress)
        _write_source(folder / _SOURCE, source.path)
    prepared = Prepared.load(prepared_folder)
    _check_source(source, prepared, prepared_folder)
    for model, settings in wanted_models(
        source.name, prepared, needs, memory_bytes, changes
    ).items():
        target = folder / model
        if (target / MODEL).exists() and not (target / _UNFINISHED).exists():
            continue
        if may_train:
            announce(f"training {source.name}, {target.name}")
            _train(prepared, settings, target, progress, f"{source.name}, {target.name}")
        elif target.name in PAPER_MODELS:
            raise InputError(f"{target}: there is no trained model, and --no-train was given")
    return LogFolder(
        source.name,
        source.path,
        source.log_format,
        prepared_folder,
        {path.name: path for path in _trained(folder / "models")},
        {path.name: path for path in _trained(folder / "variants")},
        {path.name: path for path in _trained(folder / "codes")},
    )


def quick_log(path: Path) -> Path:
    """Return a small synthetic log, written there if it is not there yet."""
    if not path.exists():
        settings = SyntheticSettings(num_users=1_500, num_items=5_000, num_interactions=60_000)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synthetic_log(path, settings)
    return path


def workload_of(
    log: LogFolder,
    model: str,
    trained: Path,
    folder: Path,
    users: int,
    progress: Progress,
) -> Workload:
    """Return the workload of a trained model, encoded once and then kept in `folder`."""
    if (folder / MANIFEST).exists() and _is_newer(folder / MANIFEST, trained / MODEL):
        return Workload.load(folder)
    progress(f"encoding the test users of {log.name} with {model}")
    prepared = Prepared.load(log.prepared)
    workload = Workload.from_training(log.name, model, prepared, trained, users)
    workload.save(folder)
    return workload


def wanted_models(
    log: str,
    prepared: Prepared,
    needs: Set[Need],
    memory_bytes: int,
    changes: Mapping[str, Any],
) -> dict[str, Settings]:
    """Return the models that there should be, by folder."""
    own = log in _OWN_LOGS

    def settings(model: str, extra: Mapping[str, Any]) -> Settings:
        usual = {**_TRAINING, **(_OWN_TRAINING if own else {})}
        usual |= _OWN_MODELS.get(model, {}) if own else {}
        return find_preset(PAPER_MODELS[model]).with_values({**usual, **extra, **changes})

    wanted: dict[str, Settings] = {}
    if needs & {"models", "workloads"}:
        wanted |= {f"models/{model}": settings(model, {}) for model in PAPER_MODELS}
    if "full" in needs:
        full = settings("sasrecjpq", {"embedding": "full"})
        # Weights, gradients, and Adam's two moments.
        if 16 * prepared.num_items * full.model.width <= memory_bytes // 2:
            wanted[f"models/{_FULL_MODEL}"] = full
    if "variants" in needs:
        for variant, extra in _VARIANTS.items():
            wanted[f"variants/{variant}"] = settings("gsasrecjpq", extra)
    if "codes" in needs:
        recommended = find_preset("recommended")
        for name, codes in _CODES.items():
            wanted[f"codes/{name}"] = recommended.with_values({**_TRAINING, **codes, **changes})
    return wanted


def _prepare(source: Path, log_format: LogFormat, folder: Path, progress: Progress) -> None:
    """Hold out and assign codes as in the paper (section 5.2)."""
    progress(f"reading {source.name}")
    log = read_interactions(source, log_format=log_format, progress=progress)
    holdout = temporal_holdout(log, min_history=_MIN_HISTORY)
    progress(f"assigning sub-item ids to {log.num_items:,} items")
    codebook = assign_svd(holdout.train, progress=progress)
    settings = {
        "log": source.name,
        "holdout": "temporal",
        "min_history": _MIN_HISTORY,
        "cut_time": iso_time(holdout.cut_time or 0),
    }
    prepare(holdout, codebook, settings).save(folder)


def _check_source(source: NamedLog, prepared: Prepared, folder: Path) -> None:
    """Refuse a folder that was prepared from another log: by name, and by what the log holds."""
    if source.path is None:
        return
    made_from = prepared.settings.get("log")
    if made_from != source.path.name:
        raise StorageError(
            f"{folder}: was made from {made_from}, not from {source.path.name}: {_WAY_OUT}"
        )
    kept = folder.parent / _SOURCE  # a folder that was prepared elsewhere has none
    if kept.exists() and kept.read_text(encoding="utf-8") != _description(source.path):
        raise StorageError(
            f"{folder}: was made from another {source.path.name} than {source.path}: {_WAY_OUT}"
        )


def _write_source(path: Path, source: Path) -> None:
    with writing_file(path) as temporary:
        temporary.write_text(_description(source), encoding="utf-8")


def _description(source: Path) -> str:
    """Return size and checksum of a log; of a folder, those of all its files."""
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    total = hashlib.sha256()
    for path in (path for path in files if path.is_file()):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    size = sum(path.stat().st_size for path in files if path.is_file())
    return json.dumps({"bytes": size, "sha256": total.hexdigest()}) + "\n"


def _train(
    prepared: Prepared, settings: Settings, folder: Path, progress: Progress, what: str
) -> None:
    """Train a model, or go on with one whose training was interrupted."""

    def show(report: EpochReport) -> None:
        progress(
            f"training {what}: epoch {report.epoch} of at most {settings.training.max_epochs}, "
            f"NDCG@10 {report.ndcg:.4f}"
        )

    progress(f"training {what}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _UNFINISHED).touch()
    train(prepared, settings, folder, resume=(folder / CHECKPOINT).exists(), on_epoch=show)
    (folder / _UNFINISHED).unlink()


def _trained(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"*/{MODEL}"))


def _is_newer(first: Path, second: Path) -> bool:
    return first.stat().st_mtime_ns >= second.stat().st_mtime_ns
