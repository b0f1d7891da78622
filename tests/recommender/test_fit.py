"""A log becomes a recommender in one call, with the settings that were asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from recprune import InputError, assign_svd, temporal_holdout
from recprune.models.architectures import build_model
from recprune.models.settings import Settings
from recprune.preparation.prepared import Prepared, prepare
from recprune.recommender.recommender import Recommender
from recprune.training.checkpoint import load_model, save_model
from recprune.training.loop import EpochReport
from tests.preparation.test_prepared import prepared_of
from tests.support.small_models import SMALL, walks
from tests.support.trainings import assert_same_answers

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other


QUICK = SMALL | {"preset": "gsasrec", "width": 16, "max_epochs": 1}


def test_fitting_a_log_gives_a_recommender(tmp_path: Path) -> None:
    log = walks(40, 60, "strings", seed=1)
    recommender = Recommender.fit(
        log, num_splits=4, num_sub_items=8, device="cpu", out=tmp_path / "kept", **QUICK
    )
    found = recommender.recommend([["a", "b", "zzz"]], 5)
    assert len(set(found.items[0])) == 5
    assert not {"a", "b"} & set(found.items[0])
    assert found.unknown == [["zzz"]]
    assert set(found.items[0]) <= set(log.item_ids.take(range(log.num_items)))
    assert "60 items" in repr(recommender)
    assert recommender.settings["model"]["width"] == 16
    assert recommender.settings["training"]["max_epochs"] == 1
    settings = json.loads((tmp_path / "kept" / "settings.json").read_text())
    assert settings == {part: recommender.settings[part] for part in ("model", "training")}
    # What was kept is the training of this very recommender.
    lines = (tmp_path / "kept" / "epochs.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1]
    holdout = temporal_holdout(log)
    prepared = prepare(holdout, assign_svd(holdout.train, num_splits=4, num_sub_items=8), {})
    again = Recommender.from_training(prepared, tmp_path / "kept")
    assert again.recommend([["a", "b", "zzz"]], 5).items == found.items
    # It is not written over.
    with pytest.raises(InputError, match="kept: holds a training already"):
        Recommender.fit(
            log, num_splits=4, num_sub_items=8, device="cpu", out=tmp_path / "kept", **QUICK
        )


def test_fit_says_what_was_kept_and_why(tmp_path: Path) -> None:
    """Full vectors or codes learnt from them, by validation users: also after saving."""
    log = walks(40, 60, "integers", seed=2)
    small = SMALL | {"max_epochs": 3, "full_epochs": 1, "repeats": 12, "num_heads": 2}
    recommender = Recommender.fit(
        log, num_splits=4, num_sub_items=8, device="cpu", out=tmp_path / "kept", **small
    )
    text = (tmp_path / "kept" / "epochs.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    table, codes = lines[0]["ndcg"], max(line["ndcg"] for line in lines[1:])
    assert recommender.index.num_splits in (1, 4)
    is_table = recommender.index.num_splits == 1
    form, kept = ("full table", "the full table") if is_table else ("learnt codes",) * 2
    assert is_table == (table >= codes > 0.0)
    expected = (
        f"Recommender(timed, {form}, 60 items; kept {kept}: "
        f"NDCG@10 {table:.4f} with a full table, {codes:.4f} with learnt codes)"
    )
    assert repr(recommender) == expected
    recommender.save(tmp_path / "saved")
    assert repr(Recommender.load(tmp_path / "saved")) == expected
    chosen = Recommender.fit(
        log, "gsasrec", num_splits=4, num_sub_items=8, device="cpu", **SMALL | {"max_epochs": 1}
    )
    assert repr(chosen) == "Recommender(sasrec, svd codes, 60 items)"


@pytest.mark.parametrize(
    ("values", "train_fraction", "expected"),
    [
        ({"full_epochs": 0}, 0.9, "learnt codes, 60 items; kept learnt codes, as no epoch had an"),
        ({"full_epochs": 5}, 0.9, "full table, 60 items; kept the full table, as no epoch had an"),
        ({"full_epochs": 1}, 1.0, "learnt codes, 60 items; kept learnt codes, as the last epoch"),
    ],
)
def test_fit_says_so_where_nothing_was_compared(
    values: dict[str, int], train_fraction: float, expected: str
) -> None:
    recommender = Recommender.fit(
        walks(40, 60, "integers", seed=2),
        num_splits=4,
        num_sub_items=8,
        device="cpu",
        train_fraction=train_fraction,
        **SMALL | {"num_heads": 2, "max_epochs": 2} | values,
    )
    assert expected in repr(recommender)


def test_all_of_a_log_can_be_fitted(tmp_path: Path) -> None:
    log = walks(40, 60, "integers", seed=1)
    sizes: dict[str, Any] = {"num_splits": 4, "num_sub_items": 8, "device": "cpu"}
    quick = {name: value for name, value in QUICK.items() if name != "max_epochs"}
    with pytest.raises(InputError, match="train_fraction is 1.0, .* give max_epochs, or epochs_of"):
        Recommender.fit(log, train_fraction=1.0, **sizes, **quick)
    earlier = tmp_path / "earlier"
    Recommender.fit(log, out=earlier, **sizes, **quick, max_epochs=4)
    epochs = [json.loads(line) for line in (earlier / "epochs.jsonl").read_text().splitlines()]
    best = [entry["epoch"] for entry in epochs if entry["best"]][-1]
    for given in ({"max_epochs": best}, {"epochs_of": earlier}):
        out = tmp_path / "-".join(given)
        whole = Recommender.fit(log, train_fraction=1.0, out=out, **sizes, **quick, **given)
        assert whole.popularity.sum() == log.num_interactions
        assert whole.settings["preparation"]["holdout"] == "none"
        assert len((out / "epochs.jsonl").read_text().splitlines()) == best
    with pytest.raises(InputError, match="epochs_of says how long to train, and so does"):
        Recommender.fit(log, epochs_of=earlier, **sizes, **QUICK)
    # A training without validation users knows of no best epoch.
    with pytest.raises(InputError, match="no epoch found anything for validation users"):
        Recommender.fit(
            log, train_fraction=1.0, epochs_of=tmp_path / "max_epochs", **sizes, **quick
        )


def test_learnt_codes_have_the_sizes_that_a_fit_is_given() -> None:
    recommender = Recommender.fit(
        walks(60, 90, "strings"),
        num_splits=4,
        num_sub_items=16,
        device="cpu",
        **SMALL | {"codes": "learnt", "full_epochs": 1},
    )
    assert (recommender.index.num_splits, recommender.index.num_sub_items) == (4, 16)


def test_a_small_log_can_be_fitted_without_choosing_sizes() -> None:
    log = walks(20, 30, "integers", seed=2)
    recommender = Recommender.fit(log, device="cpu", **QUICK)
    first = log.item_ids[0]
    found = recommender.recommend([[first]], 100)
    assert sorted(found.items[0]) == sorted(log.item_ids.take(range(1, 30)))


def test_a_fit_of_another_preset_has_its_settings() -> None:
    log = walks(20, 30, "integers", seed=2)
    recommender = Recommender.fit(
        log, num_splits=2, num_sub_items=8, device="cpu", **QUICK | {"preset": "gbert4rec"}
    )
    assert recommender.settings["model"]["architecture"] == "bert4rec"
    assert len(recommender.recommend([[log.item_ids[3]]], 4).items[0]) == 4


def test_a_fit_tells_of_its_epochs_unless_it_is_told_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = walks(20, 30, "integers", seed=2)
    quick = QUICK | {"max_epochs": 2, "device": "cpu"}
    Recommender.fit(log, **quick)
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert [line.split()[:2] for line in lines] == [["epoch", "1"], ["epoch", "2"]]
    assert all(re.search(r"steps/s  at most \d+ (s|min) to go$", line) for line in lines)
    reports: list[EpochReport] = []
    Recommender.fit(log, **quick, on_epoch=reports.append)
    assert [report.epoch for report in reports] == [1, 2]
    Recommender.fit(log, **quick, progress=False)
    assert capsys.readouterr().err == ""


def test_a_fit_ends_when_its_minutes_are_over(tmp_path: Path) -> None:
    log = walks(20, 30, "integers", seed=2)
    reports: list[EpochReport] = []
    quick = QUICK | {"max_epochs": 50, "device": "cpu", "on_epoch": reports.append}
    whole = Recommender.fit(log, **quick, max_minutes=1e-9)
    assert [report.epoch for report in reports] == [1]  # the one that was begun
    assert len(whole.recommend([[log.item_ids[3]]], 4).items[0]) == 4
    for minutes in (0, float("nan")):
        with pytest.raises(InputError, match="max_minutes is"):
            Recommender.fit(log, **quick, out=tmp_path / "out", max_minutes=minutes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"widht": 16}, "unknown setting 'widht': did you mean 'width'?"),
        ({"learning_rat": 0.1}, "did you mean 'learning_rate'?"),
        ({"preset": "gsasrek"}, "unknown preset 'gsasrek': did you mean 'gsasrec'?"),
        ({"width": 0}, "width is 0"),
        ({"train_fraction": 2.0}, "train_fraction is 2.0"),
        ({"num_splits": 0}, "num_splits is 0"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    log = walks(20, 30, "integers", seed=2)
    with pytest.raises(InputError) as refused:
        Recommender.fit(log, device="cpu", out=tmp_path / "out", **values)
    assert message in str(refused.value)
    assert not (tmp_path / "out").exists()


def full_table(num_items: int, folder: Path) -> Prepared:
    """An untrained model with a vector for every item of a large catalogue."""
    values = {"embedding": "full", "width": 2, "length": 3, "num_blocks": 1}
    settings = Settings().with_values(values)
    codes = np.zeros((num_items, 1), np.uint8)
    prepared = prepared_of([[1, 2, 3, 4]], codes, 2)
    folder.mkdir()
    torch.manual_seed(0)
    save_model(folder, settings, build_model(settings.model, codes, 2), prepared.checksum(), 0.0)
    return prepared


def test_a_full_table_of_too_many_items_is_refused_with_the_reason(tmp_path: Path) -> None:
    prepared = full_table(65_537, tmp_path / "large")
    with pytest.raises(InputError, match=r"65,537 items.*up to 65,536.*recjpq"):
        Recommender.from_training(prepared, tmp_path / "large")


def test_a_full_table_may_have_as_many_items_as_there_are_codes(tmp_path: Path) -> None:
    prepared = full_table(65_536, tmp_path / "large")
    recommender = Recommender.from_training(prepared, tmp_path / "large")
    found = recommender.recommend([[65_535, 3]], 3, exclude_seen=False)
    model, _ = load_model(tmp_path / "large", prepared)
    with torch.inference_mode():
        vectors = model.embedding.vectors(torch.arange(65_536))
        scores = vectors.numpy() @ model.encode_last(vectors[[65_535, 3]][None])[0].numpy()
    assert np.allclose(found.scores[0], np.sort(scores)[::-1][:3])
    recommender.save(tmp_path / "saved")
    loaded = Recommender.load(tmp_path / "saved", encoder="torch")
    assert_same_answers(loaded.recommend([[65_535, 3]], 3, exclude_seen=False), found)


def test_a_log_is_fitted_as_it_comes(tmp_path: Path) -> None:
    log = walks(30, 40, "strings", seed=2)
    users = np.repeat(np.arange(log.num_users), log.lengths)
    rows = {
        "user": [log.user_ids[user] for user in users.tolist()],
        "item": log.item_ids.take(log.items.tolist()),
        "time": (log.times // 1_000_000).tolist(),
    }
    file = tmp_path / "log.parquet"
    pl.DataFrame(rows).write_parquet(file)
    sizes = {"num_splits": 4, "num_sub_items": 8, "device": "cpu"}
    found = [
        Recommender.fit(given, **sizes, **QUICK).recommend([["a", "b"]], 5)  # type: ignore[arg-type]
        for given in (log, rows, str(file), pl.DataFrame(rows).to_pandas())
    ]
    assert all(np.array_equal(one.scores, found[0].scores) for one in found)
