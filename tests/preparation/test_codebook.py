from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from scipy.sparse import csr_array

from recprune import (
    Codebook,
    InputError,
    IntegerIds,
    Interactions,
    StorageError,
    assign_pq,
    assign_random,
    assign_svd,
    temporal_holdout,
)
from recprune.preparation.codebook import _item_components, _quantile_bins
from recprune.storage import load_folder, save_folder
from recprune.types import no_progress
from tests.conftest import log_of


def same(one: Codebook, other: Codebook) -> bool:
    return bool(np.array_equal(one.codes, other.codes)) and one.num_sub_items == other.num_sub_items


# SVD ---------------------------------------------------------------------------------------------


def test_components_are_those_of_a_dense_svd(small_log: Interactions) -> None:
    counts = csr_array(
        (np.ones(small_log.num_interactions), small_log.items, small_log.offsets),
        (small_log.num_users, small_log.num_items),
    )
    _, expected, vectors = np.linalg.svd(counts.toarray(), full_matrices=False)
    found, values = _item_components(small_log, 6, np.random.default_rng(0), no_progress)
    np.testing.assert_allclose(values, expected[:6], rtol=1e-8)
    overlap = np.abs(np.sum(found * vectors[:6], axis=1))
    np.testing.assert_allclose(overlap, 1.0, atol=1e-6)
    assert (found[np.arange(6), np.abs(found).argmax(axis=1)] > 0).all()


@pytest.mark.parametrize(
    ("num_splits", "num_sub_items"), [(8, 256), (1, 2), (3, 7), (5, 700), (2, 1)]
)
def test_every_sub_item_serves_the_same_number_of_items(
    small_log: Interactions, num_splits: int, num_sub_items: int
) -> None:
    codebook = assign_svd(small_log, num_splits=num_splits, num_sub_items=num_sub_items)
    occupancy = codebook.occupancy()
    assert occupancy.shape == (num_splits, num_sub_items)
    assert (occupancy.sum(axis=1) == small_log.num_items).all()
    assert occupancy.max() - occupancy.min() <= 1
    assert codebook.codes.dtype == (np.uint8 if num_sub_items <= 256 else np.uint16)
    assert len(codebook.settings["singular_values"]) == num_splits


def test_items_liked_by_the_same_users_share_sub_items() -> None:
    # Two worlds that never meet: users 0–9 know items 0–19, users 10–19 items 20–39.
    rng = np.random.default_rng(0)
    rows = [
        (user, int(item) + 20 * (user // 10), step)
        for user in range(20)
        for step, item in enumerate(rng.permutation(20)[:15])
    ]
    codes = assign_svd(log_of(*rows), num_splits=2, num_sub_items=2).codes
    # The two strongest directions are the two worlds, so one sub-item id is one world.
    for split in range(2):
        assert len(set(codes[:20, split].tolist())) == 1
        assert len(set(codes[20:, split].tolist())) == 1
        assert codes[0, split] != codes[20, split]


def test_the_seed_decides_and_items_without_training_spread_out(small_log: Interactions) -> None:
    train = temporal_holdout(small_log, train_fraction=0.3).train
    unseen = np.bincount(train.items, minlength=train.num_items) == 0
    assert unseen.sum() > 20
    one, again, other = (assign_svd(train, num_sub_items=64, seed=seed) for seed in (1, 1, 2))
    assert same(one, again)
    assert not same(one, other)
    # Their components are all exactly zero: only the noise tells them apart.
    assert len(np.unique(one.codes[unseen], axis=0)) > 0.9 * unseen.sum()


def test_codes_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        import numpy as np
        from recprune import *
        drawn = synthetic_log(SyntheticSettings(30_000, 20_000, 200_000, seed=1))
        log = interactions_from_columns(drawn.users, drawn.items, drawn.times)
        vectors = np.random.default_rng(0).standard_normal((20_000, 64)).astype(np.float32)
        quantised = assign_pq(vectors, num_splits=4, iterations=3, threads=int(sys.argv[2]))
        np.savez(sys.argv[1], svd=assign_svd(log).codes, pq=quantised.codebook.codes)
        """
    )
    results = []
    for threads in ("1", "4"):
        environment = os.environ | {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        path = tmp_path / f"{threads}.npz"
        subprocess.run([sys.executable, "-c", program, path, threads], check=True, env=environment)
        results.append(np.load(path))
    for method in ("svd", "pq"):
        assert np.array_equal(results[0][method], results[1][method])


@pytest.mark.parametrize(
    "rows",
    [
        [(user, item, 0) for user in range(30) for item in range(12)],  # rank 1
        [
            (user, 5 * user + item, 0) for user in range(300) for item in range(5)
        ],  # all values equal
        [(0, item, 0) for item in range(100)],  # one user
        [(user, 0, 0) for user in range(300)],  # one item
    ],
)
def test_degenerate_logs_get_codes_that_hang_on_the_seed_alone(
    rows: list[tuple[int, int, int]],
) -> None:
    log = log_of(*rows)
    codebooks = [assign_svd(log, num_splits=8, num_sub_items=4, seed=3) for _ in range(3)]
    assert same(codebooks[0], codebooks[1])
    assert same(codebooks[0], codebooks[2])
    occupancy = codebooks[0].occupancy()
    assert occupancy.max() - occupancy.min() <= 1


def test_the_sparse_and_the_dense_solver_agree(
    small_log: Interactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse, values = _item_components(small_log, 8, np.random.default_rng(0), no_progress)
    monkeypatch.setattr("recprune.preparation.codebook._DENSE_SIZE", 10_000)
    dense, dense_values = _item_components(small_log, 8, np.random.default_rng(0), no_progress)
    np.testing.assert_allclose(values, dense_values, rtol=1e-9)
    np.testing.assert_allclose(sparse, dense, atol=1e-6)


def test_a_log_without_interactions_gets_codes_by_chance(small_log: Interactions) -> None:
    empty = small_log.select(np.zeros(small_log.num_interactions, bool))
    codebook = assign_svd(empty, num_splits=2, num_sub_items=4)
    assert codebook.settings["singular_values"] == [0.0, 0.0]
    assert codebook.settings["unseen_items"] == small_log.num_items


def test_sums_run_on_one_thread() -> None:
    """Deterministic on any thread count: BLAS is held to one thread while it matters.

    In a process of its own, which has loaded nothing before: SciPy's BLAS is not NumPy's, and a
    library that is loaded later does not know of the limit.
    """
    program = textwrap.dedent(
        """
        import numpy as np
        from recprune import *
        from threadpoolctl import threadpool_info

        def look(step):
            if step.startswith(("SVD", "split")):
                pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
                print(*(pool["num_threads"] for pool in pools))

        drawn = synthetic_log(SyntheticSettings(400, 900, 12_000, seed=1))
        log = interactions_from_columns(drawn.users, drawn.items, drawn.times)
        assign_svd(log, progress=look)
        assign_pq(np.random.default_rng(0).random((300, 8), np.float32), progress=look)
        """
    )
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment
    )
    assert set(done.stdout.split()) == {"1"}


@given(npst.arrays(np.float64, st.integers(0, 50), elements=st.floats(-1, 1)), st.integers(1, 60))
def test_quantile_bins_follow_the_values(values: np.ndarray, num_bins: int) -> None:
    bins = _quantile_bins(values, num_bins)
    counts = np.bincount(bins, minlength=num_bins)
    assert len(counts) == num_bins
    assert counts.max() - counts.min() <= 1
    ordered = bins[np.argsort(values, kind="stable")]
    assert (np.diff(ordered) >= 0).all()


# Random and PQ -----------------------------------------------------------------------------------


def test_random_codes_are_balanced_and_seeded() -> None:
    one = assign_random(1000, num_splits=3, num_sub_items=300, seed=5)
    assert one.codes.dtype == np.uint16
    occupancy = one.occupancy()
    assert (occupancy.min(), occupancy.max()) == (3, 4)
    assert same(one, assign_random(1000, num_splits=3, num_sub_items=300, seed=5))
    assert not same(one, assign_random(1000, num_splits=3, num_sub_items=300, seed=6))
    assert assign_random(0, num_splits=1).codes.shape == (0, 1)


def test_pq_recovers_clusters_exactly() -> None:
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((2, 16, 4)).astype(np.float32) * 10
    chosen = rng.integers(0, 16, (500, 2))
    vectors = np.concatenate([centres[0][chosen[:, 0]], centres[1][chosen[:, 1]]], axis=1)
    quantised = assign_pq(vectors, num_splits=2, num_sub_items=16, iterations=100)
    codes, embeddings = quantised.codebook.codes, quantised.sub_item_embeddings
    rebuilt = np.concatenate([embeddings[m][codes[:, m]] for m in range(2)], axis=1)
    error = ((vectors - rebuilt) ** 2).sum() / ((vectors - vectors.mean(0)) ** 2).sum()
    assert quantised.relative_error == pytest.approx(error, abs=1e-6)
    assert quantised.relative_error < 0.02


def test_pq_does_not_mind_vectors_far_from_the_origin() -> None:
    vectors = np.random.default_rng(3).standard_normal((2000, 8)).astype(np.float32)
    near = assign_pq(vectors, num_splits=2, num_sub_items=16)
    far = assign_pq(vectors + np.float32(3000), num_splits=2, num_sub_items=16)
    assert far.relative_error == pytest.approx(near.relative_error, rel=0.05)


def test_pq_assigns_the_nearest_and_reports_its_error() -> None:
    vectors = np.random.default_rng(2).standard_normal((700, 12)).astype(np.float32)
    quantised = assign_pq(vectors, num_splits=3, num_sub_items=8, sample_size=300, seed=4)
    codes, embeddings = quantised.codebook.codes, quantised.sub_item_embeddings
    assert embeddings.shape == (3, 8, 4)
    total = 0.0
    for split in range(3):
        part = vectors[:, 4 * split : 4 * split + 4].astype(np.float64)
        distances = ((part[:, None] - embeddings[split][None]) ** 2).sum(axis=2)
        assert np.array_equal(codes[:, split], distances.argmin(axis=1))
        total += distances.min(axis=1).sum()
    spread = ((vectors - vectors.mean(axis=0)) ** 2).sum()
    assert quantised.relative_error == pytest.approx(total / spread, rel=1e-4)
    finer = assign_pq(vectors, num_splits=3, num_sub_items=64, seed=4)
    assert finer.relative_error < quantised.relative_error


@pytest.mark.parametrize(
    ("shape", "num_splits", "num_sub_items", "message"),
    [
        ((10, 8), 1, 11, "10 items cannot fill 11 sub-items"),
        ((10, 9), 2, 2, "width 9 do not divide into 2 splits"),
        ((10,), 1, 2, r"embeddings is float32\[10\]"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(
    shape: tuple[int, ...], num_splits: int, num_sub_items: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        assign_pq(np.zeros(shape, np.float32), num_splits=num_splits, num_sub_items=num_sub_items)


def test_vectors_with_nan_are_refused_by_position() -> None:
    vectors = np.zeros((10, 4), np.float32)
    vectors[7, 2] = np.nan
    with pytest.raises(InputError, match=r"embeddings\[7\] holds NaN or infinity"):
        assign_pq(vectors, num_splits=2, num_sub_items=2)


# The codebook itself -----------------------------------------------------------------------------


def test_save_and_load(small_log: Interactions, tmp_path: Path) -> None:
    codebook = assign_svd(small_log, num_splits=3, num_sub_items=300, seed=9)
    codebook.save(tmp_path / "codebook")
    loaded = Codebook.load(tmp_path / "codebook")
    assert same(codebook, loaded)
    assert loaded.settings == codebook.settings
    assert loaded.item_ids is not None
    assert loaded.item_ids[5] == small_log.item_ids[5]
    with pytest.raises(ValueError, match="read-only"):
        loaded.codes[0, 0] = 1


def test_a_codebook_without_ids_or_items_is_saved_too(tmp_path: Path) -> None:
    assign_random(0, num_splits=2).save(tmp_path / "empty")
    loaded = Codebook.load(tmp_path / "empty")
    assert loaded.codes.shape == (0, 2)
    assert loaded.item_ids is None


def test_a_damaged_codebook_is_refused(tmp_path: Path) -> None:
    assign_random(100, num_splits=2).save(tmp_path / "codebook")
    path = tmp_path / "codebook" / "codes.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StorageError, match="codes.npy: checksum does not match"):
        Codebook.load(tmp_path / "codebook")


def test_items_with_one_code_are_counted() -> None:
    codes = np.array([[0, 1], [1, 1], [0, 1], [1, 0], [1, 0], [1, 0]], np.uint8)
    assert Codebook(codes, 2).items_sharing_full_code() == 5


@pytest.mark.parametrize(
    ("codes", "num_sub_items", "message"),
    [
        (np.zeros((2, 2), np.uint8), 300, "codes is uint8, expected uint16 for 300 sub-items"),
        (np.array([[0, 1], [2, 3]], np.uint8), 3, r"codes\[1, 1\] is 3, expected less than 3"),
        (np.zeros(4, np.uint8), 2, "num_splits is 0"),
        (np.zeros((2, 2), np.uint16), 65_537, "num_sub_items is 65537, expected 1 to 65536"),
    ],
)
def test_codes_that_do_not_fit_are_refused(
    codes: np.ndarray, num_sub_items: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Codebook(codes, num_sub_items)


@pytest.mark.parametrize(
    ("settings", "codes", "message"),
    [
        ({"num_sub_items": 3}, None, "codes.* expected less than 3"),
        ({"num_sub_items": "9"}, None, "num_sub_items is '9'"),
        ({"num_sub_items": True}, None, "num_sub_items is True"),
        ({}, np.zeros((3, 2), np.uint16), "codes is uint16"),
        ({}, np.zeros((3, 2), np.uint8), "50 item ids for 3 codes"),
        ({}, np.zeros(3, np.uint8), "num_splits is 0"),
    ],
)
def test_a_saved_codebook_is_checked_and_named(
    tmp_path: Path, settings: dict[str, Any], codes: Any, message: str
) -> None:
    ids = IntegerIds(np.arange(50))
    assign_random(50, num_splits=2, num_sub_items=9, item_ids=ids).save(tmp_path / "mine")
    saved = load_folder(tmp_path / "mine", kind="codebook", version=1)
    arrays = {name: np.array(array) for name, array in saved.arrays.items()}
    if codes is not None:
        arrays["codes"] = codes
    changed = replace(saved, arrays=arrays, settings={**saved.settings, **settings})
    save_folder(tmp_path / "mine", changed)
    with pytest.raises(StorageError, match=f"mine: .*{message}"):
        Codebook.load(tmp_path / "mine")
