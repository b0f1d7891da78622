"""A prepared log takes over the codes of a model, and everything else stays as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recprune import InputError, assign_random
from recprune.cli import main
from recprune.preparation.prepared import Prepared
from recprune.training.checkpoint import load_model
from recprune.training.loop import train
from recprune.training.recoding import model_codebook, with_codebook
from tests.preparation.test_prepared import cycle
from tests.training.test_minibatches import settings_of

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return cycle(30)


@pytest.fixture(scope="module")
def full(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("full")
    train(prepared, settings_of(embedding="full", max_epochs=2), out, device="cpu")
    return out


def test_codes_of_a_recjpq_model_are_taken_as_they_are(prepared: Prepared, tmp_path: Path) -> None:
    train(prepared, settings_of(codes="random", max_epochs=1, seed=5), tmp_path, device="cpu")
    codebook = model_codebook(prepared, tmp_path)
    drawn = assign_random(prepared.num_items, num_splits=4, num_sub_items=16, seed=5)
    assert not np.array_equal(drawn.codes, prepared.codes)
    assert np.array_equal(codebook.codes, drawn.codes)
    assert codebook.settings["method"] == "model"
    with pytest.raises(InputError, match="num_splits is 8, but the codes of .* have 4"):
        model_codebook(prepared, tmp_path, num_splits=8)


def test_vectors_of_a_full_table_are_cut(prepared: Prepared, full: Path) -> None:
    codebook = model_codebook(prepared, full, num_splits=2, num_sub_items=5)
    assert codebook.codes.shape == (prepared.num_items, 2)
    model, _ = load_model(full, prepared)
    vectors = model.embedding.all_vectors().detach().numpy()
    for split, parts in enumerate(np.split(vectors, 2, axis=1)):
        members = [parts[codebook.codes[:, split] == sub_item] for sub_item in range(5)]
        means = np.stack([part.mean(0) for part in members])
        nearest = ((parts[:, None] - means) ** 2).sum(-1).argmin(1)
        assert np.array_equal(nearest, codebook.codes[:, split])  # as k-means leaves them


def test_the_command_keeps_all_but_the_codes(
    prepared: Prepared, full: Path, tmp_path: Path
) -> None:
    before, after = str(tmp_path / "before"), str(tmp_path / "after")
    prepared.save(before)
    sizes = ["--splits", "8", "--sub-items", "4"]
    assert main(["recode", before, str(full), "--out", after, *sizes]) == 0
    recoded = Prepared.load(after)
    expected = model_codebook(prepared, full, num_splits=8, num_sub_items=4)
    assert np.array_equal(recoded.codes, expected.codes)
    assert recoded.num_sub_items == 4
    assert recoded.settings["codebook"]["method"] == "pq"
    with_old = with_codebook(recoded, assign_random(prepared.num_items, num_splits=4))
    for name in ("offsets", "items", "train_ends"):
        assert np.array_equal(getattr(with_old, name), getattr(prepared, name))
    assert np.array_equal(with_old.test.items, prepared.test.items)


def test_a_model_of_another_log_is_refused(
    prepared: Prepared, full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="was trained on another prepared log"):
        model_codebook(cycle(31), full)
    folder = str(tmp_path / "prepared")
    prepared.save(folder)
    out = tmp_path / "out"
    assert main(["recode", folder, str(full), "--out", str(out), "--splits", "0"]) == 2
    assert "num_splits is 0" in capsys.readouterr().err
    assert not out.exists()
