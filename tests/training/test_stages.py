"""Trainings that learn codes: full vectors, codes that change, codes that stay."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recprune import InputError, Targets
from recprune.cli import main
from recprune.models.settings import Settings
from recprune.preparation.prepared import Prepared
from recprune.recommender.recommender import Recommender
from recprune.training.checkpoint import epochs_until_best, load_code_report, load_model
from recprune.training.loop import EpochReport, train, validation_ndcg
from recprune.training.tuning import tune
from recprune.types import InterruptedWorkError
from tests.preparation.test_prepared import cycle
from tests.support.small_models import walks
from tests.training.test_minibatches import settings_of
from tests.training.test_placement import groups, with_content
from tests.training.test_training import (
    CHECKPOINT,
    EPOCHS,
    MODEL,
    assert_same_outcome,
    identical,
    lines_without_times,
    run,
    weights,
)

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other

LEARNT: dict[str, Any] = {
    "codes": "learnt", "num_splits": 4, "num_sub_items": 4, "full_epochs": 2, "code_epochs": 2,
    "max_epochs": 6,
}  # fmt: skip
SHARED = {"loss": "softmax", "negatives": "shared", "num_in_batch": 3}


def learnt(**values: Any) -> Settings:
    return settings_of(**LEARNT | values)


def stages_of(reports: list[EpochReport]) -> str:
    """One letter for every epoch."""
    letters = {"full": "F", "learning": "C", "last": "L"}
    return "".join(letters[report.stage] for report in reports)


def unvalidated(prepared: Prepared) -> Prepared:
    no_ids, no_places = np.empty(0, np.int32), np.empty(0, np.int64)
    return replace(prepared, validation=Targets(no_ids, no_ids, no_places, no_places))


# One after the other -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "code", "most", "expected"),
    [
        (2, 2, 6, "FFCCLL"),
        (1, 3, 5, "FCCCL"),
        (0, 2, 4, "CCLL"),
        (2, 0, 4, "FFLL"),
        (0, 0, 2, "LL"),
        (1, 9, 3, "FCC"),
    ],
)
def test_stages_begin_at_the_epochs_that_settings_say(
    tmp_path: Path, full: int, code: int, most: int, expected: str
) -> None:
    settings = learnt(full_epochs=full, code_epochs=code, max_epochs=most)
    reports = run(cycle(), settings, tmp_path)
    assert stages_of(reports) == expected
    names = [line["stage"] for line in lines_without_times(tmp_path)]
    assert names == [report.stage for report in reports]
    assert [report.can_be_saved for report in reports] == [name != "full" for name in names]
    assert weights(tmp_path)["embedding.codes"].shape == (20, 4)


def test_given_codes_have_the_last_stage_alone(tmp_path: Path) -> None:
    reports = run(cycle(), settings_of(full_epochs=1, code_epochs=1), tmp_path)
    assert stages_of(reports) == "LLL"


@pytest.mark.parametrize(
    ("patience", "code", "expected"),
    [
        (2, 50, "FFF" + "CCC" + "LLL"),  # the first epoch of a stage, and two that are no better
        (5, 50, "FFFF" + "CCCCCC" + "LLLLLL"),  # full vectors have three chances, at most
        (5, 2, "FFFF" + "CC" + "LLLLLL"),
    ],
)
def test_a_stage_that_gets_no_better_makes_way_for_the_next_and_the_last_ends_it(
    tmp_path: Path, patience: int, code: int, expected: str
) -> None:
    """As many sub-items as items lose nothing, and such steps move nothing: NDCG stays."""
    settings = learnt(
        learning_rate=1e-12, num_sub_items=32, full_epochs=50, code_epochs=code, max_epochs=99,
        patience=patience,
    )  # fmt: skip
    reports = run(cycle(), settings, tmp_path)
    assert {report.ndcg for report in reports} == {reports[0].ndcg}
    assert reports[0].ndcg > 0.0
    assert stages_of(reports) == expected


def test_each_stage_has_a_best_of_its_own(tmp_path: Path) -> None:
    """Two sub-items cannot say what vectors could: codes are worse, and yet get their patience."""
    settings = learnt(
        num_splits=1, num_sub_items=2, loss="softmax", dropout=0.0, embedding="auto",
        full_epochs=12, code_epochs=3, max_epochs=18, patience=3,
    )  # fmt: skip
    reports = run(cycle(), settings, tmp_path)
    stages = stages_of(reports)
    full = [report.ndcg for report in reports if report.stage == "full"]
    later = [report.ndcg for report in reports if report.stage != "full"]
    assert max(later) < max(full)
    assert stages.count("C") == 3
    assert stages.count("L") >= 3


# Stopping and going on ---------------------------------------------------------------------------


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "own negatives": (cycle, {}),
    # More sub-items than items: some are unused, and put elsewhere between two epochs.
    "rows of a table": (cycle, SHARED | {"num_sub_items": 32}),
    "full or codes": (cycle, {"embedding": "auto"}),
    "cold items": (lambda: with_content(groups(20)), SHARED),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_run_interrupted_after_every_step_is_the_run_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first and the last steps of all stages among them."""
    make, values = KINDS[name]
    prepared, settings = make(), learnt(**values)
    run(prepared, settings, tmp_path / "whole")
    monkeypatch.setattr("recprune.training.loop._REPORT_EVERY", 1)

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    out = tmp_path / "parts"
    steps = lines_without_times(tmp_path / "whole")[-1]["steps"]
    for number in range(steps):
        with pytest.raises(InterruptedWorkError, match="all is saved"):
            run(prepared, settings, out, on_steps=interrupt, resume=number > 0)
    reports = run(prepared, settings, out, resume=True)
    assert stages_of(reports) == "L"  # nothing but the end of the last epoch was left
    assert_same_outcome(out, tmp_path / "whole")
    assert (out / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()
    assert [line["stage"][0] for line in lines_without_times(out)] == list("ffllll")


def in_parts(prepared: Prepared, settings: Settings, out: Path) -> list[EpochReport]:
    """Run one epoch at a time, as long as there are some."""
    reports = run(prepared, settings, out, max_seconds=1e-9)
    while new := run(prepared, settings, out, max_seconds=1e-9, resume=True):
        assert len(new) == 1
        reports += new
    return reports


@pytest.mark.parametrize("name", ["full or codes", "cold items"])
def test_a_run_that_stops_after_every_epoch_is_the_run_in_one(tmp_path: Path, name: str) -> None:
    make, values = KINDS[name]
    prepared, settings = make(), learnt(**values | {"embedding": "auto"})
    run(prepared, settings, tmp_path / "whole")
    assert stages_of(in_parts(prepared, settings, tmp_path / "parts")) == "FFCCLL"
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")
    parts, whole = (tmp_path / part / MODEL for part in ("parts", "whole"))
    assert parts.read_bytes() == whole.read_bytes()


def test_codes_that_are_cut_only_to_be_saved_do_not_decide_when_full_vectors_are_cut(
    tmp_path: Path,
) -> None:
    """When time is up among full vectors, codes of them are saved; they are worse than these."""
    prepared = cycle()
    settings = learnt(
        num_splits=1, num_sub_items=2, loss="softmax", dropout=0.0, full_epochs=6, max_epochs=9,
        patience=1,
    )  # fmt: skip
    whole = run(prepared, settings, tmp_path / "whole")
    parts = in_parts(prepared, settings, tmp_path / "parts")
    assert stages_of(parts) == stages_of(whole)
    assert stages_of(whole).startswith("FFF")
    # Of the codes that were saved, where the run in one had full vectors.
    assert max(report.ndcg for report in parts[:3]) < whole[2].ndcg
    first, second = (weights(tmp_path / part, CHECKPOINT) for part in ("parts", "whole"))
    assert identical(first, second)


# Codes that stay ---------------------------------------------------------------------------------


def test_codes_stay_while_sub_item_embeddings_move(tmp_path: Path) -> None:
    prepared, settings = cycle(), learnt(full_epochs=1, code_epochs=2)
    seen = []
    for most in (3, 4, 5, 6):
        goes_on = settings.with_values({"max_epochs": most})
        run(prepared, goes_on, tmp_path, resume=most > 3)
        seen.append(weights(tmp_path, CHECKPOINT))
    learning, *last = seen
    codes, moved = "model.embedding.codes", "model.embedding.sub_item_embeddings"
    assert codes not in learning
    table, centroids = learning["model.embedding.item_embeddings"], learning[moved]
    distances = np.square(table.reshape(20, 4, 1, 4) - centroids).sum(-1)  # [items, M, B]
    for arrays in last:
        assert "model.embedding.item_embeddings" not in arrays
        assert np.array_equal(arrays[codes], distances.argmin(-1))
    for before, after in zip(seen[:-1], last, strict=True):
        assert (np.abs(after[moved] - before[moved]).max(-1) > 1e-4).mean() > 0.5
    # Of 4 steps in each of 6 epochs, Adam remembers all that it made with the encoder.
    made = {name: int(last[-1][name]) for name in last[-1] if name.startswith("step.")}
    assert made.pop("step.embedding.sub_item_embeddings") == 12
    assert set(made.values()) == {24}


def test_every_model_that_is_saved_ranks_as_the_one_that_was_judged(tmp_path: Path) -> None:
    prepared, settings = cycle(), learnt(loss="softmax", dropout=0.0, max_epochs=8)
    seen = set()

    def judge(report: EpochReport) -> None:
        if report.best:
            model, _ = load_model(tmp_path, prepared)
            assert validation_ndcg(model, prepared, settings) == report.ndcg
            seen.add(report.stage)

    train(prepared, settings, tmp_path, device="cpu", on_epoch=judge)
    assert seen == {"learning", "last"}


def test_the_last_weights_are_those_that_are_saved_without_validation_users(
    tmp_path: Path,
) -> None:
    prepared = unvalidated(cycle())
    run(prepared, learnt(), tmp_path)
    trained = weights(tmp_path, CHECKPOINT)
    names = [name for name in trained if name.startswith("model.")]
    assert identical(
        weights(tmp_path), {name.removeprefix("model."): trained[name] for name in names}
    )
    model, _ = load_model(tmp_path, prepared)
    codes, vectors = (weights(tmp_path)[f"embedding.{name}"] for name in (
        "codes", "sub_item_embeddings"))  # fmt: skip
    by_hand = np.concatenate([vectors[split][codes[:, split]] for split in range(4)], axis=1)
    with torch.no_grad():
        assert np.array_equal(model.embedding.vectors(torch.arange(20)).numpy(), by_hand)


def test_the_report_of_codes_is_that_of_the_saved_ones_and_survives_resuming(
    tmp_path: Path,
) -> None:
    """Without validation users every epoch is saved."""
    prepared, settings = unvalidated(cycle()), learnt(num_sub_items=3)
    reports = {}

    def remember(epoch: EpochReport) -> None:
        if not epoch.can_be_saved:
            assert not (tmp_path / MODEL).exists()
            return
        report, codes = load_code_report(tmp_path), weights(tmp_path)["embedding.codes"]
        assert report is not None
        _, place, times = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
        assert report.items_sharing_a_code == int((times[place.ravel()] > 1).sum())
        used = sum(len(np.unique(codes[:, split])) for split in range(4))
        assert report.unused_sub_items == 12 - used
        reports[epoch.epoch] = report

    for most in (3, 4, 5, 6):  # ends in codes that change, with them, and in codes that stay
        goes_on = settings.with_values({"max_epochs": most})
        train(prepared, goes_on, tmp_path, device="cpu", resume=most > 3, on_epoch=remember)
    assert list(reports) == [3, 4, 5, 6]
    assert reports[3] != reports[4]
    assert reports[4] == reports[5] == reports[6]  # codes and the table they were learnt from
    assert 0.0 < reports[6].quantisation_error < 1.0


# A full table or codes ---------------------------------------------------------------------------


AUTO: dict[str, Any] = {
    "embedding": "auto", "loss": "softmax", "dropout": 0.0, "width": 16, "full_epochs": 12,
    "code_epochs": 2, "max_epochs": 16,
}  # fmt: skip
# Two sub-items cannot tell twenty items apart; one epoch of full vectors has hardly begun.
TABLE_WINS = learnt(**AUTO | {"num_splits": 1, "num_sub_items": 2})
CODES_WIN = learnt(**AUTO | {"num_sub_items": 16, "full_epochs": 1})


def test_a_full_table_is_kept_where_it_validates_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared, out = cycle(), tmp_path / "model"
    prepared.save(tmp_path / "prepared")
    reports = run(prepared, TABLE_WINS, out)
    assert all(report.can_be_saved for report in reports)
    best = max(reports, key=lambda report: report.ndcg)
    assert best.stage == "full"
    model, settings = load_model(out, prepared)
    assert settings == TABLE_WINS.with_values({"embedding": "full"})
    assert weights(out)["embedding.item_embeddings"].shape == (20, 16)
    assert "embedding.codes" not in weights(out)
    assert load_code_report(out) is None
    assert validation_ndcg(model, prepared, settings) == best.ndcg
    folders = [str(tmp_path / "prepared"), str(out)]
    assert main(["evaluate", *folders, "--no-baselines"]) == 0
    assert "NDCG@10" in capsys.readouterr().out
    assert main(["export", *folders, "--out", str(tmp_path / "recommender")]) == 0
    recommender = Recommender.load(tmp_path / "recommender")
    assert recommender.recommend([[3, 4, 5]], k=1).items == [[6]]
    assert Recommender.from_training(prepared, out).recommend([[8, 9]], k=1).items == [[10]]
    # The checkpoint has the settings that were given: training may go on, codes may win yet.
    assert run(prepared, TABLE_WINS, out, resume=True) == []


def test_codes_are_kept_where_they_validate_better(tmp_path: Path) -> None:
    prepared = cycle()
    reports = run(prepared, CODES_WIN, tmp_path)
    assert reports[0].best  # a table, for the time being
    assert max(reports, key=lambda report: report.ndcg).stage != "full"
    model, settings = load_model(tmp_path, prepared)
    assert settings == CODES_WIN.with_values({"embedding": "recjpq"})
    assert weights(tmp_path)["embedding.codes"].shape == (20, 4)
    assert load_code_report(tmp_path) is not None
    assert validation_ndcg(model, prepared, settings) == max(report.ndcg for report in reports)


def test_a_large_catalogue_never_keeps_a_full_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = cycle()
    run(prepared, TABLE_WINS, tmp_path / "small")
    monkeypatch.setattr("recprune.models.settings.MAX_SUB_ITEMS", 19)
    reports = run(prepared, TABLE_WINS, tmp_path / "large")
    full = [report for report in reports if report.stage == "full"]
    assert full
    assert not any(report.best or report.can_be_saved for report in full)
    assert load_model(tmp_path / "small", prepared)[1].model.embedding == "full"
    assert load_model(tmp_path / "large", prepared)[1].model.embedding == "recjpq"
    assert load_code_report(tmp_path / "large") is not None
    # The same steps: only what is kept of them differs.
    first, second = (weights(tmp_path / size, CHECKPOINT) for size in ("small", "large"))
    assert identical(first, second)


def test_a_large_catalogue_must_come_to_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TABLE_WINS.with_values({"full_epochs": 16})
    monkeypatch.setattr("recprune.models.settings.MAX_SUB_ITEMS", 19)
    with pytest.raises(InputError, match="full_epochs is 16, expected less than max_epochs 16"):
        run(cycle(), settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_full_vectors_may_take_all_epochs_and_codes_come_if_they_stop_getting_better(
    tmp_path: Path,
) -> None:
    prepared = unvalidated(cycle())
    run(prepared, TABLE_WINS.with_values({"full_epochs": 3, "max_epochs": 3}), tmp_path / "full")
    assert load_model(tmp_path / "full", prepared)[1].model.embedding == "full"
    settings = CODES_WIN.with_values(
        {"full_epochs": 9, "max_epochs": 9, "learning_rate": 1e-12, "patience": 2}
    )
    reports = run(cycle(), settings, tmp_path / "cut")
    assert stages_of(reports) == "FFFCCLLL"


def test_a_full_table_or_codes_needs_codes_that_are_learnt() -> None:
    with pytest.raises(InputError, match="a full table and learnt codes, but codes is svd"):
        settings_of(embedding="auto")


@pytest.mark.parametrize(
    ("settings", "kept"), [(TABLE_WINS, "full"), (CODES_WIN, "recjpq")], ids=["full", "recjpq"]
)
def test_trials_choose_a_full_table_or_codes_each(
    tmp_path: Path, settings: Settings, kept: str
) -> None:
    prepared = cycle()
    reports = tune(
        prepared, settings, tmp_path, space={"learning_rate": [0.01, 0.02]}, trials=2, device="cpu"
    )
    assert [report.state for report in reports] == ["complete", "complete"]
    folder = tmp_path / "trials" / f"{reports[0].number:04}"
    model, found = load_model(folder, prepared)
    assert found.model.embedding == kept
    assert validation_ndcg(model, prepared, found) == reports[0].ndcg
    best = Settings.from_json(json.loads((tmp_path / "best.json").read_text()))
    assert best.model.embedding == "auto"


def test_a_trial_whose_time_is_up_between_stages_is_not_complete(tmp_path: Path) -> None:
    """Its patience is at an end, but only that of the stage."""
    settings = learnt(learning_rate=1e-12, num_sub_items=32, full_epochs=5, patience=1)
    given: dict[str, Any] = {"space": {"dropout": [0.0]}, "trials": 1, "device": "cpu"}
    states = []
    for number in range(6):
        (report,) = tune(cycle(), settings, tmp_path, **given, resume=number > 0, max_seconds=1e-9)
        states.append((report.state, report.epochs))
    assert states == [("unfinished", epochs) for epochs in range(1, 6)] + [("complete", 6)]


# As many epochs as were best ---------------------------------------------------------------------


def test_epochs_until_the_best_have_the_stages_of_the_earlier_training(tmp_path: Path) -> None:
    """Full vectors were cut after two of many epochs: without validation users, that is known."""
    lines = [
        {"epoch": epoch, "ndcg": 0.1, "best": epoch == 4, "stage": stage}
        for epoch, stage in enumerate(["full", "full", "learning", "last", "last"], start=1)
    ]
    (tmp_path / EPOCHS).write_text("\n".join(map(json.dumps, lines)))
    expected = {"max_epochs": 4, "full_epochs": 2, "code_epochs": 1}
    assert epochs_until_best(tmp_path) == expected
    for line in lines:
        del line["stage"]
    (tmp_path / EPOCHS).write_text("\n".join(map(json.dumps, lines)))
    assert epochs_until_best(tmp_path) == {"max_epochs": 4}


CUT_EARLY = CODES_WIN.with_values({"embedding": "recjpq", "full_epochs": 39, "max_epochs": 40})


@pytest.mark.parametrize(
    ("settings", "kept"),
    [(TABLE_WINS, "full"), (CODES_WIN, "recjpq"), (CUT_EARLY, "recjpq")],
    ids=["full", "recjpq", "cut early"],
)
def test_the_served_model_is_of_the_kind_that_was_best_and_as_old(
    tmp_path: Path, settings: Settings, kept: str
) -> None:
    settings = settings.with_values({"max_epochs": 40, "patience": 4})
    reports = run(cycle(), settings, tmp_path / "earlier")
    best = [report for report in reports if report.best][-1].epoch
    unvalidated(cycle()).save(tmp_path / "whole")
    given = tmp_path / "settings.json"
    given.write_text(json.dumps(settings.to_json()))
    words = ["train", str(tmp_path / "whole"), "--settings", str(given), "--device", "cpu"]
    words += ["--epochs-of", str(tmp_path / "earlier"), "--out", str(tmp_path / "final")]
    assert main(words) == 0
    if settings.training.full_epochs == 39:
        assert 3 < stages_of(reports).count("F") < 39  # they got no better
    again = lines_without_times(tmp_path / "final")
    assert [line["stage"] for line in again] == [report.stage for report in reports[:best]]
    assert load_model(tmp_path / "final", unvalidated(cycle()))[1].model.embedding == kept
    # No validation users: the same log, and so the same weights.
    assert identical(weights(tmp_path / "final"), weights(tmp_path / "earlier"))


def test_fitting_a_log_keeps_what_validates_better_and_all_of_it_the_same(tmp_path: Path) -> None:
    log = walks(40, 60, "integers", seed=1)
    values = {name: value for name, value in AUTO.items() if name != "max_epochs"}
    values |= {"codes": "learnt", "num_splits": 1, "num_sub_items": 2, "learning_rate": 0.01}
    values |= {"length": 12, "num_blocks": 1, "num_negatives": 16, "device": "cpu"}
    first, out = tmp_path / "first", tmp_path / "whole"
    Recommender.fit(log, preset="sasrec", out=first, max_epochs=16, **values)
    whole = Recommender.fit(
        log, preset="sasrec", train_fraction=1.0, epochs_of=first, out=out, **values
    )
    assert whole.settings["model"]["embedding"] == "full"
    assert len(lines_without_times(out)) == epochs_until_best(first)["max_epochs"]
    whole.save(tmp_path / "saved")
    loaded = Recommender.load(tmp_path / "saved", encoder="torch")
    questions = [[7 * item - 100 for item in range(start, start + 4)] for start in range(9)]
    assert loaded.recommend(questions, 3).items == whole.recommend(questions, 3).items
