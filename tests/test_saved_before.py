"""What version 0.1.0 has saved opens, and answers as it answered there.

The archive was made with that version's own commands: a log of 60 users, its codebook, a model, a
recommender, and indexes of random codes, beside what they answered.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from recprune import Codebook, Index, Prepared, Recommender
from recprune.cli import main
from recprune.shards.folder import load_shard, read_folder, shard_folder

ARCHIVE = Path(__file__).parent / "support" / "saved_by_0_1_0.tar.xz"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("before")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    return place / "saved"


@pytest.mark.parametrize("name", ["index", "compact", "eight"])
@pytest.mark.parametrize("method", ["auto", "scan", "pqtopk"])
def test_an_index_answers_with_the_same_bits(saved: Path, name: str, method: str) -> None:
    with np.load(saved / f"{name}.npz") as answered:
        top = Index.load(saved / name).search(answered["queries"], 10, method=method)
        assert top.ids.tolist() == answered["ids"].tolist()
        assert top.scores.tobytes() == answered["scores"].tobytes()


def test_shards_hold_what_the_index_held(saved: Path) -> None:
    whole = Index.load(saved / "eight")
    shards = read_folder(saved / "shards").shards
    parts = [load_shard(shard_folder(saved / "shards", each.number), each) for each in shards]
    assert len(parts) == 2
    codes = np.concatenate([part.item_codes() for part in parts])
    assert codes.tobytes() == whole.item_codes().tobytes()


def test_a_recommender_recommends_what_it_did(saved: Path, tmp_path: Path) -> None:
    answered = json.loads((saved / "recommended.json").read_text(encoding="utf-8"))
    recommender = Recommender.load(saved / "recommender")
    best = recommender.recommend(answered["histories"], k=5)
    assert best.items == answered["items"]
    for scores, expected in zip(best.scores, answered["scores"], strict=True):
        assert scores == pytest.approx(expected, rel=1e-5)
    recommender.save(tmp_path / "again")
    assert (
        Recommender.load(tmp_path / "again").recommend(answered["histories"], k=5).items
        == (answered["items"])
    )


def test_a_prepared_log_is_trained_on(saved: Path, tmp_path: Path) -> None:
    prepared = Prepared.load(saved / "prepared")
    codebook = Codebook.load(saved / "codebook")
    assert prepared.num_items == len(codebook.codes) == 120
    assert main(["evaluate", str(saved / "prepared"), str(saved / "model"), "--no-baselines"]) == 0
    assert (
        main(
            ["export", str(saved / "prepared"), str(saved / "model"), "--out", str(tmp_path / "r")]
        )
        == 0
    )
    assert Recommender.load(tmp_path / "r").index.num_items == 120
