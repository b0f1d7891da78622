"""Cold items in training: placed by hand-worked numbers, spared as negatives, found when asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recprune import ColdItems, Content, InputError, assign_svd, find_cold_items
from recprune.models.architectures import build_model
from recprune.models.embedding import FullEmbedding, RecJPQEmbedding
from recprune.models.losses import find_loss
from recprune.models.settings import Settings
from recprune.preparation.prepared import Prepared
from recprune.recommender.recommender import Recommender
from recprune.training.checkpoint import load_model, model_arrays
from recprune.training.loop import train
from recprune.training.negatives import Negatives
from recprune.training.placement import place_cold_items
from tests.preparation.test_prepared import cycle, prepared_of

torch.set_num_threads(1)

CPU = torch.device("cpu")
GROUPS, SIZE = 8, 6  # of items; the last of each group is cold
QUICK = {
    "width": 16, "num_blocks": 1, "length": 10, "dropout": 0.0, "loss": "softmax",
    "negatives": "shared", "num_negatives": 32, "batch_size": 16, "max_epochs": 12,
    "learning_rate": 0.01, "num_splits": 4, "num_sub_items": 16, "full_epochs": 6,
}  # fmt: skip


def groups(num_users: int = 64) -> Prepared:
    """Users stay with the items of one group, until the test asks for its cold one."""
    rng = np.random.default_rng(0)
    histories = []
    for user in range(num_users):
        first = user % GROUPS * SIZE
        own = first + rng.integers(0, SIZE - 1, 10)
        histories.append([*own.tolist(), first + SIZE - 1])
    codes = np.zeros((GROUPS * SIZE, 4), np.uint8)
    prepared = prepared_of(histories, codes, 16)
    log = prepared.train_log()
    return replace(prepared, codes=assign_svd(log, num_splits=4, num_sub_items=16).codes)


def with_content(prepared: Prepared) -> Prepared:
    items = np.arange(prepared.num_items)
    texts = [f"group{item // SIZE}/item" for item in items]
    return replace(prepared, cold=find_cold_items(Content(items, texts), prepared.train_log()))


def cold_items(items: list[int], neighbours: list[list[int]], weights: Any) -> ColdItems:
    return ColdItems(
        np.array(items, np.int32), np.array(neighbours, np.int32), np.array(weights, np.float32)
    )


# Placing ------------------------------------------------------------------------------------------


def test_the_code_of_a_cold_item_is_the_nearest_sub_item_by_hand() -> None:
    codes = np.array([[0, 0], [1, 1], [2, 0], [0, 2]], np.uint8)
    embedding = RecJPQEmbedding(codes, 3, 2)
    numbers = torch.tensor([[[0.0], [4.0], [10.0]], [[3.0], [-3.0], [0.5]]])
    with torch.no_grad():
        embedding.sub_item_embeddings.copy_(numbers)
    # Items 1 and 2 are (4, −3) and (10, 3); in equal shares that is (7, 0), which is 7 long. They
    # are 5 and √109 on average: 7.72. So (7.72, 0): nearest are 10 (of 0, 4, 10) and 0.5.
    place_cold_items(embedding, cold_items([3], [[1, 2]], [[0.5, 0.5]]), 1.0)
    assert embedding.codes.tolist() == [[0, 0], [1, 1], [2, 0], [2, 2]]
    # Half as long, the first number is 3.86: nearest is 4.
    place_cold_items(embedding, cold_items([3], [[1, 2]], [[0.5, 0.5]]), 0.5)
    assert embedding.codes[3].tolist() == [1, 2]


def test_the_vector_of_a_cold_item_is_as_long_as_its_neighbours_are() -> None:
    embedding = FullEmbedding(4, 2)
    before = torch.tensor([[3.0, 0.0], [0.0, 1.0], [9.0, 9.0], [5.0, 5.0]])
    with torch.no_grad():
        embedding.item_embeddings.copy_(before)
    # The third neighbour has no share. The mean is (1.5, 0.5), the mean length 2.
    place_cold_items(embedding, cold_items([3], [[0, 1, 2]], [[0.5, 0.5, 0.0]]), 1.5)
    expected = torch.tensor([1.5, 0.5]) * 1.5 * 2.0 / 2.5**0.5
    assert torch.allclose(embedding.item_embeddings[3], expected)
    assert torch.equal(embedding.item_embeddings[:3], before[:3])


def test_many_cold_items_are_placed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recprune.training.placement._NUMBERS_AT_ONCE", 7)
    embedding = FullEmbedding(40, 2)
    cold = cold_items(list(range(20, 40)), [[item] for item in range(20)], np.ones((20, 1)))
    place_cold_items(embedding, cold, 1.0)
    assert torch.allclose(embedding.item_embeddings[20:], embedding.item_embeddings[:20])


# Negatives ----------------------------------------------------------------------------------------


def negatives_of(prepared: Prepared, **values: Any) -> Negatives:
    settings = Settings().with_values(QUICK | values)
    model = build_model(settings.model, prepared.codes, prepared.num_sub_items)
    return Negatives(model, settings.training, prepared, CPU)


@pytest.mark.parametrize("negatives", ["own", "shared"])
def test_cold_items_are_never_drawn_and_all_others_are(negatives: str) -> None:
    prepared = with_content(groups())
    drawing = negatives_of(prepared, negatives=negatives)
    drawn = torch.cat([drawing.draw(torch.arange(100), 100).flatten() for _ in range(200)])
    warm = [item for item in range(prepared.num_items) if item % SIZE != SIZE - 1]
    assert torch.unique(drawn).tolist() == warm
    assert drawing.num_items == len(warm)


def test_without_content_draws_are_what_they_were() -> None:
    """Items without content are still pushed down: nothing is known that speaks for them."""
    prepared = groups()
    drawn = negatives_of(prepared).draw(torch.arange(9), 9, torch.Generator().manual_seed(5))
    expected = torch.randint(prepared.num_items, (32,), generator=torch.Generator().manual_seed(5))
    assert torch.equal(drawn, expected)


def test_logq_counts_the_items_that_can_be_drawn() -> None:
    prepared = with_content(groups())
    drawing = negatives_of(prepared, logq=True)
    wanted, drawn = torch.tensor([0]), torch.tensor([1])
    states = torch.zeros(1, 16)
    _, scores = drawing.scores(states, wanted, drawn)
    assert scores.item() == pytest.approx(-np.log(32 / (GROUPS * (SIZE - 1))), abs=1e-6)


def test_cross_entropy_does_not_see_cold_items() -> None:
    prepared = with_content(groups())
    full = negatives_of(prepared, loss="cross_entropy", embedding="full")
    wanted = torch.tensor([0, 1])
    states = torch.randn(2, 16, requires_grad=True)
    positive, scores = full.scores(states, wanted, torch.empty(0, dtype=torch.int64))
    settings = Settings().with_values(QUICK | {"loss": "cross_entropy"})
    loss = find_loss(settings.training, full.num_items)(positive, scores)
    others = [item for item in range(prepared.num_items) if item % SIZE != SIZE - 1]
    for row, target in enumerate(wanted.tolist()):
        compared = [item for item in others if item != target]
        both = torch.cat([positive[row : row + 1], scores[row, compared]])
        assert loss[row].item() == pytest.approx(-both.log_softmax(0)[0].item(), abs=1e-5)


# Training -----------------------------------------------------------------------------------------


def cold_recall(prepared: Prepared, folder: Path) -> float:
    recommender = Recommender.from_training(prepared, folder)
    test = prepared.test
    histories = [prepared.history(test, target) for target in range(len(test))]
    ids = recommender.rank(histories, SIZE).ids
    return float((ids == test.items[:, None]).any(axis=1).mean())


@pytest.mark.parametrize(
    "values", [{}, {"embedding": "full"}, {"codes": "learnt"}], ids=["svd", "full", "learnt"]
)
def test_cold_items_of_a_group_are_found_through_content_alone(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    prepared = groups()
    settings = Settings().with_values(QUICK | values)
    train(prepared, settings, tmp_path / "without", device="cpu")
    train(with_content(prepared), settings, tmp_path / "with", device="cpu")
    assert cold_recall(prepared, tmp_path / "without") < 0.1
    assert cold_recall(with_content(prepared), tmp_path / "with") > 0.6


@pytest.mark.parametrize("values", [{}, {"codes": "learnt", "full_epochs": 1}])
def test_a_resumed_training_with_cold_items_ends_where_it_would_have(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    prepared = with_content(groups())
    settings = Settings().with_values(QUICK | values | {"max_epochs": 4})
    train(prepared, settings, tmp_path / "whole", device="cpu")
    half = settings.with_values({"max_epochs": 2})
    train(prepared, half, tmp_path / "halves", device="cpu")
    train(prepared, settings, tmp_path / "halves", device="cpu", resume=True)
    whole, halves = (
        model_arrays(load_model(tmp_path / name, prepared)[0]) for name in ("whole", "halves")
    )
    for name, array in whole.items():
        assert np.array_equal(array, halves[name]), name


def test_models_trained_without_content_stay_valid_with_it(tmp_path: Path) -> None:
    prepared = groups()
    settings = Settings().with_values(QUICK | {"max_epochs": 1})
    train(prepared, settings, tmp_path / "plain", device="cpu")
    load_model(tmp_path / "plain", with_content(prepared))
    train(with_content(prepared), settings, tmp_path / "cold", device="cpu")
    with pytest.raises(InputError, match="another prepared log"):
        load_model(tmp_path / "cold", prepared)
    with pytest.raises(InputError, match="another prepared log"):
        load_model(tmp_path / "plain", cycle())
