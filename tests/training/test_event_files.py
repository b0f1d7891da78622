"""What TensorBoard is told of a training: read back by its own reader."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recprune.cli import main
from recprune.training.event_files import event_files
from recprune.training.loop import EpochReport
from tests.preparation.test_prepared import cycle
from tests.training.test_training import SETTINGS


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the step and value of every event, by tag."""
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def report(epoch: int, loss: float) -> EpochReport:
    return EpochReport(epoch, loss, 0.5, True, 10 * epoch, 4.0, 1.0)


def test_a_training_is_read_back(tmp_path: Path) -> None:
    cycle(20).save(tmp_path / "prepared")
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "out"), *SETTINGS]
    assert main([*arguments, "--tensorboard", str(tmp_path / "runs" / "one")]) == 0
    written = (tmp_path / "out" / "epochs.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in written.splitlines()]
    assert len(lines) > 1
    found = read(tmp_path / "runs" / "one")
    for tag, name in (
        ("training/loss", "loss"),
        ("training/steps per second", "steps_per_second"),
        ("validation/NDCG@10", "ndcg"),
    ):
        steps, values = zip(*found.pop(tag), strict=True)
        assert list(steps) == [line["epoch"] for line in lines]
        assert values == pytest.approx([line[name] for line in lines], rel=1e-6)  # float32
    assert found == {}


def test_epochs_that_were_undone_are_replaced(tmp_path: Path) -> None:
    with event_files(tmp_path, validated=False) as on_epoch:
        for epoch in (1, 2, 3):
            on_epoch(report(epoch, epoch / 2))
    with event_files(tmp_path, validated=False) as on_epoch:  # resumed after the first
        on_epoch(report(2, 0.25))
    found = read(tmp_path)
    assert found["training/loss"] == [(1, 0.5), (2, 0.25)]
    assert found["training/steps per second"] == [(1, 4.0), (2, 4.0)]
    assert "validation/NDCG@10" not in found


def test_what_is_in_the_way_is_said_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cycle(20).save(tmp_path / "prepared")
    (tmp_path / "file").touch()
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "out"), *SETTINGS]
    assert main([*arguments, "--tensorboard", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'}: cannot be written" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert main([*arguments, "--tensorboard", str(tmp_path / "runs")]) == 2
    assert "pip install 'recprune[tensorboard]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
