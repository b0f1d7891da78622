"""What experiments are run on: logs are prepared, models trained and users encoded, once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from recprune.checkpoint import CHECKPOINT, MODEL
from recprune.codebook import assign_svd
from recprune.experiments.experiment import LogFolder
from recprune.experiments.workload import Workload
from recprune.holdout import temporal_holdout
from recprune.interactions import read_interactions
from recprune.prepared import Prepared, prepare
from recprune.settings import Settings, find_preset
from recprune.statistics import iso_time
from recprune.storage import MANIFEST
from recprune.synthetic import SyntheticSettings, write_synthetic_log
from recprune.training import EpochReport, train
from recprune.types import InputError, Progress

# The paper's three models, by the presets that train them.
PAPER_MODELS = {"sasrecjpq": "sasrec", "gsasrecjpq": "gsasrec", "gbert4recjpq": "gbert4rec"}
_MIN_HISTORY = 5
_UNFINISHED = "unfinished"  # lies beside a model whose training must go on


def log_folder(
    name: str,
    source: Path | None,
    folder: Path,
    *,
    changes: Mapping[str, object] | None = None,
    progress: Progress,
) -> LogFolder:
    """Return a log with its models; what is missing is made from the log.

    `folder` gets `prepared`, and `models/NAME` for each of the paper's models. Models that were
    trained elsewhere are found there too, others to compare with in `variants/NAME`. `changes` are
    settings of training in place of the paper's.
    """
    prepared_folder = folder / "prepared"
    if not (prepared_folder / MANIFEST).exists():
        if source is None:
            raise InputError(f"{prepared_folder}: not there, and no log to make it from")
        _prepare(source, prepared_folder, progress)
    for model, preset in PAPER_MODELS.items():
        target = folder / "models" / model
        if not (target / MODEL).exists() or (target / _UNFINISHED).exists():
            settings = find_preset(preset).with_values(changes or {})
            _train(Prepared.load(prepared_folder), settings, target, progress, f"{name}, {model}")
    return LogFolder(
        name,
        source,
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


def _prepare(source: Path, folder: Path, progress: Progress) -> None:
    """Hold out and assign codes as in the paper (section 5.2)."""
    progress(f"reading {source.name}")
    log = read_interactions(source, progress=progress)
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


def _train(
    prepared: Prepared, settings: Settings, folder: Path, progress: Progress, what: str
) -> None:
    """Train a model, or go on with one whose training was interrupted."""

    def show(report: EpochReport) -> None:
        progress(f"training {what}: epoch {report.epoch}, NDCG@10 {report.ndcg:.4f}")

    progress(f"training {what}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _UNFINISHED).touch()
    train(prepared, settings, folder, resume=(folder / CHECKPOINT).exists(), on_epoch=show)
    (folder / _UNFINISHED).unlink()


def _trained(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"*/{MODEL}"))


def _is_newer(first: Path, second: Path) -> bool:
    return first.stat().st_mtime_ns >= second.stat().st_mtime_ns
