"""What experiments are run on: logs are prepared, models trained and users encoded, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recprune.checkpoint import CHECKPOINT, MODEL
from recprune.codebook import assign_svd
from recprune.experiments.experiment import LogFolder
from recprune.experiments.workload import Workload
from recprune.formats import LogFormat
from recprune.holdout import temporal_holdout
from recprune.interactions import read_interactions
from recprune.prepared import Prepared, prepare
from recprune.settings import Settings, find_preset
from recprune.statistics import iso_time
from recprune.storage import MANIFEST
from recprune.synthetic import SyntheticSettings, write_synthetic_log
from recprune.training import EpochReport, train
from recprune.types import InputError, Progress, StorageError

# The paper's three models, by the presets that train them.
PAPER_MODELS = {"sasrecjpq": "sasrec", "gsasrecjpq": "gsasrec", "gbert4recjpq": "gbert4rec"}
_FULL_MODEL = "sasrec"
# Models that are trained to be pruned: gSASRecJPQ, and one thing more.
_VARIANTS = {
    "agreement_0.003": {"pruning_loss": "agreement", "pruning_weight": 0.003},
    "concentration_0.0003": {"pruning_loss": "concentration", "pruning_weight": 0.0003},
}
_MIN_HISTORY = 5
_UNFINISHED = "unfinished"  # lies beside a model whose training must go on


@dataclass(frozen=True)
class Source:
    """A log that a person named."""

    name: str
    path: Path | None  # None: it has been prepared already
    log_format: LogFormat = "auto"


def log_folder(
    source: Source,
    folder: Path,
    *,
    may_train: bool,
    memory_bytes: int,
    changes: Mapping[str, Any],
    progress: Progress,
) -> LogFolder:
    """Return a log with its models; what is missing is made from the log.

    `folder` gets `prepared`, `models/NAME` for each of the paper's models (and SASRec with a full
    table, if that fits into memory) and `variants/NAME` for those that are trained to be pruned.
    Models that were trained elsewhere are found there too. Without `may_train`, what is not there
    is left out, but for the paper's three, which are needed. `changes` are settings of training in
    place of the paper's.
    """
    prepared_folder = folder / "prepared"
    if not (prepared_folder / MANIFEST).exists():
        if source.path is None:
            raise InputError(f"{prepared_folder}: not there, and no log to make it from")
        _prepare(source.path, source.log_format, prepared_folder, progress)
    prepared = Prepared.load(prepared_folder)
    _check_source(source, prepared, prepared_folder)
    for model, settings in _wanted(prepared, memory_bytes, changes).items():
        target = folder / model
        if (target / MODEL).exists() and not (target / _UNFINISHED).exists():
            continue
        if may_train:
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


def _wanted(
    prepared: Prepared, memory_bytes: int, changes: Mapping[str, Any]
) -> dict[str, Settings]:
    """Return the models that there should be, by folder."""
    wanted = {
        f"models/{model}": find_preset(preset).with_values(changes)
        for model, preset in PAPER_MODELS.items()
    }
    full = find_preset("sasrec").with_values({**changes, "embedding": "full"})
    # Weights, gradients, and Adam's two moments.
    if 16 * prepared.num_items * full.model.width <= memory_bytes // 2:
        wanted[f"models/{_FULL_MODEL}"] = full
    for variant, extra in _VARIANTS.items():
        wanted[f"variants/{variant}"] = find_preset("gsasrec").with_values({**changes, **extra})
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


def _check_source(source: Source, prepared: Prepared, folder: Path) -> None:
    """Refuse a folder that was prepared from another log."""
    made_from = prepared.settings.get("log")
    if source.path is not None and made_from != source.path.name:
        raise StorageError(
            f"{folder}: was made from {made_from}, not from {source.path.name}: remove it, or give "
            "the log another name"
        )


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
