"""Tuning: trials that validation users judge, a table, the best settings; stopped and gone on."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recprune import InputError, Settings, StorageError, Targets
from recprune.cli import main
from recprune.models.settings import find_preset
from recprune.preparation.prepared import Prepared
from recprune.training.loop import EpochReport
from recprune.training.tuning import BEST, STUDY, TABLE, TrialReport, trial_folder, tune
from recprune.training.tuning_space import DEFAULT_SPACE, read_space
from tests.preparation.test_prepared import cycle

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other

SMALL: dict[str, Any] = {
    "width": 16, "length": 8, "num_blocks": 1, "num_negatives": 4, "batch_size": 20,
    "max_epochs": 4, "learning_rate": 0.01,
}  # fmt: skip
SPACE = {"width": [8, 16], "dropout": {"from": 0.0, "to": 0.5}}


def small(**values: Any) -> Settings:
    return find_preset("gsasrec").with_values({**SMALL, **values})


def tuned(out: Path, prepared: Prepared | None = None, **arguments: Any) -> list[TrialReport]:
    given: dict[str, Any] = {"space": SPACE, "trials": 3, "device": "cpu"}
    settings = arguments.pop("settings", small())
    return tune(prepared or cycle(), settings, out, **{**given, **arguments})


def table_of(out: Path) -> list[dict[str, str]]:
    with (out / TABLE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_three_trials_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared, out, space = tmp_path / "prepared", tmp_path / "tuned", tmp_path / "space.json"
    cycle().save(prepared)
    space.write_text(json.dumps({**SPACE, "length": [4, 8]}))
    fixed = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    free = [word for word in fixed if word != "width=16"]
    del free[0]  # the --set before it
    words = ["tune", str(prepared), "--out", str(out), "--space", str(space), "--device", "cpu"]
    assert main([*words, "--trials", "3", "--preset", "gsasrec", *free]) == 0
    shown = capsys.readouterr()
    assert "The best of 3 trials, by NDCG@10 of the validation users" in shown.out
    assert shown.err.count("complete, NDCG@10 0.") == 3
    assert re.search(r"trial 0 begins: width (8|16), dropout 0\.2\n", shown.err)  # the preset's
    rows = table_of(out)
    assert len(rows) == 3
    figures = [float(row["NDCG@10"]) for row in rows]
    assert figures == sorted(figures, reverse=True)
    assert figures[0] > 0.0
    assert "length" not in rows[0]  # given, so not tried
    assert {row["width"] for row in rows} <= {"8", "16"}
    assert all(0.0 <= float(row["dropout"]) <= 0.5 for row in rows)
    # The best trial is a model like any other, and its settings are what train takes.
    best = trial_folder(out, int(rows[0]["trial"]))
    assert f"the best model in {best}" in shown.err.replace("\n", "")
    assert main(["evaluate", str(prepared), str(best), "--no-baselines"]) == 0
    model = tmp_path / "model"
    again = ["train", str(prepared), "--settings", str(out / BEST), "--out", str(model)]
    assert main([*again, "--device", "cpu"]) == 0
    assert (model / "model.safetensors").read_bytes() == (best / "model.safetensors").read_bytes()
    settings = Settings.from_json(json.loads((out / BEST).read_text()))
    assert (settings.training.patience, settings.model.length) == (10, 8)
    # Only the best keeps its weights, and none can go on.
    assert len(list(out.glob("trials/*/model.safetensors"))) == 1
    assert list(out.glob("trials/*/checkpoint.safetensors")) == []
    assert len(list(out.glob("trials/*/epochs.jsonl"))) == 3


def test_the_settings_to_begin_with_are_tried_first(tmp_path: Path) -> None:
    reports = tuned(tmp_path, trials=1, settings=small(dropout=0.25))
    assert reports[0].values == {"width": 16, "dropout": 0.25}
    # What the space does not have is drawn from it.
    reports = tuned(tmp_path / "other", trials=1, settings=small(width=4, dropout=0.25))
    assert reports[0].values["width"] in (8, 16)
    assert reports[0].values["dropout"] == 0.25


def test_test_users_have_no_say(tmp_path: Path) -> None:
    prepared = cycle()
    none = Targets(*(np.zeros(0, array.dtype) for array in dataclasses.astuple(prepared.test)))
    untested = dataclasses.replace(prepared, test=none)
    figures = []
    for name, log in (("tested", prepared), ("untested", untested)):
        reports = tuned(tmp_path / name, log)
        figures.append([(report.number, report.ndcg, report.values) for report in reports])
    assert figures[0] == figures[1]


def test_what_is_hopeless_is_given_up(tmp_path: Path) -> None:
    space = {"learning_rate": [0.01, 1e-9, 1e-10]}
    settings = small(max_epochs=8, loss="softmax", width=32, dropout=0.0)
    seen = []
    reports = tuned(
        tmp_path,
        space=space,
        settings=settings,
        startup_trials=1,
        on_epoch=lambda trial, report: seen.append((trial, report.epoch)),
    )
    best, *others = reports
    assert (best.number, best.state, best.epochs) == (0, "complete", 8)
    assert best.values == {"learning_rate": 0.01}
    assert [report.state for report in others] == ["given up", "given up"]
    assert [report.epochs for report in others] == [3, 3]
    assert len(seen) == 8 + 3 + 3
    assert json.loads((tmp_path / BEST).read_text())["training"]["learning_rate"] == 0.01


def test_a_tuning_that_ran_out_of_time_goes_on(tmp_path: Path) -> None:
    whole = {report.number: report for report in tuned(tmp_path / "whole")}
    (first,) = tuned(tmp_path / "parts", max_seconds=1e-6)
    assert (first.number, first.state, first.epochs) == (0, "unfinished", 1)
    assert table_of(tmp_path / "parts")[0]["state"] == "unfinished"
    assert (tmp_path / "parts" / BEST).exists()

    def crash(trial: int, report: EpochReport) -> None:
        if (trial, report.epoch) == (0, 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path / "parts", resume=True, on_epoch=crash)
    reports = tuned(tmp_path / "parts", resume=True)
    assert len(reports) == 3
    (again,) = (report for report in reports if report.number == 0)
    # The trial that was interrupted took the steps that it would have taken anyway.
    assert dataclasses.replace(again, seconds=0.0) == dataclasses.replace(whole[0], seconds=0.0)
    # Trials count in all: nothing is left to do.
    assert tuned(tmp_path / "parts", resume=True) == reports
    assert len(tuned(tmp_path / "parts", trials=4, resume=True)) == 4


def test_ctrl_c_and_on(tmp_path: Path) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "tuned"
    cycle().save(prepared)
    space = tmp_path / "space.json"
    space.write_text(json.dumps({"dropout": {"from": 0.0, "to": 0.5}}))
    fixed = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "recprune.cli", "tune", str(prepared), "--out", str(out)]
    command += ["--space", str(space), "--device", "cpu", "--set", "patience=100000", *fixed]
    long = [*command, "--set", "max_epochs=100000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(long, stderr=subprocess.PIPE, text=True, env=environment)
    begun = time.monotonic()
    epochs = trial_folder(out, 0) / "epochs.jsonl"
    while not (epochs.exists() and epochs.read_text()) and time.monotonic() < begun + 120:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == 130, complaint
    assert "trial 0 was interrupted in epoch" in complaint
    assert "all is saved: go on with --resume" in complaint
    (row,) = table_of(out)
    assert row["state"] == "unfinished"
    done = len(epochs.read_text().splitlines())
    minutes = ["--resume", "--max-minutes", "0.0001"]  # one more epoch
    resumed = subprocess.run(
        [*long, *minutes], capture_output=True, text=True, env=environment, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert len(epochs.read_text().splitlines()) == done + 1
    assert "time was up after 0 of" in resumed.stderr
    assert f"trial 0 goes on after epoch {done}: dropout" in resumed.stderr
    assert "The only trial, NDCG@10" in resumed.stdout


def test_nothing_is_tried_twice(tmp_path: Path) -> None:
    reports = tuned(tmp_path, space={"width": [8, 16]}, trials=9, settings=small(max_epochs=1))
    assert {report.values["width"] for report in reports} == {8, 16}
    assert len(reports) == 2


def test_settings_that_cannot_be_are_failures_with_a_reason(tmp_path: Path) -> None:
    settings = small(max_epochs=1)
    reports = tuned(tmp_path, space={"width": [15, 16]}, trials=2, settings=settings)
    assert [report.state for report in reports] == ["complete", "failed"]
    assert "15" in reports[1].reason
    assert table_of(tmp_path)[1]["reason"] == reports[1].reason
    wrong = {"width": list(range(17, 97, 4))}
    with pytest.raises(InputError, match="10 trials in a row failed; the last: .*width"):
        tuned(tmp_path / "wrong", space=wrong, trials=30, settings=settings)


# Spaces ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "the space to try is empty"),
        ({"widht": [1]}, "unknown setting 'widht': did you mean 'width'"),
        ({"width": []}, "width is [], expected a list of choices, or a range"),
        ({"width": 64}, "width is 64, expected a list of choices, or a range"),
        ({"width": {"from": 1}}, "expected a list of choices, or a range"),
        ({"width": {"from": 1, "to": 2, "step": 1}}, "expected a list of choices, or a range"),
        ({"width": {"from": 1.5, "to": 2}}, "width goes from 1.5 to 2, expected ints"),
        ({"dropout": {"from": "0", "to": 2}}, "dropout goes from '0' to 2, expected floats"),
        ({"width": {"from": 9, "to": 2}}, "space: width: "),
        ({"dropout": {"from": 0.0, "to": 1, "log": True}}, "space: dropout: "),
        ({"loss": {"from": 0, "to": 1}}, "loss has no range, give a list of choices"),
        ({"exclude_seen": {"from": 0, "to": 1}}, "exclude_seen has no range"),
        ({"width": [[1]]}, "width has choices that are no plain values"),
    ],
)
def test_wrong_spaces_are_refused(tmp_path: Path, space: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        tuned(tmp_path / "out", space=space)
    assert message in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_the_default_space_can_be_read_and_narrowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(read_space(DEFAULT_SPACE)) == set(DEFAULT_SPACE)
    assert main(["tune", "--list-space"]) == 0
    assert json.loads(capsys.readouterr().out) == DEFAULT_SPACE
    settings = tmp_path / "settings.json"
    settings.write_text('{"model": {"width": 64}}')
    given = ["--set", "dropout=0.1", "--settings", str(settings)]
    assert main(["tune", "--list-space", *given]) == 0
    left = json.loads(capsys.readouterr().out)
    assert set(left) == set(DEFAULT_SPACE) - {"dropout", "width"}


# Mistakes ----------------------------------------------------------------------------------------


def test_folders_are_neither_mixed_up_nor_written_over(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match="out: holds no tuning to go on with"):
        tuned(out, resume=True)
    tuned(out, trials=1, settings=small(max_epochs=1))
    with pytest.raises(InputError, match="out: holds a tuning already: go on with --resume"):
        tuned(out)
    for other, arguments in (
        ("settings", {"settings": small(max_epochs=2)}),
        ("space", {"settings": small(max_epochs=1), "space": {"width": [8]}}),
        ("prepared log", {"settings": small(max_epochs=1), "prepared": cycle(seed=1)}),
    ):
        with pytest.raises(InputError, match=f"was tuned with another {other}"):
            tuned(out, resume=True, **arguments)
    (out / STUDY).write_bytes(b"no database" * 100)
    with pytest.raises(StorageError, match=r"study.db: not a study"):
        tuned(out, resume=True, settings=small(max_epochs=1))


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="trials is 0, expected at least 1"):
        tuned(tmp_path, trials=0)
    with pytest.raises(InputError, match="device 'abacus' cannot be used here"):
        tuned(tmp_path, device="abacus")
    prepared = cycle()
    none = Targets(*(np.zeros(0, part.dtype) for part in dataclasses.astuple(prepared.validation)))
    with pytest.raises(InputError, match="no validation users to judge trials by"):
        tuned(tmp_path, dataclasses.replace(prepared, validation=none))
    prepared.save(tmp_path / "prepared")
    (tmp_path / "list.json").write_text("[]")
    folder, out = str(tmp_path / "prepared"), ["--out", str(tmp_path / "out")]
    for words, message in (
        ([], "the folder of a prepared log is missing"),
        ([folder], "--out FOLDER is missing"),
        ([folder, *out, "--max-minutes", "0"], "--max-minutes is 0.0, expected more than 0"),
        ([folder, *out, "--space", str(tmp_path / "none.json")], "none.json: cannot be read"),
        ([folder, *out, "--space", str(tmp_path / "list.json")], "list.json: expected an object"),
        ([folder, *out, "--set", "widht=1"], "unknown setting 'widht'"),
    ):
        assert main(["tune", *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
