"""Which settings suit a log: trainings with different ones, judged on validation users alone.

Optuna (Akiba et al., KDD 2019) draws the settings: at random first, then where trials were good
(TPE). A trial whose best epoch so far is worse than the median of earlier trials at the same epoch
is given up. Everything is in one folder, so that a tuning can be stopped and go on.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recprune.models.settings import Settings
from recprune.preparation.prepared import Prepared
from recprune.storage import writing_file, writing_to
from recprune.training.checkpoint import CHECKPOINT, MODEL
from recprune.training.loop import EpochReport, find_device, train
from recprune.training.stages import training_is_over
from recprune.training.tuning_space import read_space
from recprune.types import (
    InputError,
    InterruptedWorkError,
    Json,
    RecpruneError,
    StorageError,
    needs_extra,
)

with needs_extra("tune"):
    import optuna
    import sqlalchemy
    import torch
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial, TrialState

STUDY = "study.db"
TABLE = "trials.csv"
BEST = "best.json"
TRIALS = "trials"
_PROGRESS = "progress"  # of a trial, as the study keeps it
_STARTUP_TRIALS = 5  # run to their end before the median of trials is trusted
_WARMUP_EPOCHS = 3  # before whose end no trial is given up
_ATTEMPTS = 30  # at drawing settings that were not tried yet
_FAILURES = 10  # in a row, after which something else is wrong than the settings
_NAMES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "given up",
    TrialState.RUNNING: "unfinished",
    TrialState.FAIL: "failed",
}


@dataclass(frozen=True)
class TrialReport:
    """How one training went."""

    number: int
    state: str  # complete, given up, unfinished or failed
    ndcg: float | None  # @10 of the validation users, in the best epoch; None before the first
    best_epoch: int
    epochs: int
    seconds: float
    values: Mapping[str, Any]  # of the settings that are tried
    reason: str  # of a failure


class _HopelessError(Exception):
    """A trial is given up."""


def tune(
    prepared: Prepared,
    settings: Settings,
    out: str | Path,
    *,
    space: Mapping[str, Any],
    trials: int,
    max_seconds: float = math.inf,
    device: str = "auto",
    resume: bool = False,
    startup_trials: int = _STARTUP_TRIALS,
    on_begin: Callable[[TrialReport], None] = lambda _: None,
    on_trial: Callable[[TrialReport], None] = lambda _: None,
    on_epoch: Callable[[int, EpochReport], None] = lambda *_: None,
) -> list[TrialReport]:
    """Train with different settings until there are so many trials, and return them, best first.

    `settings` are what the `space` leaves alone. `out` gets a table of the trials, the settings of
    the best one and its weights. With `resume` an earlier tuning in `out` goes on; its trials
    count, and one that was interrupted is finished first. After `max_seconds` no new epoch is
    begun.
    """
    if trials < 1:
        raise InputError(f"trials is {trials}, expected at least 1")
    if not len(prepared.validation):
        raise InputError("there are no validation users to judge trials by: hold some out")
    find_device(device)  # complains before anything is written
    ends_at = time.monotonic() + max_seconds
    tuning = _Tuning(prepared, settings, Path(out), space, resume, startup_trials)
    with _writing_to_study(Path(out) / STUDY):
        while tuning.num_finished() < trials:
            trial = tuning.next_trial()
            if trial is None:
                break
            on_begin(tuning.begun(trial))
            try:
                tuning.run(trial, device, ends_at, on_epoch)
            except InterruptedWorkError as error:
                tuning.write()
                raise InterruptedWorkError(f"trial {trial.number} was {error}") from None
            tuning.write()
            on_trial(tuning.report(trial.number))
            tuning.refuse_endless_failures()
            if time.monotonic() >= ends_at:
                break
    return tuning.reports()


class _Tuning:
    """A tuning under way: the study, and the folder that keeps it."""

    def __init__(
        self,
        prepared: Prepared,
        settings: Settings,
        folder: Path,
        space: Mapping[str, Any],
        resume: bool,
        startup_trials: int,
    ) -> None:
        self._prepared = prepared
        self._settings = settings
        self._folder = folder
        self._distributions = read_space(space)
        about = {
            "prepared log": prepared.checksum(),
            "settings": settings.to_json(),
            "space": dict(space),
        }
        self._study = _open_study(folder, about, resume, settings.training.seed, startup_trials)
        if not self._study.trials:
            self._study.enqueue_trial(_inside(settings, self._distributions))

    def next_trial(self) -> Trial | None:
        """Return the trial that was interrupted, or else a new one; None if all seem tried."""
        for unfinished in self._study.get_trials(states=(TrialState.RUNNING,)):
            return Trial(self._study, unfinished._trial_id)
        tried = [trial.params for trial in self._study.trials]
        for _ in range(_ATTEMPTS):
            trial = self._study.ask(self._distributions)
            if trial.params not in tried:
                return trial
            self._study.tell(trial, state=TrialState.FAIL)  # would only repeat itself
        return None

    def begun(self, trial: Trial) -> TrialReport:
        """Return what there is of a trial so far: it may be one that was interrupted."""
        if _PROGRESS not in trial.user_attrs:
            trial.set_user_attr(_PROGRESS, {"epochs": 0})
        return self.report(trial.number)

    def run(
        self,
        trial: Trial,
        device: str,
        ends_at: float,
        on_epoch: Callable[[int, EpochReport], None],
    ) -> None:
        """Train with the settings of a trial, or go on with that."""
        folder = self._trial_folder(trial.number)
        reported = set(self._study.trials[trial.number].intermediate_values)
        progress = trial.user_attrs[_PROGRESS]

        def judge(report: EpochReport) -> None:
            progress.update(epochs=report.epoch, seconds=report.seconds)
            if report.best:
                progress.update(ndcg=report.ndcg, best_epoch=report.epoch)
            trial.set_user_attr(_PROGRESS, progress)
            on_epoch(trial.number, report)
            # An epoch may be run again after a crash.
            if report.can_be_saved and report.epoch not in reported:
                trial.report(report.ndcg, report.epoch)
            if trial.should_prune():
                raise _HopelessError

        try:
            settings = self._settings.with_values(trial.params)
            state = train(
                self._prepared,
                settings,
                folder,
                device=device,
                resume=(folder / CHECKPOINT).exists(),
                max_seconds=ends_at - time.monotonic(),
                on_epoch=judge,
            )
        except InterruptedWorkError:
            raise
        except _HopelessError:
            self._study.tell(trial, state=TrialState.PRUNED)
        except (RecpruneError, MemoryError, torch.OutOfMemoryError) as error:
            reason = str(error).splitlines()[0] if str(error) else "not enough memory"
            trial.set_user_attr("reason", reason)
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            if training_is_over(state, settings):
                self._study.tell(trial, state.best_ndcg)

    def reports(self) -> list[TrialReport]:
        """Return all trials, best first."""
        reports = [_report(trial) for trial in self._study.trials if _PROGRESS in trial.user_attrs]
        worst = -1.0
        return sorted(reports, key=lambda report: -(worst if report.ndcg is None else report.ndcg))

    def report(self, number: int) -> TrialReport:
        return _report(self._study.trials[number])

    def num_finished(self) -> int:
        return sum(report.state != "unfinished" for report in self.reports())

    def refuse_endless_failures(self) -> None:
        last = sorted(self.reports(), key=lambda report: report.number)[-_FAILURES:]
        if len(last) == _FAILURES and all(report.state == "failed" for report in last):
            raise InputError(f"{_FAILURES} trials in a row failed; the last: {last[-1].reason}")

    def write(self) -> None:
        """Write the table and the best settings anew, and drop the weights of all other trials."""
        reports = self.reports()
        _write_table(self._folder / TABLE, reports, list(self._distributions))
        best = reports[0] if reports[0].ndcg is not None else None
        if best is not None:
            content = self._settings.with_values(dict(best.values)).to_json()
            with writing_file(self._folder / BEST) as temporary:
                temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for report in reports:
            if report.state != "unfinished":
                folder = self._trial_folder(report.number)
                (folder / CHECKPOINT).unlink(missing_ok=True)
                if report is not best:
                    (folder / MODEL).unlink(missing_ok=True)

    def _trial_folder(self, number: int) -> Path:
        return trial_folder(self._folder, number)


def trial_folder(out: str | Path, number: int) -> Path:
    """Return where a trial is trained."""
    return Path(out) / TRIALS / f"{number:04}"


@contextmanager
def _writing_to_study(path: Path) -> Iterator[None]:
    """Have what SQLite cannot keep end in an error that names the file."""
    try:
        yield
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise StorageError(f"{path}: cannot be written: {_reason_of(error)}") from None


def _reason_of(error: Exception) -> str:
    """Return what SQLite said, without what the layers above it add."""
    found = error.__cause__ or error
    return str(getattr(found, "orig", found)).splitlines()[0]


def _open_study(
    folder: Path, about: Json, resume: bool, seed: int, startup_trials: int
) -> optuna.Study:
    """Return the study of a folder: a new one, or the earlier one if that is to go on."""
    path = folder / STUDY
    if resume and not path.exists():
        raise InputError(f"{folder}: holds no tuning to go on with")
    if path.exists() and not resume:
        raise InputError(f"{folder}: holds a tuning already: go on with --resume, or remove it")
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = sqlalchemy.URL.create("sqlite", database=str(path))
    try:
        # Without a pool, whatever is opened is closed again, and not left for Python to find.
        storage = optuna.storages.RDBStorage(
            url.render_as_string(hide_password=False),
            engine_kwargs={"poolclass": sqlalchemy.pool.NullPool},
        )
        study = optuna.create_study(
            storage=storage,
            study_name="tuning",
            direction="maximize",
            pruner=optuna.pruners.MedianPruner(startup_trials, _WARMUP_EPOCHS),
            load_if_exists=True,
        )
    except (optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError, RuntimeError) as error:
        if not resume:
            path.unlink(missing_ok=True)  # it would be taken for a tuning to go on with
            raise StorageError(f"{path}: cannot be written: {_reason_of(error)}") from None
        raise StorageError(f"{path}: not a study: {str(error).splitlines()[0]}") from None
    # Drawn anew in each run, so that one that goes on does not repeat its draws.
    study.sampler = optuna.samplers.TPESampler(seed=(seed + len(study.trials)) % 2**32)
    for name, value in about.items():
        if study.user_attrs.get(name, value) != value:
            raise InputError(f"{folder}: was tuned with another {name}: take another folder")
        study.set_user_attr(name, value)
    return study


def _inside(settings: Settings, distributions: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """Return those of the settings to begin with that the space has: they are tried first."""
    values = {name: value for part in settings.to_json().values() for name, value in part.items()}
    inside = {}
    for name, distribution in distributions.items():
        try:
            if distribution._contains(distribution.to_internal_repr(values[name])):
                inside[name] = values[name]
        except ValueError:
            continue  # not one of the choices
    return inside


def _report(trial: FrozenTrial) -> TrialReport:
    progress = trial.user_attrs[_PROGRESS]
    return TrialReport(
        number=trial.number,
        state=_NAMES[trial.state],
        ndcg=progress.get("ndcg"),
        best_epoch=progress.get("best_epoch", 0),
        epochs=progress["epochs"],
        seconds=progress.get("seconds", 0.0),
        values=trial.params,
        reason=trial.user_attrs.get("reason", ""),
    )


def _write_table(path: Path, reports: Sequence[TrialReport], names: Sequence[str]) -> None:
    with (
        writing_file(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(
            ["trial", "NDCG@10", "state", "best epoch", "epochs", "seconds", *names, "reason"]
        )
        for report in reports:
            ndcg = "" if report.ndcg is None else f"{report.ndcg:.6f}"
            figures = [report.best_epoch, report.epochs, f"{report.seconds:.1f}"]
            values = [report.values[name] for name in names]
            writer.writerow([report.number, ndcg, report.state, *figures, *values, report.reason])
