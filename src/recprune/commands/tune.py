"""`recprune tune`: settings that suit a log, by trainings that validation users judge."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from recprune.commands.console import print_table, say, showing_progress
from recprune.commands.settings_options import (
    add_budget_argument,
    add_settings_arguments,
    given_names,
    read_json,
    with_given,
)
from recprune.models.settings import DEFAULT_PRESET, Settings, find_preset
from recprune.preparation.prepared import Prepared
from recprune.training.loop import EpochReport
from recprune.training.tuning import BEST, TABLE, TrialReport, trial_folder, tune
from recprune.training.tuning_space import default_space
from recprune.types import InputError

_SHOWN = 10  # trials, in the table at the end
_PATIENCE = 10  # epochs: a trial need not be trained to its end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prepared", metavar="FOLDER", nargs="?", help="made by recprune prepare")
    parser.add_argument("--out", metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--trials", type=int, default=20, metavar="N", help="in all; default %(default)s"
    )
    add_budget_argument(parser)
    add_settings_arguments(parser, default=DEFAULT_PRESET)
    parser.add_argument(
        "--space",
        metavar="FILE",
        help='JSON with what is tried: {"width": [64, 128], "dropout": {"from": 0.0, "to": 0.5}}, '
        'and "log": true in a range for orders of magnitude; what --set or --settings give stays '
        "as it is",
    )
    parser.add_argument(
        "--list-space", action="store_true", help="print what would be tried, and try nothing"
    )
    parser.add_argument("--resume", action="store_true", help="go on where --out stopped")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; default: a GPU where there is one"
    )


def run(parsed: argparse.Namespace) -> None:
    settings = _settings(parsed)
    space = _space(parsed, settings)
    if parsed.list_space:
        print(json.dumps(space, indent=2))  # noqa: T201
        return
    if parsed.prepared is None:
        raise InputError("the folder of a prepared log is missing, made by recprune prepare")
    if parsed.out is None:
        raise InputError("--out FOLDER is missing")
    if not parsed.max_minutes > 0.0:
        raise InputError(f"--max-minutes is {parsed.max_minutes}, expected more than 0")
    prepared = Prepared.load(parsed.prepared)
    begun = time.monotonic()
    with showing_progress("tuning") as progress:

        def begin(report: TrialReport) -> None:
            how = f"goes on after epoch {report.epochs}" if report.epochs else "begins"
            say(f"trial {report.number} {how}: {_values(report.values)}")

        def show(trial: int, report: EpochReport) -> None:
            progress(f"trial {trial}, epoch {report.epoch}, NDCG@10 {report.ndcg:.4f}")

        reports = tune(
            prepared,
            settings,
            parsed.out,
            space=space,
            trials=parsed.trials,
            max_seconds=60.0 * parsed.max_minutes,
            device=parsed.device,
            resume=parsed.resume,
            on_begin=begin,
            on_trial=lambda report: say(_line(report)),
            on_epoch=show,
        )
    over = sum(report.state != "unfinished" for report in reports)
    if over < parsed.trials and time.monotonic() - begun >= 60.0 * parsed.max_minutes:
        say(
            f"time was up after {over} of {parsed.trials} trials: "
            "the same command with --resume goes on"
        )
    _conclude(parsed, reports, list(space))


def _settings(parsed: argparse.Namespace) -> Settings:
    settings = with_given(find_preset(parsed.preset or DEFAULT_PRESET), parsed)
    patience = {} if "patience" in given_names(parsed) else {"patience": _PATIENCE}
    return settings.with_values(patience)


def _space(parsed: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Return what is tried: a file's space or the default one, without what is given."""
    space = read_json(parsed.space) if parsed.space else default_space(settings)
    if not isinstance(space, dict):
        raise InputError(f"{parsed.space}: expected an object with what to try for each setting")
    fixed = given_names(parsed)
    return {name: entry for name, entry in space.items() if name not in fixed}


def _conclude(
    parsed: argparse.Namespace, reports: Sequence[TrialReport], names: Sequence[str]
) -> None:
    if not reports or reports[0].ndcg is None:
        say(f"no trial got through an epoch; {parsed.out}/{TABLE} says why")
        return
    several = f"The best of {len(reports)} trials, by NDCG@10 of the validation users"
    print_table(
        several if len(reports) > 1 else "The only trial, NDCG@10 of the validation users",
        ("trial", "NDCG@10", "epoch", "state", *names),
        [
            (
                str(report.number),
                "–" if report.ndcg is None else f"{report.ndcg:.4f}",
                f"{report.best_epoch} of {report.epochs}",
                report.state,
                *(_shown(report.values[name]) for name in names),
            )
            for report in reports[:_SHOWN]
        ],
    )
    say(
        f"all trials in {parsed.out}/{TABLE}, the best model in "
        f"{trial_folder(parsed.out, reports[0].number)}; its settings, to train again: "
        f"recprune train {parsed.prepared} --settings {parsed.out}/{BEST} --out MODEL"
    )


def _line(report: TrialReport) -> str:
    ndcg = "" if report.ndcg is None else f", NDCG@10 {report.ndcg:.4f}"
    reason = f": {report.reason}" if report.reason else ""
    epochs = f"{report.epochs} epochs in {report.seconds:.0f} s"
    return (
        f"trial {report.number} {report.state}{ndcg}, {epochs} ({_values(report.values)}){reason}"
    )


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
