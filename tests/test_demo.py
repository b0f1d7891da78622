"""The guided tour runs from end to end and leaves its picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib.image

from recprune import METHODS, Recommender

ROOT = Path(__file__).parents[1]


def test_grocery(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.grocery", picture],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for piece in ("68,505", "test targets", "Bananas", "singular value", str(picture)):
        assert piece in shown.stdout.replace("\n", "")
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[1] > 1000
    assert pixels.std() > 0.05  # something is drawn on it


def test_recommend(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.recommend", "1", tmp_path / "model"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for piece in (
        "1 epochs, 39 steps",
        "popularity",
        "personal frequency",
        "own history",
        "NDCG@10",
        "Household",
        "recommended",
    ):
        assert piece in shown.stdout
    # Added, and in a condition that is true of it; not in another one, nor once it is removed.
    assert shown.stdout.count("The new product") == 2
    assert shown.stdout.count("✓") == 4  # every method returns the same
    assert (tmp_path / "model" / "training.png").stat().st_size > 10_000
    assert Recommender.load(tmp_path / "model" / "recommender", verify=True).item_ids


def test_search() -> None:
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.search"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for method in METHODS:
        assert method in shown.stdout
    assert shown.stdout.count("✓") == len(METHODS)
