"""`recprune train`: a model from a prepared log. Runs where there is only torch and NumPy."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from recprune.checkpoint import EPOCHS, MODEL, checkpoint_settings
from recprune.prepared import Prepared
from recprune.settings import PRESETS, Settings, find_preset
from recprune.training import EpochReport, find_device, train
from recprune.types import MAX_SUB_ITEMS, InputError, MissingExtraError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command can be told."""
    parser.add_argument("prepared", metavar="FOLDER", help="made by recprune prepare")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--preset", metavar="NAME",
        help=f"one of {', '.join(PRESETS)}; default gsasrec, or what --resume finds",
    )  # fmt: skip
    parser.add_argument(
        "--settings", metavar="FILE", help="JSON with the parts model and training, over the preset"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="one setting, over all else; may be repeated. There are, with the defaults of "
        f"gsasrec: {_listed(find_preset('gsasrec'))}",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; default: a GPU where there is one"
    )
    parser.add_argument("--resume", action="store_true", help="go on where --out stopped")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument(
        "--max-minutes", type=float, default=float("inf"), metavar="N",
        help="begin no epoch after this",
    )  # fmt: skip


def run(parsed: argparse.Namespace) -> None:
    """Do it."""
    if not parsed.max_minutes > 0.0:
        raise InputError(f"--max-minutes is {parsed.max_minutes}, expected more than 0")
    settings = _settings(parsed)
    prepared = Prepared.load(parsed.prepared)
    model, training = settings.model, settings.training
    _say(
        f"{model.architecture} ({model.embedding}) for {prepared.num_items:,} items: "
        f"{training.loss} with {training.num_negatives} negatives, on {find_device(parsed.device)}"
    )
    if not len(prepared.validation):
        _say("no validation users: the last weights will be kept")
    if model.embedding == "full" and prepared.num_items > MAX_SUB_ITEMS:
        _say(f"a full table of over {MAX_SUB_ITEMS:,} items: can be evaluated, but not exported")
    show = _Progress(settings)
    state = train(
        prepared,
        settings,
        parsed.out,
        device=parsed.device,
        resume=parsed.resume,
        compiled=parsed.compile,
        max_seconds=60.0 * parsed.max_minutes,
        on_epoch=show.epoch,
        on_steps=show.steps,
    )
    if state.epoch == 0:
        _say("not a single epoch was run")
        return
    where = Path(parsed.out) / MODEL
    _say(f"best NDCG@10 on validation: {state.best_ndcg:.4f}; weights in {where}")
    _draw_curve(Path(parsed.out))


def _listed(settings: Settings) -> str:
    parts = settings.to_json().values()
    return ", ".join(
        f"{name}={json.dumps(value)}" for part in parts for name, value in part.items()
    )


def _settings(parsed: argparse.Namespace) -> Settings:
    if parsed.resume and parsed.preset is None:
        settings = checkpoint_settings(parsed.out)
    else:
        settings = find_preset(parsed.preset or "gsasrec")
    if parsed.settings:
        try:
            given = json.loads(Path(parsed.settings).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{parsed.settings}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"{parsed.settings}: not readable as JSON: {error}") from None
        if not isinstance(given, dict) or not all(
            isinstance(part, dict) for part in given.values()
        ):
            raise InputError(f"{parsed.settings}: expected an object with model and training")
        settings = settings.with_parts(given)
    values: dict[str, Any] = {}
    for text in parsed.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text}: expected NAME=VALUE")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value  # a word
    return settings.with_values(values)


class _Progress:
    """One line that is written over while steps pass, and one that stays for every epoch."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._begun = time.monotonic()
        self._epochs = 0

    def steps(self, done: int, of: int, loss: float) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r  step {done}/{of}  loss {loss:.4f}\033[K")
            sys.stderr.flush()

    def epoch(self, report: EpochReport) -> None:
        self._epochs += 1
        each = (time.monotonic() - self._begun) / self._epochs
        left = each * (self._settings.training.max_epochs - report.epoch)
        start = "\r" if sys.stderr.isatty() else ""
        _say(
            f"{start}epoch {report.epoch:3}  loss {report.loss:.5f}  "
            f"NDCG@10 {report.ndcg:.4f}{' *' if report.best else '  '}  "
            f"{report.steps_per_second:6.1f} steps/s  at most {left / 60:.0f} min to go"
        )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def _draw_curve(folder: Path) -> None:
    try:
        from recprune.curves import draw_training

        draw_training(folder / EPOCHS, folder / "training.png")
    except MissingExtraError as error:
        _say(f"no picture of the training: {error}")
