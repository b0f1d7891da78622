"""Training learns, stops, goes on where it stopped, and keeps the best."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recprune import InputError, RecpruneError, StorageError, Targets
from recprune.cli import main
from recprune.data.identifiers import IntegerIds
from recprune.models.architectures import SequenceModel, build_model
from recprune.models.settings import Settings
from recprune.preparation.prepared import Prepared
from recprune.training.checkpoint import epochs_until_best, load_code_report, load_model
from recprune.training.loop import EpochReport, train, validation_ndcg
from recprune.training.tensors import load_tensors, save_tensors
from recprune.types import InterruptedWorkError
from tests.preparation.test_prepared import cycle, dated, prepared_of
from tests.training.test_minibatches import KINDS, settings_of

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other

COMMAND = Path(sys.executable).with_name("recprune")
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
MODEL, CHECKPOINT, EPOCHS = "model.safetensors", "checkpoint.safetensors", "epochs.jsonl"

# Learning ----------------------------------------------------------------------------------------


def run(prepared: Prepared, settings: Settings, out: Path, **options: Any) -> list[EpochReport]:
    reports: list[EpochReport] = []
    train(prepared, settings, out, device="cpu", on_epoch=reports.append, **options)
    return reports


@pytest.mark.parametrize("embedding", ["recjpq", "full"])
def test_one_batch_is_learned_by_heart(tmp_path: Path, embedding: str) -> None:
    settings = settings_of(
        embedding=embedding, width=32, dropout=0.0, loss="softmax", batch_size=40, max_epochs=120
    )
    reports = run(cycle(40, 60), settings, tmp_path)
    assert reports[-1].steps == 120  # one each
    assert reports[-1].loss < reports[0].loss / 10


LEARNERS: dict[str, dict[str, Any]] = {
    "sasrec, bce": {"loss": "bce", "num_negatives": 1},
    "sasrec, gbce": {"loss": "gbce"},
    "sasrec, softmax": {"loss": "softmax"},
    "sasrec, shared negatives": {"loss": "softmax", "negatives": "shared", "num_in_batch": 8,
                                 "logq": True},
    "sasrec, cross-entropy": {"loss": "cross_entropy"},
    "sasrec, digits": {"loss": "digits"},
    "sasrec, random codes": {"loss": "softmax", "codes": "random"},
    "sasrec, learnt codes": {"loss": "softmax", "codes": "learnt", "num_splits": 4,
                             "num_sub_items": 8, "full_epochs": 10, "max_epochs": 60},
    "sasrec, full, 2 heads": {"loss": "gbce", "embedding": "full", "num_heads": 2},
    "timed": {"architecture": "timed", "loss": "softmax"},
    "timed, learnt codes, repeats": {"architecture": "timed", "loss": "softmax", "codes": "learnt",
                                     "num_splits": 4, "num_sub_items": 8, "full_epochs": 10,
                                     "max_epochs": 60, "repeats": 8},
    "bert4rec": {"architecture": "bert4rec", "loss": "softmax", "learning_rate": 0.003,
                 "batch_size": 60, "max_epochs": 150},
    "bert4rec, full, 2 heads": {"architecture": "bert4rec", "loss": "softmax", "embedding": "full",
                                "num_heads": 2, "learning_rate": 0.003, "batch_size": 60,
                                "max_epochs": 150},
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNERS)
def test_a_cycle_of_items_is_learned(tmp_path: Path, name: str) -> None:
    values: dict[str, Any] = {
        "width": 32,
        "dropout": 0.0,
        "batch_size": 20,
        "max_epochs": 40,
        "patience": 60,
    }
    prepared = cycle(60)
    settings = settings_of(**(values | LEARNERS[name]))
    run(prepared, settings, tmp_path)
    model, _ = load_model(tmp_path, prepared)
    assert validation_ndcg(model, prepared, settings) > 0.9
    # Also the test items, by which no epoch was judged.
    test = replace(prepared, validation=prepared.test)
    assert validation_ndcg(model, test, settings) > 0.9


@pytest.mark.parametrize("values", [{}, {"embedding": "full", "num_heads": 2, "num_blocks": 2}])
def test_what_only_the_time_tells_is_learned(tmp_path: Path, values: dict[str, Any]) -> None:
    """Items come at random; item c after a pause of 4^c seconds, whatever came before."""
    num_items = 15
    rng = np.random.default_rng(0)
    histories = rng.integers(0, num_items, (60, 14))
    codes = np.stack([np.arange(num_items) % 4, np.arange(num_items) // 4], 1).astype(np.uint8)
    prepared = prepared_of(histories.tolist(), codes, 4)
    times = np.cumsum(4**histories, axis=1).ravel() * 10**6
    prepared = replace(prepared, times=times)
    found = {}
    for architecture in ("sasrec", "timed"):
        settings = settings_of(
            architecture=architecture, loss="cross_entropy", max_epochs=40, dropout=0.0, **values
        )
        train(prepared, settings, tmp_path / architecture, device="cpu")
        model, _ = load_model(tmp_path / architecture, prepared)
        # Of the test items: the best epoch of many is better than chance on validation items.
        found[architecture] = validation_ndcg(
            model, replace(prepared, validation=prepared.test), settings
        )
    assert found["timed"] > 0.95
    assert found["sasrec"] < 0.5  # by chance, 0.3


def test_a_model_that_reads_times_is_of_a_log_with_these_times(tmp_path: Path) -> None:
    prepared = dated(cycle())
    run(prepared, settings_of(architecture="timed", max_epochs=1), tmp_path / "timed")
    run(prepared, settings_of(max_epochs=1), tmp_path / "plain")
    other = dated(cycle(), seed=1)
    load_model(tmp_path / "timed", prepared)
    load_model(tmp_path / "plain", other)
    with pytest.raises(InputError, match="was trained on another prepared log"):
        load_model(tmp_path / "timed", other)


def weights(out: Path, name: str = MODEL) -> dict[str, NDArray[Any]]:
    return load_tensors(out / name)[0]


def identical(first: dict[str, NDArray[Any]], second: dict[str, NDArray[Any]]) -> bool:
    assert set(first) == set(second)
    return all(array.tobytes() == second[name].tobytes() for name, array in first.items())


def lines_without_times(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / EPOCHS).read_text().splitlines()]
    return [
        {name: line[name] for name in line if "second" not in name}  # and steps per second
        for line in lines
    ]


@KINDS
def test_the_seed_decides_everything(tmp_path: Path, architecture: str) -> None:
    prepared, settings = dated(cycle()), settings_of(architecture=architecture)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))  # must not matter
        run(prepared, settings.with_values({"seed": seed}), tmp_path / name)
    assert identical(weights(tmp_path / "a", CHECKPOINT), weights(tmp_path / "b", CHECKPOINT))
    assert (tmp_path / "a" / MODEL).read_bytes() == (tmp_path / "b" / MODEL).read_bytes()
    assert lines_without_times(tmp_path / "a") == lines_without_times(tmp_path / "b")
    assert not identical(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_every_epoch_is_written_down_as_it_was_reported(tmp_path: Path) -> None:
    reports = run(cycle(), settings_of(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / EPOCHS).read_text().splitlines()]
    assert [EpochReport(**line) for line in lines] == reports
    assert [report.epoch for report in reports] == [1, 2, 3]
    assert [report.steps for report in reports] == [4, 8, 12]
    assert reports[0].best


def test_training_makes_its_folder_and_tells_where_it_ended(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    state = train(cycle(), settings_of(max_epochs=1), out, device="cpu")
    assert state.epoch == 1
    assert json.loads((out / EPOCHS).read_text())["ndcg"] == state.best_ndcg
    assert (out / MODEL).is_file()


def test_training_works_without_validation_users(tmp_path: Path) -> None:
    prepared = cycle()
    no_ids, no_places = np.empty(0, np.int32), np.empty(0, np.int64)
    none = Targets(no_ids, no_ids, no_places, no_places)
    reports = run(replace(prepared, validation=none), settings_of(), tmp_path)
    assert [report.ndcg for report in reports] == [0.0, 0.0, 0.0]
    # With nothing to choose by, the last weights are kept.
    kept, _ = load_tensors(tmp_path / MODEL)
    last, _ = load_tensors(tmp_path / CHECKPOINT)
    assert all(np.array_equal(array, last[f"model.{name}"]) for name, array in kept.items())


def test_training_works_in_a_thread(tmp_path: Path) -> None:
    """Where no signal arrives."""
    running = threading.Thread(target=run, args=(cycle(), settings_of(max_epochs=1), tmp_path))
    running.start()
    running.join(60)
    assert (tmp_path / MODEL).exists()


def test_what_was_seen_may_be_left_out_of_the_validation_ranking() -> None:
    """All users have been round the whole cycle but for the next item: it is all that is left."""
    prepared = cycle(20, 14, 15)  # 13 different items for training, then the last one
    settings = settings_of()
    model = untrained(prepared, settings)
    assert validation_ndcg(model, prepared, settings) < 0.9
    assert validation_ndcg(model, prepared, settings.with_values({"exclude_seen": True})) == 1.0


def untrained(prepared: Prepared, settings: Settings) -> SequenceModel:
    torch.manual_seed(0)
    return build_model(settings.model, prepared.codes, prepared.num_sub_items)


def test_learnt_codes_are_saved_with_the_model_and_are_its_own(tmp_path: Path) -> None:
    prepared = cycle()
    settings = settings_of(**LEARNT)
    reports = run(prepared, settings, tmp_path)
    assert not reports[0].best  # not cut yet: nothing could be saved
    saved = weights(tmp_path)
    assert saved["embedding.codes"].shape == (20, 4)
    assert not np.array_equal(saved["embedding.codes"], prepared.codes)
    assert "embedding.item_embeddings" not in saved  # the shadow table is gone
    model, _ = load_model(tmp_path, prepared)
    assert max(report.ndcg for report in reports[1:]) == validation_ndcg(model, prepared, settings)
    report = load_code_report(tmp_path)
    assert report is not None
    assert 0 <= report.unused_sub_items < 16
    assert 0.0 < report.quantisation_error < 1.0


def test_a_training_that_ends_before_its_codes_are_cut_saves_some_all_the_same(
    tmp_path: Path,
) -> None:
    prepared, settings = cycle(), settings_of(**LEARNT | {"full_epochs": 2})
    (report,) = run(prepared, settings, tmp_path, max_seconds=1e-9)
    assert report.best
    assert weights(tmp_path)["embedding.codes"].shape == (20, 4)
    run(prepared, settings, tmp_path, resume=True)


def test_the_best_epoch_is_one_that_was_saved(tmp_path: Path) -> None:
    """Before they are cut, full vectors are better than what comes of them."""
    lines = [
        {"epoch": 1, "ndcg": 0.3, "best": False},
        {"epoch": 2, "ndcg": 0.1, "best": True},
        {"epoch": 3, "ndcg": 0.2, "best": True},
        {"epoch": 4, "ndcg": 0.2, "best": False},
    ]
    (tmp_path / EPOCHS).write_text("\n".join(map(json.dumps, lines)))
    assert epochs_until_best(tmp_path) == {"max_epochs": 3}


def test_learnt_codes_of_many_items_need_shared_negatives(tmp_path: Path) -> None:
    prepared = cycle(num_items=100)
    settings = settings_of(**LEARNT)  # 4 negatives and a width of 16
    with pytest.raises(InputError, match="for 100 items need negatives that a minibatch shares"):
        train(prepared, settings, tmp_path, device="cpu")
    shared = settings.with_values({"negatives": "shared"})
    assert train(prepared, shared, tmp_path, device="cpu").epoch == 3


# Stopping and going on ---------------------------------------------------------------------------


LEARNT = {"codes": "learnt", "num_splits": 4, "num_sub_items": 4, "full_epochs": 1}


@pytest.mark.parametrize("values", [{}, LEARNT], ids=["svd", "learnt"])
def test_a_run_in_two_parts_is_the_run_in_one(tmp_path: Path, values: dict[str, Any]) -> None:
    prepared, settings = cycle(), settings_of(max_epochs=6, **values)
    run(prepared, settings, tmp_path / "whole")
    first = run(prepared, settings.with_values({"max_epochs": 2}), tmp_path / "parts")
    second = run(prepared, settings, tmp_path / "parts", resume=True)
    assert [report.epoch for report in first + second] == [1, 2, 3, 4, 5, 6]
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")


def assert_same_outcome(first: Path, second: Path) -> None:
    for name in (MODEL, CHECKPOINT):
        assert identical(weights(first, name), weights(second, name))
    assert lines_without_times(first) == lines_without_times(second)


def test_no_epoch_begins_after_the_time_is_up(tmp_path: Path) -> None:
    prepared, settings = cycle(), settings_of(max_epochs=4)
    run(prepared, settings, tmp_path / "whole")
    first = run(prepared, settings, tmp_path / "parts", max_seconds=1e-9)
    assert [report.epoch for report in first] == [1]
    run(prepared, settings, tmp_path / "parts", resume=True)
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")


@KINDS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_interrupted_within_an_epoch_is_the_run_in_one(
    tmp_path: Path, architecture: str, number: signal.Signals
) -> None:
    prepared = dated(cycle())
    settings = settings_of(architecture=architecture, batch_size=1, max_epochs=2)
    run(prepared, settings, tmp_path / "whole")

    def interrupt(step: int, of: int, _: float) -> None:
        if step < of:  # after 32 of 40 steps of the first epoch
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(InterruptedWorkError, match="in epoch 1 after 32 of 40 steps"):
        run(prepared, settings, tmp_path / "parts", on_steps=interrupt)
    assert signal.getsignal(number) is before
    with pytest.raises(InterruptedWorkError, match="in epoch 2 after 32 of 40 steps"):
        run(prepared, settings, tmp_path / "parts", on_steps=interrupt, resume=True)
    run(prepared, settings, tmp_path / "parts", resume=True)
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")
    assert (tmp_path / "parts" / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()


def test_a_checkpoint_within_an_epoch_is_as_good_as_one_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved after every step; then the power fails in the middle of the second epoch."""
    prepared, settings = cycle(), settings_of(max_epochs=2)
    run(prepared, settings, tmp_path / "whole")
    monkeypatch.setattr("recprune.training.loop._CHECKPOINT_EVERY", 0.0)
    monkeypatch.setattr("recprune.training.loop._SAVING_PAYS_AFTER", 0)
    saved: list[bytes] = []

    def remember(*_: object) -> None:
        saved.append((tmp_path / "parts" / CHECKPOINT).read_bytes())

    run(prepared, settings.with_values({"max_epochs": 1}), tmp_path / "parts")
    monkeypatch.setattr("recprune.training.loop._REPORT_EVERY", 2)
    run(prepared, settings, tmp_path / "parts", resume=True, on_steps=remember)
    (tmp_path / "parts" / CHECKPOINT).write_bytes(saved[-1])
    run(prepared, settings, tmp_path / "parts", resume=True)
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")


def test_a_finished_training_that_goes_on_does_nothing(tmp_path: Path) -> None:
    prepared, settings = cycle(), settings_of(max_epochs=2)
    run(prepared, settings, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(prepared, settings, tmp_path, resume=True) == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_epoch_done_again_after_a_crash_is_listed_once(tmp_path: Path) -> None:
    """The power fails after the epoch was written down, before the checkpoint was."""
    prepared, settings = cycle(), settings_of(max_epochs=3)
    run(prepared, settings.with_values({"max_epochs": 1}), tmp_path)
    old = (tmp_path / CHECKPOINT).read_bytes()
    run(prepared, settings.with_values({"max_epochs": 2}), tmp_path, resume=True)
    (tmp_path / CHECKPOINT).write_bytes(old)
    run(prepared, settings, tmp_path, resume=True)
    assert [line["epoch"] for line in lines_without_times(tmp_path)] == [1, 2, 3]


def test_a_training_begun_anew_lists_only_its_own_epochs(tmp_path: Path) -> None:
    """The first attempt dies in its second epoch, before there is a checkpoint."""

    def die(report: EpochReport) -> None:
        if report.epoch == 2:
            raise MemoryError

    prepared, settings = cycle(), settings_of()
    with pytest.raises(MemoryError):
        train(prepared, settings, tmp_path / "again", device="cpu", on_epoch=die)
    if (tmp_path / "again" / CHECKPOINT).exists():
        run(prepared, settings, tmp_path / "again", resume=True)
    else:
        run(prepared, settings, tmp_path / "again")
    run(prepared, settings, tmp_path / "whole")
    assert_same_outcome(tmp_path / "again", tmp_path / "whole")


def test_patience_ends_a_training_that_gets_no_better(tmp_path: Path) -> None:
    """Once NDCG is 1 it cannot rise: exactly so many epochs follow the best one."""
    settings = settings_of(
        width=32, dropout=0.0, loss="softmax", batch_size=20, max_epochs=100, patience=4
    )
    reports = run(cycle(60), settings, tmp_path)
    best = max(report.epoch for report in reports if report.best)
    assert reports[-1].epoch == best + 4 < 100
    assert max(report.ndcg for report in reports) == reports[best - 1].ndcg
    best_so_far = -1.0
    for report in reports:
        assert report.best == (report.ndcg > best_so_far)
        best_so_far = max(best_so_far, report.ndcg)


def test_the_best_weights_are_kept_not_the_last(tmp_path: Path) -> None:
    prepared = cycle(60)
    settings = settings_of(width=32, loss="softmax", batch_size=20, max_epochs=100, patience=3)
    kept: dict[int, bytes] = {}
    ndcg: dict[int, float] = {}

    def remember(report: EpochReport) -> None:
        ndcg[report.epoch] = report.ndcg
        kept[report.epoch] = (tmp_path / MODEL).read_bytes()

    train(prepared, settings, tmp_path, device="cpu", on_epoch=remember)
    best = max(ndcg, key=lambda epoch: (ndcg[epoch], -epoch))
    last = max(ndcg)
    assert last == best + 3
    assert (tmp_path / MODEL).read_bytes() == kept[best] != kept[1]
    assert float(load_tensors(tmp_path / MODEL)[1]["validation_ndcg"]) == ndcg[best]
    model, found = load_model(tmp_path, prepared)
    assert found == settings
    assert validation_ndcg(model, prepared, settings) == ndcg[best]
    newest = {
        name.removeprefix("model."): array
        for name, array in weights(tmp_path, CHECKPOINT).items()
        if name.startswith("model.")
    }
    assert not identical(weights(tmp_path), newest)


def test_a_loss_that_is_not_a_number_stops_the_training(tmp_path: Path) -> None:
    settings = settings_of(learning_rate=1e30, batch_size=5)
    with pytest.raises(
        RecpruneError, match=r"loss became (nan|inf) in epoch 1, between steps 1 and 8"
    ):
        run(cycle(), settings, tmp_path)
    assert not (tmp_path / MODEL).exists()


@KINDS
def test_a_model_that_has_diverged_is_never_the_best(tmp_path: Path, architecture: str) -> None:
    """With one step an epoch the loss is still finite when the weights no longer are."""
    settings = settings_of(
        architecture=architecture, learning_rate=1e30, batch_size=40, max_epochs=3
    )
    with pytest.raises(RecpruneError, match="in epoch"):
        run(cycle(), settings, tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        for name, array in load_tensors(path)[0].items():
            assert np.isfinite(array).all(), (path.name, name)
        if path.name == MODEL:
            assert float(load_tensors(path)[1]["validation_ndcg"]) < 1.0


def test_a_training_is_not_begun_over_another(tmp_path: Path) -> None:
    prepared, settings = cycle(), settings_of(max_epochs=1)
    run(prepared, settings, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match="holds a training already: go on with --resume"):
        run(prepared, settings, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", 0.02), ("seed", 5), ("width", 32), ("loss", "softmax"), ("length", 11)],
)
def test_other_settings_are_refused_by_name_when_going_on(
    tmp_path: Path, name: str, value: object
) -> None:
    prepared, settings = cycle(), settings_of(max_epochs=1)
    run(prepared, settings, tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(InputError, match=f"other settings: {name} was .*, is {value!r}$"):
        run(prepared, settings.with_values({name: value}), tmp_path, resume=True)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_what_may_change_is_not_blamed(tmp_path: Path) -> None:
    prepared, settings = cycle(), settings_of(max_epochs=1)
    run(prepared, settings, tmp_path)
    changed = settings.with_values({"seed": 3, "max_epochs": 9, "patience": 7})
    with pytest.raises(InputError, match="other settings: seed was 0, is 3$"):
        run(prepared, changed, tmp_path, resume=True)


def test_going_on_with_another_log_is_refused(tmp_path: Path) -> None:
    settings = settings_of(max_epochs=1)
    run(cycle(seed=0), settings, tmp_path)
    with pytest.raises(InputError):
        run(cycle(seed=1), settings.with_values({"max_epochs": 2}), tmp_path, resume=True)


def test_going_on_needs_a_whole_checkpoint(tmp_path: Path) -> None:
    prepared, settings = cycle(), settings_of(max_epochs=1)
    with pytest.raises(StorageError, match=f"{CHECKPOINT}: no such file"):
        run(prepared, settings, tmp_path, resume=True)
    run(prepared, settings, tmp_path)
    whole = (tmp_path / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(whole[:-10])
    with pytest.raises(StorageError, match=f"{CHECKPOINT}: damaged"):
        run(prepared, settings, tmp_path, resume=True)
    (tmp_path / CHECKPOINT).write_bytes((tmp_path / MODEL).read_bytes())
    with pytest.raises(StorageError, match=f"{CHECKPOINT}: not a whole checkpoint"):
        run(prepared, settings, tmp_path, resume=True)


TABLE = "embedding.item_embeddings"


@pytest.mark.parametrize(
    ("moment", "change"),
    [
        ("exp_avg", np.zeros_like),  # Adam's, which moved whole tables before
        ("exp_avg_sq", lambda squares: squares.mean(1)),  # one number a row
        ("exp_avg_sq", lambda _: None),
    ],
)
def test_going_on_with_what_another_optimiser_remembers_is_refused(
    tmp_path: Path, moment: str, change: Callable[[NDArray[Any]], NDArray[Any] | None]
) -> None:
    prepared = cycle()
    settings = settings_of(embedding="full", loss="softmax", negatives="shared", max_epochs=1)
    run(prepared, settings, tmp_path)
    tensors, metadata = load_tensors(tmp_path / CHECKPOINT)
    changed = change(tensors[f"exp_avg_sq.{TABLE}"])
    others = {name: array for name, array in tensors.items() if name != f"{moment}.{TABLE}"}
    new = {} if changed is None else {f"{moment}.{TABLE}": changed}
    save_tensors(tmp_path / CHECKPOINT, others | new, metadata)
    message = rf"{CHECKPOINT}: was trained by another optimiser: {moment}\.{TABLE};"
    with pytest.raises(InputError, match=message):
        run(prepared, settings.with_values({"max_epochs": 2}), tmp_path, resume=True)
    save_tensors(tmp_path / CHECKPOINT, tensors, metadata)
    run(prepared, settings.with_values({"max_epochs": 2}), tmp_path, resume=True)


def test_a_head_that_is_no_number_is_named_when_a_model_is_loaded(tmp_path: Path) -> None:
    prepared = cycle()
    settings = settings_of(loss="softmax", negatives="shared", repeats=3, max_epochs=1)
    run(prepared, settings, tmp_path)
    tensors, metadata = load_tensors(tmp_path / MODEL)
    tensors["repeats.weight"][4, 9] = np.nan
    save_tensors(tmp_path / MODEL, tensors, metadata)
    with pytest.raises(StorageError, match=rf"{MODEL}: repeats\.weight has nan at \[4, 9\]"):
        load_model(tmp_path, prepared)


def test_equal_codes_do_not_make_an_equal_log(tmp_path: Path) -> None:
    """Codes by chance depend on the number of items alone; what a model has learnt from does not."""
    prepared = cycle()
    run(prepared, settings_of(max_epochs=1), tmp_path)
    shifted = replace(prepared, train_ends=np.maximum(prepared.train_ends - 1, 0))
    renamed = replace(prepared, item_ids=IntegerIds(np.arange(prepared.num_items) + 1))
    for other in (shifted, renamed):
        with pytest.raises(InputError, match="trained on another prepared log"):
            load_model(tmp_path, other)


def test_a_folder_with_something_else_is_not_trained_into(tmp_path: Path) -> None:
    prepared = cycle()
    prepared.save(tmp_path / "prepared")
    with pytest.raises(InputError, match="holds something else"):
        run(prepared, settings_of(), tmp_path / "prepared")
    assert Prepared.load(tmp_path / "prepared").num_items == prepared.num_items


def test_a_model_saved_before_networks_had_a_width_of_their_own_is_as_wide_inside(
    tmp_path: Path,
) -> None:
    prepared = cycle()
    settings = settings_of(architecture="esasrec", inner_share=1.0, max_epochs=1)
    train(prepared, settings, tmp_path, device="cpu")
    tensors, metadata = load_tensors(tmp_path / MODEL)
    saved = json.loads(metadata["settings"])
    del saved["model"]["inner_share"]
    save_tensors(tmp_path / MODEL, tensors, metadata | {"settings": json.dumps(saved)})
    model, found = load_model(tmp_path, prepared)
    assert found == settings
    inner = model.state_dict()["blocks.0.inner.weight"]
    assert inner.shape == (16, 16)
    assert np.array_equal(inner.numpy(), tensors["blocks.0.inner.weight"])
    saved["model"]["inner_share"] = 0.25
    save_tensors(tmp_path / MODEL, tensors, metadata | {"settings": json.dumps(saved)})
    with pytest.raises(StorageError, match=r"does not fit the model: blocks\.0\.inner\.bias"):
        load_model(tmp_path, prepared)


def test_a_model_is_loaded_only_for_its_own_prepared_log(tmp_path: Path) -> None:
    prepared = cycle()
    run(prepared, settings_of(max_epochs=1), tmp_path)
    model, _ = load_model(tmp_path, prepared)
    assert not model.training
    with pytest.raises(InputError, match="trained on another prepared log"):
        load_model(tmp_path, cycle(seed=1))
    with pytest.raises(StorageError, match=f"{MODEL}: no such file"):
        load_model(tmp_path / "nowhere", prepared)
    (tmp_path / MODEL).write_bytes((tmp_path / CHECKPOINT).read_bytes())
    with pytest.raises(StorageError, match="not a trained model"):
        load_model(tmp_path, prepared)


# The command -------------------------------------------------------------------------------------

SETTINGS = ["--preset", "gsasrec"] + [
    word
    for value in ("width=16", "length=12", "num_blocks=1", "num_negatives=4", "max_epochs=3")
    for word in ("--set", value)
]


def best_line(shown: str) -> str:
    (found,) = re.findall(r"best NDCG@10 on validation: [\d.]+", shown)
    return str(found)


def test_ctrl_c_saves_and_resuming_ends_like_an_uninterrupted_run(tmp_path: Path) -> None:
    cycle(60, 40).save(tmp_path / "prepared")
    one_user = [*SETTINGS, "--set", "batch_size=1"]
    arguments: list[str | Path] = [COMMAND, "train", tmp_path / "prepared", *one_user]
    whole = subprocess.run(
        [*arguments, "--out", tmp_path / "whole"],
        capture_output=True,
        text=True,
        check=True,
        env=ONE_THREAD,
    )
    running = subprocess.Popen(
        [*arguments, "--out", tmp_path / "parts"], stderr=subprocess.PIPE, text=True, env=ONE_THREAD
    )
    assert running.stderr is not None
    shown = ""
    while "epoch   1" not in shown:
        line = running.stderr.readline()
        assert line, shown
        shown += line
    time.sleep(0.05)
    os.kill(running.pid, signal.SIGINT)
    _, complaint = running.communicate(timeout=60)
    assert running.returncode == 130
    message = r"recprune train: interrupted in epoch (\d) after (\d+) of 60 steps; .* --resume\n"
    found = re.fullmatch(message, complaint.splitlines(keepends=True)[-1])
    assert found is not None, complaint
    assert 0 < int(found[2]) < 60
    assert "Traceback" not in complaint
    resumed = subprocess.run(
        [*arguments, "--out", tmp_path / "parts", "--resume"],
        capture_output=True,
        text=True,
        check=True,
        env=ONE_THREAD,
    )
    assert (tmp_path / "parts" / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")
    assert (tmp_path / "parts" / "training.png").stat().st_size > 1000
    # The best of the whole training is reported, not that of its second part.
    assert best_line(resumed.stderr) == best_line(whole.stderr)


def test_a_finished_training_still_knows_its_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cycle(20).save(tmp_path / "prepared")
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "out"), *SETTINGS]
    assert main(arguments) == 0
    first = best_line(capsys.readouterr().err)
    assert not first.endswith(" 0.0000")
    # What it was trained with need not be said again.
    assert main([*arguments[:4], "--resume"]) == 0
    assert best_line(capsys.readouterr().err) == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "nowhere", "--out", "x"], "nowhere: not a saved prepared log"),
        (["train", "prepared", "--out", "x", "--resume"], f"{CHECKPOINT}: no such file"),
        (["train", "prepared", "--out", "done"], "done: holds a training already"),
        (["train", "prepared", "--out", "done", "--resume", "--set", "seed=8"], "seed was 0, is 8"),
        (["train", "prepared", "--out", "x", "--device", "gpu"], "gpu"),
        (["train", "prepared", "--out", "x", "--device", "cuda:99"], "cuda:99"),
        (["train", "prepared", "--out", "x", "--set", "learning_rate=1e30"], "in epoch 1"),
    ],
)
def test_mistakes_in_training_end_with_a_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    cycle(20).save("prepared")
    small = [*SETTINGS, "--set", "batch_size=5"]
    if "done" in words:
        assert main(["train", "prepared", "--out", "done", *small]) == 0
    capsys.readouterr()
    assert main([*words[:2], *small, *words[2:]]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.splitlines()[-1].startswith("recprune train: ")
    assert not Path("x", MODEL).exists()


def test_a_training_without_time_for_an_epoch_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cycle(20).save(tmp_path / "prepared")
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "out"), *SETTINGS]
    main([*arguments, "--max-minutes", "0"])
    assert f"weights in {tmp_path / 'out' / MODEL}" not in capsys.readouterr().err  # there are none


@pytest.mark.parametrize("tested", [True, False])
def test_a_training_says_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tested: bool
) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    log = cycle(20)
    none = Targets(*(np.zeros(0, array.dtype) for array in astuple(log.test)))
    (log if tested else replace(log, test=none)).save(prepared)
    assert main(["train", str(prepared), "--out", str(out), *SETTINGS]) == 0
    export = f"recprune export {prepared} {out} --out RECOMMENDER"
    # Without test users there is nobody to evaluate on.
    expected = f"recprune evaluate {prepared} {out}, then {export}" if tested else export
    assert f"next: {expected}\n" in capsys.readouterr().err


def test_a_training_that_ran_out_of_time_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cycle(20).save(tmp_path / "prepared")
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "out"), *SETTINGS]
    assert main([*arguments, "--max-minutes", "1e-9"]) == 0
    assert "time was up after 1 epochs, of 3 at most" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert "time was up" not in capsys.readouterr().err


def test_training_runs_where_there_are_only_torch_safetensors_and_numpy(tmp_path: Path) -> None:
    cycle(20).save(tmp_path / "prepared")
    blocked = (
        "polars",
        "rich",
        "scipy",
        "pyarrow",
        "onnx",
        "matplotlib",
        "pandas",
        "threadpoolctl",
        "recprune._native",
    )
    code = f"""
        import sys
        for name in {blocked!r}:
            sys.modules[name] = None
        from recprune.cli import main
        sys.exit(main(sys.argv[1:]))
    """
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "out"), *SETTINGS]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    assert "no picture of the training: this needs matplotlib" in done.stderr
    assert [line["epoch"] for line in lines_without_times(tmp_path / "out")] == [1, 2, 3]
    prepared = Prepared.load(tmp_path / "prepared")
    model, _ = load_model(tmp_path / "out", prepared)
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
