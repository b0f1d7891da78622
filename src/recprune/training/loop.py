"""Training, visible in one place: epochs, early stopping, checkpoints.

A run that was interrupted and resumed takes exactly the steps that it would have taken anyway: the
checkpoint has all that is carried from step to step, and chance is not (`random_streams`).
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from recprune.evaluation.metrics import RelevantRanks, ndcg
from recprune.models.architectures import (
    SequenceModel,
    build_learning_model,
    build_model,
    looks_at_times,
    with_embedding,
)
from recprune.models.embedding import FullEmbedding, ItemEmbedding, RecJPQEmbedding
from recprune.models.learnt_codes import CodeReport, LearntEmbedding
from recprune.models.ranking import encode_histories, model_boosts, target_ranks
from recprune.models.repeats import EventFeatures, event_features
from recprune.models.settings import Settings
from recprune.models.touched_rows import TouchedRows
from recprune.preparation.codebook import assign_random
from recprune.preparation.prepared import Prepared
from recprune.storage import MANIFEST, writing_file, writing_to
from recprune.training.checkpoint import (
    CHECKPOINT,
    EPOCHS,
    SETTINGS,
    State,
    attach_tables,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    save_model,
    training_tensors,
)
from recprune.training.distributed import ALONE, Workers
from recprune.training.minibatches import epoch_users, make_minibatch
from recprune.training.optimiser import Optimiser
from recprune.training.placement import place_cold_items
from recprune.training.random_streams import Stream, stream_generator
from recprune.training.signals import requests_to_stop
from recprune.training.stages import (
    Stage,
    begin_next_stage,
    first_stage,
    stage_is_over,
    training_is_over,
)
from recprune.training.steps import SharedStep, SingleStep, Step
from recprune.types import (
    InputError,
    Int64Array,
    InterruptedWorkError,
    Json,
    RecpruneError,
    Timeline,
    needs_extra,
)

with needs_extra("train"):
    import torch
    from torch import nn

_CHECKPOINT_EVERY = 60.0  # seconds, at least
_SAVING_PAYS_AFTER = (
    20  # times as long as saving took: gigabytes are not to be written all the time
)
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
    can_be_saved: bool = True  # learnt codes that are not cut yet cannot
    stage: Stage = "last"


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
    users_of: Callable[[int], Int64Array] | None = None,
    on_epoch: Report = lambda _: None,
    on_steps: StepReport = lambda *_: None,
) -> State:
    """Train a model and return where that ended.

    `out` gets the best weights, a line of JSON about every epoch, and a checkpoint that is renewed
    every minute, or less often where that takes long. With `resume`, an earlier run in `out` goes
    on where it stopped. After `max_seconds` no new epoch is begun. `users_of` says which users an
    epoch shows; by default all that have something to learn from, in an order by chance.

    Several `workers`, joined before, call this alike and share the work of every step. The first of
    them alone reads and writes `out`, validates and reports.
    """
    size = settings.training.batch_size
    if workers.count > size:
        raise InputError(
            f"{workers.count} workers for a batch_size of {size}: some would have nothing to do"
        )
    chosen = find_device(device)
    training = _Training(prepared, settings, Path(out), chosen)
    training.begin(resume, workers)
    save_at = time.monotonic() + _CHECKPOINT_EVERY
    ends_at, time_is_up = time.monotonic() + max_seconds, False
    with _interruptible() as asked_to_stop:
        step, stop_asked = _make_step(training, compiled, workers, asked_to_stop)
        while not training.is_finished() and not time_is_up:
            epoch, first_number = training.state.epoch, training.state.batch
            if training.begin_epoch(workers):
                step, stop_asked = _make_step(training, compiled, workers, asked_to_stop)
            # [users of the epoch]
            users = users_of(epoch) if users_of else epoch_users(prepared, settings, epoch)
            num_steps = -(-len(users) // size)
            epoch_begun = time.monotonic()
            training.model.train()
            loss_sum = torch.tensor(training.state.loss_sum, dtype=torch.float64, device=chosen)
            for number in range(first_number, num_steps):
                shown = users[number * size : (number + 1) * size]  # [batch_size], or fewer at last
                minibatch = make_minibatch(
                    prepared, shown, settings, epoch, number, training.features
                )
                loss = step(minibatch, epoch, number)  # []
                loss_sum += loss
                if number % _REPORT_EVERY == _REPORT_EVERY - 1 or number == num_steps - 1:
                    _refuse_nan(float(loss_sum), epoch, number)
                    if workers.is_first:
                        on_steps(number + 1, num_steps, float(loss))
                if workers.is_first and time.monotonic() >= save_at:
                    begun = time.monotonic()
                    training.save_within_epoch(number, float(loss_sum))
                    took = time.monotonic() - begun
                    pause = max(_CHECKPOINT_EVERY, _SAVING_PAYS_AFTER * took)
                    save_at = time.monotonic() + pause
                if stop_asked():
                    if workers.is_first:
                        training.save_within_epoch(number, float(loss_sum))
                    raise InterruptedWorkError(
                        f"interrupted in epoch {epoch + 1} after {number + 1} of "
                        f"{num_steps} steps; all is saved: go on with --resume"
                    )
            speed = (num_steps - first_number) / max(time.monotonic() - epoch_begun, 1e-9)
            mean_loss = float(loss_sum) / num_steps
            finish = partial(training.finish_epoch, mean_loss, num_steps, speed, on_epoch, ends_at)
            outcome = workers.run_on_first(finish)
            training.state, time_is_up = State(**outcome["state"]), outcome["time_is_up"]
    return training.state


def begin_with(
    prepared: Prepared,
    settings: Settings,
    out: str | Path,
    weights: Mapping[str, NDArray[Any]],
    moments: Mapping[str, NDArray[Any]],
    *,
    device: str = "auto",
) -> float:
    """Leave in `out` a training that has not begun, with the weights of another; return NDCG@10.

    `train` goes on from there with `resume`. That model, as it is, is the first that is best. What
    an optimiser remembered of parameters is taken over where `moments` has it.
    """
    training = _Training(prepared, settings, Path(out), find_device(device))
    training.begin(False, ALONE)
    model, optimiser, state = training.model, training.optimiser, training.state
    load_weights(model, weights)
    for name, parameter in model.named_parameters():
        for moment, value in zip(
            optimiser.moments(parameter), optimiser.remembered(parameter), strict=True
        ):
            found = moments.get(f"{moment}.{name}")
            if found is not None:
                value.copy_(torch.from_numpy(np.array(found)))
    state.best_ndcg = state.stage_best = validation_ndcg(model, prepared, settings)
    save_model(training.folder, settings, model, training.checksum, state.best_ndcg)
    training.save()
    return state.best_ndcg


class _Judged(NamedTuple):
    """A model as it would be saved."""

    model: SequenceModel
    settings: Settings
    learnt: LearntEmbedding | None = None  # what its codes were cut from
    can_be_saved: bool = True  # full vectors that must become codes cannot


class _Training:
    """A training under way: what is trained, where it stands, and the folder that keeps it."""

    def __init__(
        self, prepared: Prepared, settings: Settings, folder: Path, device: torch.device
    ) -> None:
        self.prepared = prepared
        self.settings = settings
        self.folder = folder
        self.device = device
        self.checksum = prepared.checksum(with_times=looks_at_times(settings.model))
        torch.manual_seed(settings.training.seed)
        self.model = _untrained(settings, prepared).to(device)
        attach_tables(self.model, settings.model, prepared)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # chance and streams are those of the current one
            torch.set_float32_matmul_precision("high")
        self.optimiser = self._new_optimiser()
        self.features: EventFeatures | None = None  # for a repeat head
        if settings.model.repeats:
            self.features = event_features(prepared.items, prepared.offsets)
        self.state = State(stage=first_stage(settings))
        self._begun = time.monotonic()

    def begin(self, resume: bool, workers: Workers) -> None:
        """Put all workers where the first one begins: at its checkpoint, or at the start."""
        outcome = workers.run_on_first(
            lambda: {"state": asdict(self._first_state(resume)), "checksum": self.checksum}
        )
        if outcome["checksum"] != self.checksum:
            raise InputError("the prepared log is not the one that the first worker has")
        self.state = State(**outcome["state"])
        if workers.count > 1:
            self._fit_stage(self.state)
            workers.broadcast(training_tensors(self.model, self.optimiser, self.state))
            if isinstance(self.model.embedding, LearntEmbedding):
                self.model.embedding.look_whether_cut()
        self._begun = time.monotonic() - self.state.seconds

    def begin_epoch(self, workers: Workers) -> bool:
        """Look after learnt codes; return whether steps are different ones from now on."""
        embedding, state = self.model.embedding, self.state
        if not isinstance(embedding, LearntEmbedding) or state.batch:
            return False
        rng = stream_generator(self.settings.training.seed, Stream.CODES, state.epoch)
        before = state.stage
        while state.stage != "last" and stage_is_over(state, self.settings):
            if state.stage == "full":
                embedding.cut(rng)
            else:
                state.code_report = asdict(embedding.report())
                self._settle(embedding.as_recjpq())
            begin_next_stage(state)
        if state.stage == before == "learning":
            embedding.revive(rng)
        if workers.count > 1 and state.stage != "full":
            learnt = cast(nn.Module, self.model.embedding)
            changed = [value.detach() for value in learnt.state_dict().values()]
            # While codes change, the table they are learnt from is the same everywhere.
            workers.broadcast(embedding.buffers() if state.stage == "learning" else changed)
        return state.stage != before

    def is_finished(self) -> bool:
        return training_is_over(self.state, self.settings)

    def _settle(self, embedding: RecJPQEmbedding) -> None:
        """Go on with codes that stay, and without the table that they were learnt from."""
        earlier = self.optimiser
        self.model = with_embedding(self.model, embedding.to(self.device))
        self.optimiser = self._new_optimiser()
        for parameter in self.model.parameters():
            if parameter in earlier.state:
                self.optimiser.state[parameter] = earlier.state[parameter]

    def _fit_stage(self, state: State) -> tuple[SequenceModel, Optimiser]:
        """Return what a training that goes on is loaded into: has it got to codes that stay?"""
        embedding = self.model.embedding
        if state.stage == "last" and isinstance(embedding, LearntEmbedding):
            codes = np.zeros((embedding.num_items, embedding.num_splits), np.uint8)
            self._settle(RecJPQEmbedding(codes, embedding.num_sub_items, embedding.width))
        return self.model, self.optimiser

    def _new_optimiser(self) -> Optimiser:
        training = self.settings.training
        return Optimiser(
            list(self.model.parameters()),
            training.learning_rate,
            training.clip_norm,
            on_gpu=self.device.type == "cuda",
            table=_table_by_rows(self.model.embedding, self.settings),
        )

    def seconds(self) -> float:
        """Return how long the training has taken, earlier runs included."""
        return time.monotonic() - self._begun

    def save(self) -> None:
        save_checkpoint(
            self.folder / CHECKPOINT,
            self.settings,
            self.checksum,
            self.model,
            self.optimiser,
            self.state,
        )

    def save_within_epoch(self, number: int, loss_sum: float) -> None:
        """Save after the step with that number, which counts from 0."""
        _refuse_nan(loss_sum, self.state.epoch, number)
        self.state.batch, self.state.loss_sum = number + 1, loss_sum
        self.state.seconds = self.seconds()
        self.save()

    def finish_epoch(
        self,
        loss: float,
        num_steps: int,
        steps_per_second: float,
        on_epoch: Report,
        ends_at: float,
    ) -> Json:
        """Judge an epoch, keep what it brought, and return where the training stands."""
        state = self.state
        time_is_up = time.monotonic() >= ends_at
        if self.prepared.cold is not None:
            scale = self.settings.training.cold_scale
            place_cold_items(self.model.embedding, self.prepared.cold, scale)
        judged = self._judged()
        ndcg_10 = validation_ndcg(judged.model, self.prepared, self.settings)
        better = _is_better(ndcg_10, state.stage_best)
        state.epochs_without_best = 0 if better else state.epochs_without_best + 1
        state.stage_best = max(ndcg_10, state.stage_best)
        if time_is_up and not judged.can_be_saved:  # when to cut is not decided by this
            judged = self._judged(cut=True)
            ndcg_10 = validation_ndcg(judged.model, self.prepared, self.settings)
        best = judged.can_be_saved and _is_better(ndcg_10, state.best_ndcg)
        if best:
            state.best_ndcg = ndcg_10
        state.steps += num_steps
        state.seconds = self.seconds()
        state.epoch, state.batch, state.loss_sum = state.epoch + 1, 0, 0.0
        report = EpochReport(
            state.epoch,
            loss,
            ndcg_10,
            best,
            state.steps,
            steps_per_second,
            state.seconds,
            judged.can_be_saved,
            state.stage,
        )
        if best:
            save_model(
                self.folder,
                judged.settings,
                judged.model,
                self.checksum,
                ndcg_10,
                self._code_report(judged),
            )
        _append_line(self.folder / EPOCHS, report)
        on_epoch(report)
        if time_is_up or self.is_finished() or not (self.folder / CHECKPOINT).exists():
            self.save()
        return {"state": asdict(state), "time_is_up": time_is_up}

    def _judged(self, cut: bool = False) -> _Judged:
        """Return the model as it would be saved; with `cut`, codes of full vectors if need be."""
        model, settings = self.model, self.settings
        embedding = model.embedding
        if not isinstance(embedding, LearntEmbedding):
            return _Judged(model, settings.as_codes())
        if not embedding.quantises:
            if settings.may_keep_table(embedding.num_items):
                table = with_embedding(model, embedding.as_full())
                return _Judged(table, settings.as_table())
            if not cut:
                return _Judged(model, settings, can_be_saved=False)
            embedding = copy.deepcopy(embedding)
            embedding.cut(stream_generator(settings.training.seed, Stream.CODES))
        model = with_embedding(model, embedding.as_recjpq())
        return _Judged(model, settings.as_codes(), embedding)

    def _code_report(self, judged: _Judged) -> CodeReport | None:
        """Say how well learnt codes tell items apart: now, or when they came to rest."""
        if judged.learnt is not None:
            return judged.learnt.report()
        known = self.state.code_report
        return CodeReport(**known) if known is not None else None

    def _first_state(self, resume: bool) -> State:
        """Return the state of the checkpoint, loaded into model and optimiser, or a fresh one."""
        with writing_to(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        checkpoint = self.folder / CHECKPOINT
        if resume:
            state = load_checkpoint(checkpoint, self.settings, self.checksum, self._fit_stage)
            _keep_lines(self.folder / EPOCHS, state.epoch)
            self._write_settings()
            return state
        if (self.folder / MANIFEST).exists():
            raise InputError(
                f"{self.folder}: holds something else that recprune saved: take another folder"
            )
        if checkpoint.exists():
            raise InputError(
                f"{self.folder}: holds a training already: go on with --resume, or remove it"
            )
        _keep_lines(self.folder / EPOCHS, 0)
        self._write_settings()
        return self.state

    def _write_settings(self) -> None:
        """Write the settings for people: weights and checkpoint have them too, and those count."""
        text = json.dumps(self.settings.to_json(), indent=2, ensure_ascii=False) + "\n"
        with writing_file(self.folder / SETTINGS) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _untrained(settings: Settings, prepared: Prepared) -> SequenceModel:
    if settings.model.learns_codes:
        _refuse_many_vectors(settings, prepared.num_items)
        if not settings.may_keep_table(prepared.num_items):
            settings.check_cut()
        return build_learning_model(settings.model, prepared.num_items)
    codes, num_sub_items = prepared.codes, prepared.num_sub_items
    if settings.model.codes == "random":
        drawn = assign_random(
            prepared.num_items,
            num_splits=codes.shape[1],
            num_sub_items=num_sub_items,
            seed=settings.training.seed,
        )
        codes = drawn.codes
    return build_model(settings.model, codes, num_sub_items)


def _table_by_rows(embedding: ItemEmbedding, settings: Settings) -> nn.Parameter | None:
    """Return the table of item vectors, if steps look at few of its rows."""
    if not isinstance(embedding, FullEmbedding | LearntEmbedding):
        return None
    if settings.training.negatives == "own" or settings.training.loss == "cross_entropy":
        return None
    embedding.touched = TouchedRows(embedding.item_embeddings)
    return embedding.item_embeddings


def _refuse_many_vectors(settings: Settings, num_items: int) -> None:
    """Refuse to quantise the vectors of all candidates of all positions, in every step."""
    training = settings.training
    few = num_items <= (1 + training.num_negatives) * settings.model.width
    if training.negatives == "own" and training.loss != "cross_entropy" and not few:
        raise InputError(
            f"learnt codes for {num_items:,} items need negatives that a minibatch shares: "
            "set negatives=shared"
        )


def _make_step(
    training: _Training, compiled: bool, workers: Workers, asked_to_stop: Callable[[], bool]
) -> tuple[Step, Callable[[], bool]]:
    """Return the step, and what tells after it whether any worker was asked to stop."""
    model, optimiser = training.model, training.optimiser
    settings, prepared, device = training.settings, training.prepared, training.device
    if workers.count == 1:
        return SingleStep(model, optimiser, settings, prepared, device, compiled), asked_to_stop
    shared = SharedStep(
        model, optimiser, settings, prepared, device, compiled, workers, asked_to_stop
    )
    return shared, shared.stop_asked


def validation_ndcg(model: SequenceModel, prepared: Prepared, settings: Settings) -> float:
    """Return NDCG@10 of the validation users, over the full catalogue; 0 if there are none."""
    targets = prepared.validation
    rng = stream_generator(settings.training.seed, Stream.VALIDATION_USERS)
    shuffled = rng.permutation(len(targets))
    chosen = np.sort(shuffled[: settings.training.validation_users])
    histories = [prepared.history(targets, int(target)) for target in chosen]
    timelines = [prepared.timeline(targets, int(target)) for target in chosen]
    embeddings = encode_histories(model, settings.model.length, histories, timelines=timelines)
    exclude = histories if settings.training.exclude_seen else None
    boosts = model_boosts(
        model, settings.model, embeddings, histories, timelines, known_until=_one_cut(timelines)
    )
    ranks = target_ranks(model, embeddings, targets.items[chosen], exclude, boosts=boosts) + 1
    values = ndcg(RelevantRanks.of_targets(ranks), 10)
    return float(values.mean()) if len(values) else 0.0


def _one_cut(timelines: Sequence[Timeline | None]) -> int | None:
    """Return the moment that divides all histories from all requests; None if there is none."""
    known = [timeline for timeline in timelines if timeline is not None]
    newest = max((int(timeline.times[-1]) for timeline in known), default=0)
    first_asked = min((timeline.now for timeline in known), default=0)
    return min(newest + 1, first_asked) if newest <= first_asked else None


def _is_better(ndcg_10: float, best: float) -> bool:
    """As long as nothing at all is found, and without validation users, the newest is best."""
    return ndcg_10 > best or ndcg_10 == 0.0 == best


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


def _refuse_nan(total: float, epoch: int, number: int) -> None:
    if not math.isfinite(total):
        first = max(0, number - _REPORT_EVERY + 1)
        raise RecpruneError(
            f"the loss became {total} in epoch {epoch + 1}, between steps {first + 1} and "
            f"{number + 1}: try a lower learning_rate. What was saved before is whole"
        )


def _keep_lines(path: Path, epochs: int) -> None:
    """Leave only the lines of epochs that will not be run again."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    with writing_file(path) as temporary:
        temporary.write_text("".join(lines[:epochs]), encoding="utf-8")


def _append_line(path: Path, report: EpochReport) -> None:
    with writing_to(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(report)) + "\n")


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first request to stop into a question that the loop asks; a second stops at once."""
    asked = False

    def on_request() -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    with requests_to_stop(on_request):
        yield lambda: asked
