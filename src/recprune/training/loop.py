"""Training, visible in one place: epochs, early stopping, checkpoints.

Chance is drawn anew for every step from the seed and the number of the step, never carried along.
So a run that was interrupted and resumed takes exactly the steps that it would have taken anyway.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from recprune.evaluation.metrics import RelevantRanks, ndcg
from recprune.models.sequence_model import (
    SequenceModel,
    build_model,
    encode_histories,
    target_ranks,
)
from recprune.models.settings import Settings
from recprune.preparation.prepared import Prepared
from recprune.storage import MANIFEST, writing_file
from recprune.training.checkpoint import (
    CHECKPOINT,
    EPOCHS,
    State,
    load_checkpoint,
    save_checkpoint,
    save_model,
    training_tensors,
)
from recprune.training.distributed import ALONE, Workers
from recprune.training.minibatches import epoch_users, make_minibatch
from recprune.training.random_streams import Stream, stream_generator
from recprune.training.signals import requests_to_stop
from recprune.training.steps import SharedStep, Step, make_step
from recprune.types import (
    InputError,
    InterruptedWorkError,
    Json,
    RecpruneError,
    needs_extra,
)

with needs_extra("train"):
    import torch

_CHECKPOINT_EVERY = 60.0  # seconds
_REPORT_EVERY = 32  # steps; looking at the loss makes the processor wait for the device


@dataclass(frozen=True)
class EpochReport:
    """How one epoch went."""

    epoch: int
    loss: float
    ndcg: float  # @10, of the validation users
    best: bool
    steps: int  # so far
    steps_per_second: float
    seconds: float  # of the whole training, so far


Report = Callable[[EpochReport], None]
StepReport = Callable[[int, int, float], None]  # step of the epoch, steps in it, loss


def train(
    prepared: Prepared,
    settings: Settings,
    out: str | Path,
    *,
    device: str = "auto",
    resume: bool = False,
    compiled: bool = False,
    max_seconds: float = math.inf,
    workers: Workers = ALONE,
    on_epoch: Report = lambda _: None,
    on_steps: StepReport = lambda *_: None,
) -> State:
    """Train a model and return where that ended.

    `out` gets the best weights, a line of JSON about every epoch, and a checkpoint that is renewed
    every minute. With `resume`, an earlier run in `out` goes on where it stopped. After
    `max_seconds` no new epoch is begun.

    Several `workers`, who have joined before, call this alike and share the work of every step. The
    first of them alone reads and writes `out`, validates and reports.
    """
    size = settings.training.batch_size
    if workers.count > size:
        raise InputError(
            f"{workers.count} workers for a batch_size of {size}: some would have nothing to do"
        )
    folder = Path(out)
    chosen = find_device(device)
    torch.manual_seed(settings.training.seed)
    model = build_model(settings.model, prepared.codes, prepared.num_sub_items).to(chosen)
    on_gpu = chosen.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(chosen)  # chance and streams are those of the current one
    optimiser = torch.optim.Adam(
        model.parameters(), settings.training.learning_rate, fused=on_gpu, capturable=on_gpu
    )
    checksum = prepared.checksum()
    begin = partial(_begin, folder, settings, checksum, model, optimiser, resume)
    outcome = workers.run_on_first(lambda: {"state": asdict(begin()), "checksum": checksum})
    if outcome["checksum"] != checksum:
        raise InputError("the prepared log is not the one that the first worker has")
    state = State(**outcome["state"])
    if workers.count > 1:
        workers.broadcast(training_tensors(model, optimiser, state))
    if on_gpu:
        torch.set_float32_matmul_precision("high")

    def save() -> None:
        save_checkpoint(folder / CHECKPOINT, settings, checksum, model, optimiser, state)

    def save_within(number: int) -> None:
        _refuse_nan(float(losses), state, number)
        state.batch, state.loss_sum = number + 1, float(losses)
        state.seconds = time.monotonic() - begun
        save()

    def finish_epoch(loss: float, num_batches: int, steps_per_second: float) -> Json:
        """Judge an epoch, keep what it brought, and return where the training stands."""
        ndcg = validation_ndcg(model, prepared, settings)
        # As long as nothing at all is found, and without validation users, the newest is best.
        best = ndcg > state.best_ndcg or ndcg == 0.0 == state.best_ndcg
        state.epochs_without_best = 0 if best else state.epochs_without_best + 1
        state.best_ndcg = max(ndcg, state.best_ndcg)
        state.steps += num_batches
        state.seconds = time.monotonic() - begun
        report = EpochReport(
            state.epoch + 1, loss, ndcg, best, state.steps, steps_per_second, state.seconds
        )
        state.epoch, state.batch, state.loss_sum = state.epoch + 1, 0, 0.0
        if best:
            save_model(folder, settings, model, checksum, ndcg)
        _append_line(folder / EPOCHS, report)
        on_epoch(report)
        time_is_up = time.monotonic() - started >= max_seconds
        if time_is_up or _is_finished(state, settings) or not (folder / CHECKPOINT).exists():
            save()
        return {"state": asdict(state), "time_is_up": time_is_up}

    started = saved_at = time.monotonic()
    begun = started - state.seconds
    time_is_up = False
    with _interruptible() as asked_to_stop:
        step: Step
        if workers.count == 1:
            step, stop_asked = (
                make_step(model, optimiser, settings, chosen, compiled),
                asked_to_stop,
            )
        else:
            step = shared = SharedStep(
                model, optimiser, settings, chosen, compiled, workers, asked_to_stop
            )
            stop_asked = shared.stop_asked
        while not _is_finished(state, settings) and not time_is_up:
            users = epoch_users(prepared, settings, state.epoch)
            num_batches = -(-len(users) // size)
            epoch_begun, first_number = time.monotonic(), state.batch
            model.train()
            losses = torch.tensor(state.loss_sum, dtype=torch.float64, device=chosen)
            for number in range(state.batch, num_batches):
                batch_users = users[number * size : (number + 1) * size]
                minibatch = make_minibatch(prepared, batch_users, settings, state.epoch, number)
                loss = step(minibatch, state.epoch, number)
                losses += loss
                if number % _REPORT_EVERY == _REPORT_EVERY - 1 or number == num_batches - 1:
                    _refuse_nan(float(losses), state, number)
                    if workers.is_first:
                        on_steps(number + 1, num_batches, float(loss))
                if workers.is_first and time.monotonic() >= saved_at + _CHECKPOINT_EVERY:
                    save_within(number)
                    saved_at = time.monotonic()
                if stop_asked():
                    if workers.is_first:
                        save_within(number)
                    raise InterruptedWorkError(
                        f"interrupted in epoch {state.epoch + 1} after {number + 1} of "
                        f"{num_batches} steps; all is saved: go on with --resume"
                    )
            seconds = max(time.monotonic() - epoch_begun, 1e-9)
            speed = (num_batches - first_number) / seconds
            finish = partial(finish_epoch, float(losses) / num_batches, num_batches, speed)
            outcome = workers.run_on_first(finish)
            state, time_is_up = State(**outcome["state"]), outcome["time_is_up"]
    return state


def validation_ndcg(model: SequenceModel, prepared: Prepared, settings: Settings) -> float:
    """Return NDCG@10 of the validation users, over the full catalogue; 0 if there are none."""
    targets = prepared.validation
    rng = stream_generator(settings.training.seed, Stream.VALIDATION_USERS)
    shuffled = rng.permutation(len(targets))
    chosen = np.sort(shuffled[: settings.training.validation_users])
    histories = [prepared.history(targets, int(target)) for target in chosen]
    embeddings = encode_histories(model, settings.model.length, histories)
    seen = histories if settings.training.exclude_seen else None
    ranks = target_ranks(model, embeddings, targets.items[chosen], seen) + 1
    values = ndcg(RelevantRanks.of_targets(ranks), 10)
    return float(values.mean()) if len(values) else 0.0


def find_device(name: str, workers: Workers = ALONE) -> torch.device:
    """Return the device of that name; `auto` is a GPU where there is one.

    Of several workers on a machine, each has the GPU with its own number.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and workers.count > 1:
        name = f"cuda:{workers.local_rank}"
    try:
        device = torch.zeros(1, device=name).device  # of GPUs, a certain one
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {name!r} cannot be used here: {reason}") from None
    return device


def _begin(
    folder: Path,
    settings: Settings,
    checksum: str,
    model: SequenceModel,
    optimiser: torch.optim.Adam,
    resume: bool,
) -> State:
    """Return the state to begin with: that of the checkpoint, or a fresh one."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / CHECKPOINT
    if resume:
        state = load_checkpoint(checkpoint, settings, checksum, model, optimiser)
        _keep_lines(folder / EPOCHS, state.epoch)
        return state
    if (folder / MANIFEST).exists():
        raise InputError(f"{folder}: holds something else that recprune saved: take another folder")
    if checkpoint.exists():
        raise InputError(f"{folder}: holds a training already: go on with --resume, or remove it")
    _keep_lines(folder / EPOCHS, 0)
    return State()


def _is_finished(state: State, settings: Settings) -> bool:
    training = settings.training
    return state.epoch >= training.max_epochs or state.epochs_without_best >= training.patience


def _refuse_nan(total: float, state: State, number: int) -> None:
    if not math.isfinite(total):
        first = max(0, number - _REPORT_EVERY + 1)
        raise RecpruneError(
            f"the loss became {total} in epoch {state.epoch + 1}, between steps {first + 1} and "
            f"{number + 1}: try a lower learning_rate. What was saved before is whole"
        )


def _keep_lines(path: Path, epochs: int) -> None:
    """Leave only the lines of epochs that will not be run again."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    with writing_file(path) as temporary:
        temporary.write_text("".join(lines[:epochs]), encoding="utf-8")


def _append_line(path: Path, report: EpochReport) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(report)) + "\n")


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C, or a request to terminate, into a question that the loop asks.

    A second one stops at once.
    """
    asked = False

    def hear() -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    with requests_to_stop(hear):
        yield lambda: asked
