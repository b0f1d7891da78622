from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recprune import (
    PRESETS,
    InputError,
    Interactions,
    SyntheticSettings,
    log_statistics,
    read_interactions,
    synthetic_log,
    temporal_holdout,
    write_synthetic_log,
)

SMALL = SyntheticSettings(50, 200, 3_000, seed=3, items_per_cluster=20)


@given(st.integers(1, 60), st.integers(1, 300), st.integers(0, 2_000), st.integers(0, 3))
def test_sizes_are_exact_whatever_they_are(users: int, items: int, more: int, seed: int) -> None:
    interactions = max(5 * users, items) + more
    settings = SyntheticSettings(users, items, interactions, seed=seed, items_per_cluster=7)
    log = synthetic_log(settings)
    assert len(log.users) == len(log.items) == len(log.times) == interactions
    assert np.array_equal(np.unique(log.items), np.arange(items))
    assert np.bincount(log.users, minlength=users).min() >= 5
    within_user = np.diff(log.users) == 0
    assert (np.diff(log.times)[within_user] >= 0).all()
    assert (np.diff(log.users) >= 0).all()


def test_the_seed_decides_everything() -> None:
    one, same, other = (synthetic_log(replace(SMALL, seed=seed)) for seed in (3, 3, 4))
    assert np.array_equal(one.items, same.items)
    assert np.array_equal(one.times, same.times)
    assert not np.array_equal(one.items, other.items)


def test_the_log_has_the_properties_that_matter(small_log: Interactions) -> None:
    statistics = log_statistics(small_log)
    assert 0.15 < statistics.repeat_share < 0.75
    assert statistics.gini > 0.4
    assert statistics.p95_length > 2.5 * statistics.median_length


def test_the_next_item_can_be_learnt(small_log: Interactions) -> None:
    """A first-order Markov chain must beat popularity by far, or no model could learn either."""
    holdout = temporal_holdout(small_log, validation_users=0)
    train, test = holdout.train, holdout.test
    follows = np.zeros((small_log.num_items, small_log.num_items))
    same_user = np.ones(train.num_interactions, bool)
    same_user[train.offsets[:-1][train.lengths > 0]] = False
    after = np.flatnonzero(same_user)
    np.add.at(follows, (train.items[after - 1], train.items[after]), 1)
    popular = np.argsort(-np.bincount(train.items, minlength=small_log.num_items))[:10]
    markov_hits = popular_hits = 0
    for target in range(len(test)):
        last = holdout.history(test, target)[-1]
        markov_hits += int(test.items[target] in np.argsort(-follows[last])[:10])
        popular_hits += int(test.items[target] in popular)
    assert markov_hits > 3 * popular_hits
    assert markov_hits > 0.2 * len(test)


def test_the_presets_have_the_paper_s_sizes() -> None:
    gowalla, tmall = PRESETS["gowalla-like"], PRESETS["tmall-like"]
    assert (gowalla.num_users, gowalla.num_items, gowalla.num_interactions) == (
        86168,
        1271638,
        6397903,
    )
    assert (tmall.num_users, tmall.num_items, tmall.num_interactions) == (473376, 2194464, 34850828)


def test_the_file_reads_back_as_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    write_synthetic_log(path, SMALL)
    log, drawn = read_interactions(path), synthetic_log(SMALL)
    assert np.array_equal(log.items, drawn.items)
    assert np.array_equal(log.times, drawn.times * 1_000_000)
    assert pl.read_parquet_schema(path)["item_id"] == pl.Int32
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.parquet"]


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder.parquet"
    folder.mkdir()
    with pytest.raises(InputError, match="is a folder"):
        write_synthetic_log(folder, SMALL)
    with pytest.raises(InputError, match="its name must end in .parquet"):
        write_synthetic_log(tmp_path / "log.csv", SMALL)
    with pytest.raises(InputError, match="does not exist"):
        write_synthetic_log(tmp_path / "nowhere" / "log.parquet", SMALL)


def test_a_write_that_fails_is_named_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    path.write_text("what was there before")
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)); "
        "from recprune.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = ["synth", "--preset", "gowalla-like", "--users", "500", "--items", "5000"]
    result = subprocess.run(
        [sys.executable, "-c", program, *command, "--interactions", "20000", "--out", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "log.parquet: cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert path.read_text() == "what was there before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.parquet"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_users": 0}, "num_users is 0"),
        ({"num_interactions": 249}, "expected at least 250"),
        ({"repeat": 1.5}, "repeat is 1.5"),
        ({"num_items": 2**31, "num_interactions": 2**32}, "at most 2³¹ − 1"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(SMALL, **changes)  # type: ignore[arg-type]
