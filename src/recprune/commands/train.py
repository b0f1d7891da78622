"""`recprune train`: a model from a prepared log. Runs where there are torch, safetensors and NumPy.

With `--workers`, the command supervises processes that run this same module, one for each worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from recprune.commands.settings_options import (
    add_budget_argument,
    add_settings_arguments,
    set_names,
    with_given,
)
from recprune.models.settings import (
    DEFAULT_PRESET,
    Settings,
    TrainingSettings,
    describe_settings,
    find_preset,
)
from recprune.preparation.prepared import Prepared
from recprune.training.checkpoint import (
    CHECKPOINT,
    EPOCHS,
    MODEL,
    checkpoint_settings,
    epochs_until_best,
    load_code_report,
    what_is_kept,
)
from recprune.training.distributed import (
    ALONE,
    LostWorkerError,
    SharedError,
    Workers,
    appointed,
    joined,
)
from recprune.training.epoch_lines import EpochLines
from recprune.training.launch import FAILED, INTERRUPTED, as_worker, launch, leave
from recprune.training.loop import EpochReport, find_device, train
from recprune.types import (
    MAX_SUB_ITEMS,
    InputError,
    InterruptedWorkError,
    Json,
    MissingExtraError,
    needs_extra,
)

with needs_extra("train"):
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prepared", metavar="FOLDER", nargs="?", help="made by recprune prepare")
    parser.add_argument("--out", metavar="FOLDER", help="folder to write")
    add_settings_arguments(parser, default=f"{DEFAULT_PRESET}, or what --resume finds")
    parser.add_argument(
        "--epochs-of",
        metavar="FOLDER",
        help="train for as many epochs as were best in an earlier training",
    )
    parser.add_argument(
        "--list-settings",
        action="store_true",
        help="say what can be set, with the values that the other options give, and train nothing",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; default: a GPU where there is one"
    )
    parser.add_argument("--resume", action="store_true", help="go on where --out stopped")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    add_budget_argument(parser)
    parser.add_argument(
        "--tensorboard",
        metavar="FOLDER",
        help="write every epoch there as TensorBoard reads it, a folder for each training",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that share every batch, each with a GPU if there are; default 1",
    )


def run(parsed: argparse.Namespace) -> None:
    if parsed.list_settings and (parsed.out or not parsed.resume):
        _list_settings(_settings(parsed))
        return
    if parsed.prepared is None and not parsed.list_settings:
        raise InputError("the folder of a prepared log is missing, made by recprune prepare")
    if parsed.out is None:
        raise InputError("--out FOLDER is missing")
    if not parsed.max_minutes > 0.0:
        raise InputError(f"--max-minutes is {parsed.max_minutes}, expected more than 0")
    if parsed.workers is not None and parsed.workers < 1:
        raise InputError(f"--workers is {parsed.workers}, expected 1 or more")
    workers = appointed()
    count = workers.count if workers is not None else parsed.workers or 1
    if count > 1 and parsed.device.startswith("cuda:"):
        raise InputError(
            f"--device {parsed.device} is one GPU, {count} workers need as many: say cuda"
        )
    try:
        if workers is not None:
            _join(parsed, workers)
            if workers.count > 1:
                leave(0)
        elif count == 1:
            _train(parsed, ALONE)
        else:
            _refuse_too_few_gpus(parsed.device, count)
            launch("recprune.commands.train", vars(parsed), count)
    except LostWorkerError as error:
        saved = (Path(parsed.out) / CHECKPOINT).exists()
        advice = (
            "what was saved is whole: go on with --resume" if saved else "nothing was saved yet"
        )
        raise LostWorkerError(f"{error}; {advice}") from None
    except (SharedError, InterruptedWorkError) as error:
        if workers is None or workers.is_first:
            raise
        sys.exit(INTERRUPTED if isinstance(error, InterruptedWorkError) else FAILED)  # said already


def _refuse_too_few_gpus(name: str, count: int) -> None:
    """Refuse a number of workers that this machine has no GPUs for; none is touched here."""
    gpus = torch.cuda.device_count()
    if (name == "cuda" or (name == "auto" and gpus)) and count > gpus:
        raise InputError(f"--workers is {count}, but there are {gpus} GPUs here; or --device cpu")


def _join(parsed: argparse.Namespace, workers: Workers) -> None:
    """Train as one of the workers that a launcher has started."""
    if parsed.workers not in (None, workers.count):
        raise InputError(f"--workers is {parsed.workers}, but {workers.count} were started")
    if workers.count == 1:
        _train(parsed, ALONE)
        return
    with joined(workers, find_device(parsed.device, workers)):
        _train(parsed, workers)


def _train(parsed: argparse.Namespace, workers: Workers) -> None:
    settings = Settings.from_json(workers.run_on_first(lambda: _settings(parsed).to_json()))
    prepared = Prepared.load(parsed.prepared)
    workers.run_on_first(lambda: _refuse_endless(parsed, prepared))
    device = find_device(parsed.device, workers)
    if workers.is_first:
        _introduce(prepared, settings, device, workers)
    max_seconds = 60.0 * parsed.max_minutes
    validated = len(prepared.validation) > 0
    show = EpochLines(settings, validated=validated, max_seconds=max_seconds)
    begun = time.monotonic()
    with _events(parsed.tensorboard, validated) as write_events:

        def on_epoch(report: EpochReport) -> None:
            show.epoch(report)
            write_events(report)

        state = train(
            prepared,
            settings,
            parsed.out,
            device=str(device),
            resume=parsed.resume,
            compiled=parsed.compile,
            max_seconds=max_seconds,
            workers=workers,
            on_epoch=on_epoch,
            on_steps=show.steps,
        )
    if not workers.is_first:
        return
    if state.epoch == 0:
        _say("not a single epoch was run")
        return
    if time.monotonic() - begun >= max_seconds:
        _say(
            f"time was up after {state.epoch} epochs, of {settings.training.max_epochs} at most: "
            "the same command with --resume goes on"
        )
    where = Path(parsed.out) / MODEL
    if len(prepared.validation):
        _say(f"best NDCG@10 on validation: {state.best_ndcg:.4f}; weights in {where}")
    else:
        _say(f"trained for {state.epoch} epochs; weights in {where}")
    kept = what_is_kept(parsed.out, settings, prepared)
    if kept is not None:
        _say(f"kept: {kept}")
    report = load_code_report(parsed.out)
    if report is not None:
        _say(
            f"learnt codes: {report.items_sharing_a_code:,} items share theirs, "
            f"{report.unused_sub_items:,} sub-items are unused, quantisation lost "
            f"{report.quantisation_error:.0%} of the variance; {state.seconds:.0f} s in all"
        )
    _draw_curve(Path(parsed.out))
    further = []
    if len(prepared.test):
        further.append(f"recprune evaluate {parsed.prepared} {parsed.out}")
    if not _too_large_to_serve(prepared, settings):
        further.append(f"recprune export {parsed.prepared} {parsed.out} --out RECOMMENDER")
    if further:
        _say(f"next: {', then '.join(further)}")


def _events(
    folder: str | None, validated: bool
) -> contextlib.AbstractContextManager[Callable[[EpochReport], None]]:
    """Return what writes every epoch for TensorBoard, if that is wanted."""
    if folder is None:
        return contextlib.nullcontext(lambda _: None)
    from recprune.training.event_files import event_files  # seconds, for who does not want it

    return event_files(folder, validated=validated)


def _introduce(
    prepared: Prepared, settings: Settings, device: torch.device, workers: Workers
) -> None:
    model, training = settings.model, settings.training
    many = f", {workers.count} workers" if workers.count > 1 else ""
    _say(
        f"{model.architecture} ({model.embedding}) for {prepared.num_items:,} items: "
        f"{training.loss} {_compared_with(training)}, on {device}{many}"
    )
    if settings.may_keep_table(prepared.num_items):
        _say(
            "full vectors first, then codes that are learnt from them: what validates better is "
            f"kept, as {prepared.num_items:,} items are few enough for either"
        )
    elif model.embedding == "auto":
        _say(f"codes are learnt: over {MAX_SUB_ITEMS:,} items, a full table could not be served")
    if not len(prepared.validation):
        _say("no validation users: the last weights will be kept")
    if _too_large_to_serve(prepared, settings):
        _say(f"a full table of over {MAX_SUB_ITEMS:,} items: can be evaluated, but not exported")


def _too_large_to_serve(prepared: Prepared, settings: Settings) -> bool:
    """Whether a model has a vector of its own for more items than an index can hold so."""
    return settings.model.embedding == "full" and prepared.num_items > MAX_SUB_ITEMS


def _compared_with(training: TrainingSettings) -> str:
    if training.loss == "cross_entropy":
        return "over all items"
    if training.loss == "digits":
        return "over all sub-items"
    more = f" and {training.num_in_batch} in-batch" if training.num_in_batch else ""
    shared = " shared" if training.negatives == "shared" else ""
    return f"with {training.num_negatives}{shared}{more} negatives"


def _list_settings(settings: Settings) -> None:
    """Print a table of all settings, without the packages that print tables elsewhere."""
    rows = [("setting", "value", "expected", "meaning")]
    for entry in describe_settings(settings):
        value = entry.value if isinstance(entry.value, str) else json.dumps(entry.value)
        rows.append((entry.name, value, entry.expected, entry.meaning))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())  # noqa: T201


def _settings(parsed: argparse.Namespace) -> Settings:
    if parsed.resume and parsed.preset is None:
        settings = checkpoint_settings(parsed.out)
    else:
        settings = find_preset(parsed.preset or DEFAULT_PRESET)
    settings = with_given(settings, parsed)
    if parsed.epochs_of is None:
        return settings
    if "max_epochs" in set_names(parsed):
        raise InputError("--epochs-of says how long to train, and so does max_epochs: take one")
    return settings.with_values(epochs_until_best(parsed.epochs_of))


def _refuse_endless(parsed: argparse.Namespace, prepared: Prepared) -> Json:
    """Refuse to guess a number of epochs where no validation users say when to stop.

    That of a preset or of a file is at most an upper limit for early stopping.
    """
    given = parsed.epochs_of or parsed.resume or "max_epochs" in set_names(parsed)
    if not len(prepared.validation) and not given:
        raise InputError(
            f"{parsed.prepared} has no validation users to say when to stop: take the number of "
            "epochs from an earlier training that had some, with --epochs-of FOLDER, or give it "
            "with --set max_epochs=N"
        )
    return {}


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def _draw_curve(folder: Path) -> None:
    try:
        from recprune.training.curves import draw_training

        draw_training(folder / EPOCHS, folder / "training.png")
    except MissingExtraError as error:
        _say(f"no picture of the training: {error}")


def _work(line_number: str, job: str) -> int:
    """Be one of the workers that `run` has launched."""
    workers = appointed()
    if workers is None:
        raise InputError("a worker is started by recprune train --workers")
    return as_worker(int(line_number), partial(_join, Namespace(**json.loads(job)), workers))


if __name__ == "__main__":
    leave(_work(*sys.argv[1:]))
