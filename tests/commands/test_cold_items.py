"""Cold items, as typed: content goes into `prepare`, and `evaluate` tells cold targets apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recprune import read_content, read_interactions
from recprune.cli import main
from recprune.preparation.prepared import Prepared
from recprune.recommender.recommender import Recommender
from tests.support.shops import SETTINGS, SIZES, run_shown

torch.set_num_threads(1)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Users of two shops; half of them end with an item that nobody had before the cut."""
    rng = np.random.default_rng(3)
    rows = ["user_id,item_id,timestamp"]
    for user in range(40):
        shop = "tea" if user % 2 else "wine"
        for step, item in enumerate(rng.integers(0, 8, 9).tolist()):
            rows.append(f"u{user},{shop}{item},{1_500_000_000 + 1000 * step + user}")
        last = "new" if user % 4 < 2 else "0"
        rows.append(f"u{user},{shop}{last},{1_500_100_000 + user}")
    path = tmp_path / "log.csv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    names = [f"{shop}{item}" for shop in ("tea", "wine") for item in [*range(8), "new", "unsold"]]
    lines = ["item_id,title", *(f"{name},{name.rstrip('0123456789news')} shop" for name in names)]
    (tmp_path / "items.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_content_goes_into_prepare_and_cold_targets_stand_apart(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = log.parent
    prepared, content = str(folder / "prepared"), str(folder / "items.csv")
    shown = run_shown("prepare", str(log), "--content", content, "--out", prepared, *SIZES)
    assert "describes 18 of 18 items; 2 others are not in the log" in shown
    assert "2 of them get their place from content" in shown
    loaded = Prepared.load(prepared)
    assert loaded.settings["content"] == "items.csv"
    assert loaded.cold is not None
    assert loaded.item_ids.take(loaded.cold.items) == ["teanew", "winenew"]
    for names in (loaded.item_ids.take(row) for row in loaded.cold.neighbours):
        assert len({str(name).rstrip("0123456789") for name in names}) == 1  # of one shop
    run_shown("train", prepared, "--out", str(folder / "model"), "--device", "cpu", *SETTINGS)
    figures = folder / "figures.json"
    shown = run_shown(
        "evaluate", prepared, str(folder / "model"), "--no-baselines", "--json", str(figures)
    )
    assert "Where the target is cold, without a training interaction: 20 users, 50.0%" in shown
    assert "Where it is warm: 20 users" in shown
    assert all(f"{name}@{cutoff}" in shown for name in ("NDCG", "Recall") for cutoff in (10, 100))
    written = json.loads(figures.read_text())
    assert written["cold_share"] == 0.5
    cold = written["evaluations"][0]["cold"]
    assert cold["num_users"] == 20
    assert cold["metrics"]["Recall@100"]["mean"] == 1.0  # of 18 items


def test_options_of_content_need_content(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prepare", str(log), "--out", str(log.parent / "p"), "--content-text", "title"]
    assert main(words) == 2
    assert "go with --content" in capsys.readouterr().err
    wrong = [*words[:-1], "titel", "--content", str(log.parent / "items.csv")]
    assert main(wrong) == 2
    assert "no column 'titel' (did you mean 'title'?)" in capsys.readouterr().err


def test_a_recommender_is_fitted_with_content(log: Path) -> None:
    interactions = read_interactions(log)
    content = read_content(log.parent / "items.csv", interactions.item_ids)
    settings: dict[str, Any] = {"width": 16, "length": 8, "num_blocks": 1, "max_epochs": 1}
    sizes: dict[str, Any] = {
        "preset": "gsasrec",
        "num_splits": 4,
        "num_sub_items": 8,
        "num_negatives": 4,
    }
    plain, cold = (
        Recommender.fit(interactions, content=given, device="cpu", **sizes, **settings)
        for given in (None, content)
    )
    changed = (plain.index.item_codes() != cold.index.item_codes()).any(axis=1)
    names = interactions.item_ids.take(np.flatnonzero(changed))
    assert set(names) <= {"teanew", "winenew"}  # codes of the others are those of the SVD
    assert names
